"""The embedded transport: the log is one SQLite file in the run folder, shared by the processes of one machine.

In the order of reading:

    transport, clients   the Transport, and its producers and consumers
    store                the file: its tables, its transactions, and the translation of SQLite's errors
    groups, member       consumer groups: which member owns which partitions
    lock, wakeup         the lock for writing, and the notice of new records
    admin, system_check  topics, positions and retention, and whether the file system can carry the log
"""
