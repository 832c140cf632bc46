"""Pure functions of arrays: no I/O, clock, logger, global randomness, config or in-place change of what they get.

Shapes, as suffixes of names: N rows (or tokens) of a flat list, B rows of a micro-batch, T padded tokens, G groups,
K spans, V vocabulary, D model width. Losses are those of tokens, of which `masks.weigh` makes one number; metrics are
sums over unmasked tokens.
"""
