"""Worlds of ranks, one after another: which processes take part, what they go on from, and how rank 0 calls them.

In the order of reading:

    members   the processes that are ranks or would be, and their places in a world
    kept      the state between two batches, in rank 0
    steady    the part of the backend that calls ranks, and begins again in another world when some are lost
"""
