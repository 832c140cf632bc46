"""The memory transport: the log is in the memory of one process, for tests and simulation.

In the order of reading:

    transport, clients  the Transport, and its producers and consumers
    log                 records and consumer groups
    transactions        what a producer has written and not yet committed
"""
