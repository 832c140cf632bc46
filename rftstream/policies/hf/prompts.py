"""Prompts that `hf` has computed. The siblings of a group share their prompt, so it is computed once.

Shapes: U prompts, L columns, H heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rftstream.models.vision.seeing import ImageFeatures
from rftstream.policies.hf.family_cache import LayerStates

TokenIds = tuple[int, ...]
"""A prompt. Negative numbers stand for images: `policies.images`."""
Features = Mapping[int, ImageFeatures]
"""Number of an image -> its features for the language model."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The prompts of one forward pass, padded on the left. `HfModel.compute` makes it."""

    prompts: tuple[TokenIds, ...]
    states: LayerStates
    """Keys and values [U, H, L, D] of each layer; empty for a model that keeps none."""
    logits_UV: Tensor
    """Logits of the first token to be sampled after each prompt."""
    shifts_U: np.ndarray
    """Difference between the position of the first token after each prompt and the prompt's number of tokens, int64
    [U]. It is 0 unless images take fewer positions than tokens."""
    experts: Sequence[np.ndarray] = ()
    """Experts that the tokens of each prompt took, [L, K]; empty if they are not recorded."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return len(self.prompts) * max(map(len, self.prompts))


class PromptStore:
    """The newest blocks, with at most `max_tokens` tokens, padding included, and `max_prompts` prompts: states of short
    prompts are as large as those of long ones. The newest block is kept whatever its size. `HfPolicy` makes it, and
    clears it when new weights come."""

    def __init__(self, max_tokens: int, max_prompts: int) -> None:
        self._max_tokens, self._max_prompts = max_tokens, max_prompts
        self._blocks: deque[Block] = deque()
        self._places: dict[TokenIds, tuple[Block, int]] = {}

    def place(self, prompt: TokenIds) -> tuple[Block, int] | None:
        """Return a prompt's block and its index there; None if the prompt is not kept."""
        return self._places.get(prompt)

    def add(self, block: Block) -> None:
        """Add a block, and drop the oldest ones if there are too many tokens."""
        self._blocks.append(block)
        self._places.update({prompt: (block, number) for number, prompt in enumerate(block.prompts)})
        while len(self._blocks) > 1 and (
            sum(one.num_tokens for one in self._blocks) > self._max_tokens or len(self._places) > self._max_prompts
        ):
            self._forget(self._blocks.popleft().prompts)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device."""
        for block in self._blocks:
            yield block.logits_UV
            for layer in block.states:
                yield from layer

    def clear(self) -> None:
        """Drop all blocks, since the old weights computed them."""
        self._blocks.clear()
        self._places.clear()

    def _forget(self, prompts: Sequence[TokenIds]) -> None:
        for prompt in prompts:
            self._places.pop(prompt, None)


def shift_behind(positions_3L: np.ndarray) -> int:
    """Return the difference between the positions after a prompt with these positions and the token indices."""
    return int(positions_3L.max() + 1 - positions_3L.shape[1])
