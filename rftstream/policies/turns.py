"""Turns that `hf` has sampled: the next turn of a rollout begins with them, so only what is new in it is computed.

Shapes: H heads, L tokens, D width of a head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rftstream.policies.cache import LayerStates
from rftstream.policies.prompts import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class KeptTurn:
    """A turn that has ended. `DecodingBatch.turn` makes it."""

    token_ids: TokenIds
    """Its prompt, and what was sampled but for the last token, which the model was not given."""
    states: LayerStates
    """Keys and values [H, L, D] of each layer."""


class TurnStore:
    """The newest turns: at most `max_tokens` tokens. `HfPolicy` makes it, adds turns that have ended, takes one out for
    each prompt that goes on from it, and clears the store when new weights come."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._turns: dict[TokenIds, KeptTurn] = {}
        """Tokens -> turn, oldest first."""
        self._lengths: Counter[int] = Counter()

    def add(self, turn: KeptTurn) -> None:
        """Keep a turn, and forget the oldest ones if there are too many tokens."""
        if turn.token_ids in self._turns:
            self.remove(self._turns[turn.token_ids])
        self._turns[turn.token_ids] = turn
        self._lengths[len(turn.token_ids)] += 1
        self._num_tokens += len(turn.token_ids)
        while self._num_tokens > self._max_tokens:
            self.remove(next(iter(self._turns.values())))

    def find(self, prompt: TokenIds) -> KeptTurn | None:
        """Return the longest turn that a longer prompt begins with; None if there is none."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(prompt) and (turn := self._turns.get(prompt[:length])) is not None:
                return turn
        return None

    def remove(self, turn: KeptTurn) -> None:
        """Forget a turn that is kept."""
        length = len(turn.token_ids)
        del self._turns[turn.token_ids]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        self._num_tokens -= length

    def clear(self) -> None:
        """Forget all turns. They were computed with weights that have been replaced."""
        self._turns.clear()
        self._lengths.clear()
        self._num_tokens = 0
