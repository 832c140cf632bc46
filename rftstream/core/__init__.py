"""Pure functions of arrays: no I/O, clock, logger, global randomness or config, and no in-place change of arguments.

Shapes, as suffixes of names: N rows (or tokens) of a flat list, B rows of a micro-batch, T padded tokens, G groups,
K spans, V vocabulary, D model width. Losses are computed per token, and `masks.reduce_loss` makes one number of them;
metrics are sums over unmasked tokens.

In the order of reading: `advantages`, `values`, `shaping` and `distillation` make advantages of rewards; `ratios`,
`masks` and `kl` are what `losses`, `imitation` and `corrections` are made of; `packing` cuts batches; `logprobs`
computes logprobs without holding all logits, over the sets of tokens that `allowed` reads; `samples` and `repetition`
measure.

To add a function: one that takes arrays and numbers, checks their shapes, and has the formula, the paper and the shapes
in its docstring; its test computes the numbers by hand.
"""
