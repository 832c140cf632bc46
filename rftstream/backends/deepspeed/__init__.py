"""The DeepSpeed backend: the optimizer step on several devices, with one process per device.

In the order of reading:

    backend               the Backend that the trainer calls
    rank_processes, rank  the processes, and what each of them does
    wire                  how the backend talks to them
    publishing            how all ranks publish a version, each its part
    shards                how whole weights and optimizer states are gathered from their parts
    held                  all tensors of DeepSpeed, which leave the device when another process uses it
"""
