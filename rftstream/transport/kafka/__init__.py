"""The Kafka transport: the log is a Kafka cluster. Only this folder imports kafka-python.

In the order of reading:

    transport, connection  the Transport, and how clients are made
    producer               transactions, and how certain their results are
    member, feed           reading by position or as a member of a group, and the records fetched ahead
    admin, ends            topics, positions and retention, and the ends of partitions
    admin_connection       requests to the brokers, repeated while brokers come and go
    cluster_check          checks of a cluster
    client.compat, client.compat_consumer, client.selector
                           our changes of kafka-python's behaviour
"""
