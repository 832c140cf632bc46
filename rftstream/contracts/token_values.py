"""Values that a sampler records beside the tokens of a segment, for the trainer.

Shapes: T tokens, R runs of tokens with equally many values.
"""

from __future__ import annotations

from rftstream.contracts.arrays import Array
from rftstream.contracts.rules import Violation, rule, show
from rftstream.contracts.structs import message_part

ALLOWED = "allowed"
"""Kind of the sets of tokens that could be sampled, in the form of `rftstream.core.allowed`."""
EXPERTS = "experts"
"""Kind of the experts that the token before took in a mixture: those of the first layer, then of the second, ..."""
KINDS = frozenset({ALLOWED, EXPERTS})
"""Kinds of values that the trainer knows."""

DTYPES = ("uint8", "uint16", "int32", "float32")
"""dtypes of values beside tokens."""


@message_part(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of one kind, any number of them for each token. They belong to the pass that led to the token."""

    runs: Array
    """int32 [R, 2]: a number of tokens, and the number of values that each of them has. Together they are all T tokens
    of the segment, in order."""
    values: Array
    """uint8, uint16, int32 or float32, one dimension: the values of the first token, then those of the second, ..."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all runs."""
        return int(self.runs.numpy()[:, 0].sum())


@rule(TokenValues)
def _check_token_values(given: TokenValues) -> Violation | None:
    if given.runs.dtype != "int32" or len(given.runs.shape) != 2 or given.runs.shape[1] != 2:
        return ".runs", f"got {given.runs.dtype} {list(given.runs.shape)}, expected int32 [R, 2]"
    if given.values.dtype not in DTYPES:
        return ".values.dtype", f"got {show(given.values.dtype)}, expected one of {', '.join(DTYPES)}"
    if len(given.values.shape) != 1:
        return ".values.shape", f"got {list(given.values.shape)}, expected one dimension"
    runs_R2 = given.runs.numpy().astype("int64")
    if (runs_R2 < 0).any():
        return ".runs.data", "got a number below 0, expected numbers of tokens and of values"
    if (total := int(runs_R2.prod(axis=1).sum())) != given.values.shape[0]:
        return ".values.shape", f"got {given.values.shape[0]} values, expected the {total} that the runs count"
    return None
