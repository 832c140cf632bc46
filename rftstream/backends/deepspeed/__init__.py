"""The DeepSpeed backend: the optimizer step on several devices, with one process per device.

In the order of reading:

    backend               the Backend that the trainer calls
    rank_processes, rank  the processes, and what each of them does
    wire                  how the backend talks to them
    worlds                ranks that die and come between two batches, and how all of them are called
    publishing            how all ranks publish a version, each its part
    shards                how whole weights and optimizer states are gathered from their parts
    held                  all tensors of DeepSpeed, which leave the device when another process uses it
"""
