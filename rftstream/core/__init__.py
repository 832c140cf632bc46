"""Pure functions of arrays: no I/O, clock, logger, global randomness, config or in-place change of what they get.

Shapes, as suffixes of names: N rows (or tokens) of a flat list, B rows of a micro-batch, T padded tokens, G groups,
K spans, V vocabulary, D model width. Losses return `(loss, metrics)`, the metrics as sums over unmasked tokens.
"""
