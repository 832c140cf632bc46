"""The DeepSpeed backend: the optimizer step on several devices, in a process for each.

In the order of reading:

    backend               the Backend that the trainer calls
    rank_processes, rank  the processes, and what each of them does
    wire                  how the backend talks to them
    shards                how their weights and optimizer states become whole ones
    held                  all tensors of DeepSpeed, for when the device is another's
"""
