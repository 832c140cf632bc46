"""Turns that `hf` has sampled. The next turn of a rollout begins with them, so only its new part is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.family_cache import LayerStates
from rftstream.policies.hf.prompts import TokenIds


@dataclass(slots=True, eq=False)
class KeptTurn:
    """An ended turn. `DecodingBatch.turn` makes it. Its keys and values stay in their slot of the cache until the slot
    is needed; then they are copied to `states`."""

    token_ids: TokenIds
    """The prompt and the sampled tokens without the last one, which the model has not read."""
    slot: int | None = None
    """Slot in the cache; None if it has none any more."""
    states: LayerStates | None = None
    """Keys and values [1, H, L, D] of each layer; None while they are in the cache."""
    shift: int = 0
    """Difference between the positions after the turn and the indices of their tokens."""


class TurnStore:
    """The newest turns, with at most `max_tokens` tokens. `HfPolicy` makes it, adds ended turns, takes one out for each
    prompt that continues it, makes room in the cache for others, and clears it when new weights come."""

    def __init__(self, max_tokens: int, cache: SlotCache, extends: Callable[[TokenIds, KeptTurn], bool]) -> None:
        """`cache`: holds the slots of turns; dropped turns free theirs. `extends`: whether the model may continue from
        a turn to a prompt."""
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._extends = extends
        self._cache = cache
        self._turns: dict[TokenIds, KeptTurn] = {}
        """Tokens -> turn, oldest first."""
        self._lengths: Counter[int] = Counter()

    def add(self, turn: KeptTurn) -> None:
        """Keep a turn, and drop the oldest ones if there are too many tokens."""
        if turn.token_ids in self._turns:
            self._forget(self._turns[turn.token_ids])
        self._turns[turn.token_ids] = turn
        self._lengths[len(turn.token_ids)] += 1
        self._num_tokens += len(turn.token_ids)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._turns.values())))

    def find(self, prompt: TokenIds) -> KeptTurn | None:
        """Return the longest turn that a longer prompt begins with; None if there is none, or the model may not
        continue from it."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(prompt) and (turn := self._turns.get(prompt[:length])) is not None:
                return turn if self._extends(prompt, turn) else None
        return None

    def find_again(self, turn: KeptTurn | None, prompt: TokenIds) -> KeptTurn | None:
        """Return the turn that was found for a prompt, or search again if it is no longer kept."""
        return turn if turn is None or self._turns.get(turn.token_ids) is turn else self.find(prompt)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device, apart from the cache."""
        for turn in self._turns.values():
            for layer in turn.states or ():
                yield from layer

    def make_room(self, num_slots: int) -> None:
        """Free slots until the cache has this number of free slots. The oldest turns with slots are copied out."""
        in_cache = (turn for turn in self._turns.values() if turn.slot is not None)
        while self._cache.num_free < num_slots:
            turn = next(in_cache)
            assert turn.slot is not None
            turn.states = self._cache.row(turn.slot, len(turn.token_ids))
            self._cache.free([turn.slot])
            turn.slot = None

    def take(self, turn: KeptTurn) -> None:
        """Remove a kept turn from the store."""
        length = len(turn.token_ids)
        del self._turns[turn.token_ids]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        self._num_tokens -= length

    def clear(self) -> None:
        """Drop all turns, since the old weights computed them."""
        for turn in list(self._turns.values()):
            self._forget(turn)

    def _forget(self, turn: KeptTurn) -> None:
        self.take(turn)
        if turn.slot is not None:
            self._cache.free([turn.slot])
