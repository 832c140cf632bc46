"""The torch backend: the optimizer step on one device.

In the order of reading:

    backend               the Backend that the trainer calls
    inputs                from rows to padded or packed tensors
    network, attention    the model, from a micro-batch to logprobs, and its attention over packed rows
    training, optimizer   training of policy and critic, and AdamW over float32 masters
    critic, lora          a value network beside the policy, and low-rank matrices instead of the whole model
    profiling             traces of what a batch costs

To give algorithms another input from the policy, name it in `Algorithm.needs` and compute it in `backend`.
"""
