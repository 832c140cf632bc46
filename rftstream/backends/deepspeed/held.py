"""Finds all tensors that DeepSpeed holds in the only process, so that they can leave the device and come back.

DeepSpeed has no list of them: flat buffers of masters and gradients, buckets, parts of weights and views of all of
these lie in many places, which depend on the stage of ZeRO and on DeepSpeed's version. So the search goes through its
objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rftstream.backends.base import POLICY
from rftstream.backends.deepspeed.shards import KINDS, MASTER, REFERENCE
from rftstream.models.offload import DeviceState

if TYPE_CHECKING:
    from rftstream.backends.deepspeed.rank_training import Rank

PACKAGES = ("deepspeed.", "torch.optim.", "rftstream.backends.")
"""Packages whose objects are searched. Containers, modules and tensors are searched wherever they come from."""


class OwnState(DeviceState):
    """Moves everything that a single rank holds, and reads masters and moments wherever they are.

    The backend makes it when the rank has joined, computes within `present`, and calls `leave` to free the device.
    `read` and `num_steps` may be called at any time."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.device, self._tensors_of_rank, room=self._buffers, offload=False)
        self._rank = rank
        self._places: dict[tuple[str, str, str], Tensor] = {}
        """Tensors that may be read, by network, kind and name; empty while they are on the device."""
        self._num_steps: dict[str, float] = {}

    def leave(self) -> None:
        """Move everything to main memory. Views are looked up before the move, since a tensor without bytes has no
        views."""
        if not self.is_away:
            trained = self._rank.trained
            self._places = {
                (network, kind, name): self._place(network, kind, name)
                for network in trained
                for kind in (*KINDS, REFERENCE)
                for name in trained[network].shapes
                if kind != REFERENCE or (network == POLICY and self._rank.renewed is not None)
            }
            self._num_steps = {network: trained[network].shards.num_steps for network in trained}
        super().leave()

    def come(self) -> None:
        """Move everything back to the device."""
        super().come()
        self._places = {}  # otherwise a renewed reference would keep its bytes

    def read(self, network: str, kind: str, name: str) -> Tensor:
        """Return a master, a moment or a master of the renewed reference: the whole tensor in float32, not a copy."""
        if not self.is_away:
            return self._place(network, kind, name)
        return self.readable({name: self._places[network, kind, name]})[name]

    def num_steps(self, network: str) -> float:
        """Return the number of steps that the network's optimizer has taken."""
        return self._num_steps[network] if self.is_away else self._rank.trained[network].shards.num_steps

    def _place(self, network: str, kind: str, name: str) -> Tensor:
        shards = self._rank.trained[network].shards
        if kind != REFERENCE:
            return shards.own(kind, name)
        assert self._rank.renewed is not None
        return same_part(shards.own(MASTER, name), of=shards.masters(), to=self._rank.renewed)

    def _tensors_of_rank(self) -> Iterator[Tensor]:
        reference = [] if self._rank.reference is None else [self._rank.reference.model]
        return held_tensors([self._rank.trained, reference, self._rank.renewed])

    def _buffers(self) -> list[Tensor]:
        return [buffer for trained in self._rank.trained.values() for buffer in trained.shards.room()]


def same_part(part: Tensor, *, of: Sequence[Tensor], to: Sequence[Tensor]) -> Tensor:
    """Return the part of `to` at the place that `part`, a view, has in `of`. The tensors of `of` and `to` have the same
    forms."""
    for whole, other in zip(of, to, strict=True):
        begin = part.storage_offset() - whole.storage_offset()
        is_same = whole.untyped_storage()._cdata == part.untyped_storage()._cdata
        if is_same and 0 <= begin <= whole.numel() - part.numel():
            return other.view(-1)[begin : begin + part.numel()].view(part.shape)
    raise AssertionError("each is a part of one")


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from these objects, each once."""
    waiting, seen = deque(roots), set[int]()
    kept = []  # keeps visited objects alive: a temporary object must not pass its id on to the next one
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        kept.append(holder)
        if isinstance(holder, Tensor):
            yield holder
            if holder.is_leaf and holder.grad is not None:
                waiting.append(holder.grad)
        waiting.extend(_within(holder))


def _within(holder: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to, if they may hold tensors."""
    if isinstance(holder, dict):
        yield from holder.keys()
        yield from holder.values()
    elif isinstance(holder, list | tuple | set | frozenset | deque):
        yield from holder
    elif isinstance(holder, Tensor | nn.Module) or type(holder).__module__.startswith(PACKAGES):
        yield from getattr(holder, "__dict__", {}).values()
        slots = (name for cls in type(holder).__mro__ for name in cls.__dict__.get("__slots__", ()))
        yield from (getattr(holder, name, None) for name in slots)
