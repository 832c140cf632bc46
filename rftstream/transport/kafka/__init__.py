"""The Kafka transport: the log is a Kafka cluster. This folder is the sole importer of kafka-python.

In the order of reading:

    transport, connection  the Transport, and how clients are made
    producer               transactions, and what is known of their result
    member, feed           reading by position or as a member of a group, and what was fetched and not yet asked for
    admin, ends            topics, positions and retention, and where partitions begin and end
    admin_connection       questions to the brokers, asked again while brokers come and go
    cluster_check          what is right and wrong with a cluster
    client.compat, client.compat_consumer, client.selector
                           what kafka-python does otherwise here than by itself
"""
