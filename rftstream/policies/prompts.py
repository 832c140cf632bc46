"""Prompts that `hf` has computed: the siblings of a group share theirs, so it is computed once.

Shapes: U prompts, L columns, H heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rftstream.policies.cache import LayerStates

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Prompts of one forward pass, padded on the left."""

    prompts: tuple[TokenIds, ...]
    states: LayerStates
    """Keys and values [U, H, L, D] of each layer."""
    logits_UV: Tensor
    """Of the first token to be sampled."""

    @property
    def num_tokens(self) -> int:
        """With padding."""
        return len(self.prompts) * self.states[0][0].shape[2]


class PromptStore:
    """The newest blocks, at most `max_tokens` with padding, but for the newest, which is kept whatever its size."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._blocks: deque[Block] = deque()
        self._places: dict[TokenIds, tuple[Block, int]] = {}

    def place(self, prompt: TokenIds) -> tuple[Block, int] | None:
        """Its block and its number there, if it is known."""
        return self._places.get(prompt)

    def add(self, block: Block) -> None:
        self._blocks.append(block)
        self._places.update({prompt: (block, number) for number, prompt in enumerate(block.prompts)})
        while len(self._blocks) > 1 and sum(one.num_tokens for one in self._blocks) > self._max_tokens:
            self._forget(self._blocks.popleft().prompts)

    def clear(self) -> None:
        """They are of the weights they were computed with."""
        self._blocks.clear()
        self._places.clear()

    def _forget(self, prompts: Sequence[TokenIds]) -> None:
        for prompt in prompts:
            self._places.pop(prompt, None)
