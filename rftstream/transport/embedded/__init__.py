"""The embedded transport: the log is one SQLite file in the run folder, shared by the processes of one machine.

In the order of reading:

    transport, clients   the Transport, and its producers and consumers
    store                the file: its tables, its transactions, and errors in our words
    groups, member       consumer groups: who has which partitions
    lock, wakeup         who may write, and how readers hear of new records
    admin, system_check  topics, positions and retention, and whether the file system can carry the log
"""
