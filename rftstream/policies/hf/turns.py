"""Turns that `hf` has sampled. The next turn of a rollout begins with them, so only its new part is computed. A fork,
which begins with a part of a turn, gets a copy of that part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.family_cache import LayerStates
from rftstream.policies.hf.prompts import TokenIds
from rftstream.policies.prefix_tree import PrefixTree


@dataclass(slots=True, eq=False)
class KeptTurn:
    """An ended turn. `DecodingBatch.turn` makes it. Its keys and values stay in their slot of the cache until the slot
    is needed; then they are copied to `states`. When a rollout goes on from it, its slot is the row's, and forks may
    copy from there."""

    token_ids: TokenIds
    """The prompt and the sampled tokens without the last one, which the model has not read."""
    slot: int | None = None
    """Slot in the cache; None if it has none any more."""
    states: LayerStates | None = None
    """Keys and values [1, H, L, D] of each layer; None while they are in the cache."""
    shift: int = 0
    """Difference between the positions after the turn and the indices of their tokens."""
    lent: int | None = None
    """Number of the slot's use by the row that went on from the turn; None while the turn has the slot itself."""


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The beginning of a prompt that a kept turn has, too. `TurnStore.find` makes it."""

    turn: KeptTurn
    length: int
    """Number of tokens."""

    @property
    def is_moved(self) -> bool:
        """Whether it is a whole turn, whose slot the row gets."""
        return self.turn.lent is None and self.length == len(self.turn.token_ids)


class TurnStore:
    """The newest turns, with at most `max_tokens` tokens, in a radix tree. `HfPolicy` makes it, adds ended turns, takes
    a beginning out for each prompt that has one, makes room in the cache for others, and clears it when new weights
    come.

    Turns that are lent stand in the tree, too, as long as their rows have their slots. They count for nothing, since
    their rows hold their keys and values anyway."""

    def __init__(
        self,
        max_tokens: int,
        cache: SlotCache,
        extends: Callable[[TokenIds, int], bool],
        *,
        is_divisible: bool = True,
    ) -> None:
        """`cache`: holds the slots of turns; dropped turns free theirs. `extends`: whether the model may continue from
        so many tokens of a prompt. `is_divisible`: whether a part of a turn is enough to continue from: there are no
        states of a fixed size."""
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._extends, self._is_divisible = extends, is_divisible
        self._cache = cache
        self._turns: dict[TokenIds, KeptTurn] = {}
        """Tokens -> turn that is not lent, oldest first."""
        self._lent: dict[int, KeptTurn] = {}
        """Slot -> turn that is lent."""
        self._tree: PrefixTree[KeptTurn] = PrefixTree()

    def add(self, turn: KeptTurn) -> None:
        """Keep a turn, and drop the oldest ones if there are too many tokens."""
        if turn.slot is not None and (lent := self._lent.pop(turn.slot, None)) is not None:
            self._drop(lent)  # the row has come to its end, and the turn begins with what was lent
        if turn.token_ids in self._turns:
            self._forget(self._turns[turn.token_ids])
        self._turns[turn.token_ids] = turn
        self._tree.add(turn.token_ids, turn)
        self._num_tokens += len(turn.token_ids)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._turns.values())))

    def find(self, prompt: TokenIds, *, num_alike: int = 1) -> KeptPrefix | None:
        """Return the longest beginning of a prompt to continue from; None if there is none, or the model may not
        continue from it.

        A part of a turn must be at least half of the prompt. `num_alike`: equal prompts, which all would continue from
        a part; if that is more to compute than the whole prompt once, there is none."""
        if self.is_empty:
            return None
        whole = next((turn for length, turn in self._tree.whole(prompt[:-1]) if turn.lent is None), None)
        found = None if whole is None else KeptPrefix(whole, len(whole.token_ids))
        if self._is_divisible and (part := self._part(prompt)) is not None:
            new = len(prompt) - part.length
            if part.length > (0 if found is None else found.length) and new * max(2, num_alike) <= len(prompt):
                found = part
        return found if found is not None and self._extends(prompt, found.length) else None

    def _part(self, prompt: TokenIds) -> KeptPrefix | None:
        while True:
            length, turns = self._tree.deepest(prompt[:-1])
            gone = [turn for turn in turns if turn.lent is not None and self._is_gone(turn)]
            for turn in gone:
                self._drop(turn)
            if not gone:
                fit = (turn for turn in turns if not any(token < 0 for token in turn.token_ids))  # images are shifted
                return next((KeptPrefix(turn, length) for turn in fit), None)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device, apart from the cache."""
        for turn in self._turns.values():
            for layer in turn.states or ():
                yield from layer

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be found."""
        return not self._turns and not self._lent

    def make_room(self, num_slots: int) -> None:
        """Free slots until the cache has this number of free slots. The oldest turns with slots are copied out."""
        in_cache = (turn for turn in self._turns.values() if turn.slot is not None)
        while self._cache.num_free < num_slots:
            turn = next(in_cache)
            assert turn.slot is not None
            turn.states = self._cache.row(turn.slot, len(turn.token_ids))
            self._cache.free([turn.slot])
            turn.slot = None

    def take(self, beginning: KeptPrefix) -> KeptTurn:
        """Return a beginning with a slot of its own, for a row: a whole turn, which is then lent, or a copy."""
        turn, length = beginning.turn, beginning.length
        taken = KeptTurn(turn.token_ids[:length], shift=turn.shift)
        if turn.slot is None or not beginning.is_moved:
            self.make_room(1)  # the turn itself may be copied out by that
        if turn.slot is None:
            assert turn.states is not None, "it is in one place or the other"
            part = turn.states if length == len(turn.token_ids) else _columns(turn.states, length)
            [taken.slot] = self._cache.put(part, [0], [length])
        else:
            taken.slot = turn.slot if beginning.is_moved else self._cache.copy(turn.slot, length)
        if beginning.is_moved:
            del self._turns[turn.token_ids]
            self._num_tokens -= length
            if (before := self._lent.get(taken.slot)) is not None:
                self._drop(before)
            turn.slot, turn.states, turn.lent = taken.slot, None, self._cache.use_of(taken.slot)
            self._lent[taken.slot] = turn
        elif turn.lent is None:  # it is in use, so it is not the oldest
            self._turns[turn.token_ids] = self._turns.pop(turn.token_ids)
        return taken

    def clear(self) -> None:
        """Drop all turns, since the old weights computed them."""
        for turn in list(self._turns.values()):
            self._forget(turn)
        self._lent, self._tree = {}, PrefixTree()

    def _is_gone(self, turn: KeptTurn) -> bool:
        """Return whether the row has left the slot of a turn that was lent."""
        return turn.slot is None or self._cache.use_of(turn.slot) != turn.lent

    def _forget(self, turn: KeptTurn) -> None:
        del self._turns[turn.token_ids]
        self._num_tokens -= len(turn.token_ids)
        self._tree.remove(turn.token_ids, turn)
        if turn.slot is not None:
            self._cache.free([turn.slot])

    def _drop(self, turn: KeptTurn) -> None:
        """Remove a turn that was lent."""
        self._tree.remove(turn.token_ids, turn)
        if turn.slot is not None and self._lent.get(turn.slot) is turn:
            del self._lent[turn.slot]


def _columns(states: LayerStates, length: int) -> LayerStates:
    return [tuple(part[:, :, :length] for part in layer) for layer in states]
