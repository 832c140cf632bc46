"""All tensors that DeepSpeed holds in the only process, so that they can leave the device and come back.

DeepSpeed has no list of them: flat buffers of masters and gradients, buckets, parts of weights and views of all of
these lie in many places, by the stage of ZeRO and from version to version. So they are found by going through its
objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rftstream.backends.deepspeed.shards import KINDS, MASTER, REFERENCE
from rftstream.backends.deepspeed.trained import POLICY
from rftstream.models.offload import DeviceState

if TYPE_CHECKING:
    from rftstream.backends.deepspeed.rank_training import Rank

PACKAGES = ("deepspeed.", "torch.optim.", "rftstream.backends.")
"""Objects of these are looked into, whatever they are; of others only containers, modules and tensors."""


class OwnState(DeviceState):
    """All that a rank holds which computes alone. It leaves the device as a whole, and is published and saved from
    wherever it lies."""

    def __init__(self, rank: Rank) -> None:
        """`rank`: it has joined."""
        super().__init__(rank.device, self._held, room=self._emptied, offload=False)
        self._rank = rank
        self._places: dict[tuple[str, str, str], Tensor] = {}
        self._num_steps: dict[str, float] = {}

    def leave(self) -> None:
        """Move everything to main memory. What is read there is looked up before: tensors without bytes have no
        views."""
        if not self.num_bytes_away:
            trained = self._rank.trained
            self._places = {
                (network, kind, name): self._place(network, kind, name)
                for network in trained
                for kind in (*KINDS, REFERENCE)
                for name in trained[network].shapes
                if kind != REFERENCE or (network == POLICY and self._rank.renewed is not None)
            }
            self._num_steps = {network: one.shards.num_steps for network, one in trained.items()}
        super().leave()

    def read(self, network: str, kind: str, name: str) -> Tensor:
        """Return a master, a moment or a master of the renewed reference: whole, float32, not a copy."""
        if not self.num_bytes_away:
            return self._place(network, kind, name)
        return self.readable({name: self._places[network, kind, name]})[name]

    def num_steps(self, network: str) -> float:
        """Return the number of steps that the network's optimizer has taken."""
        return self._num_steps[network] if self.num_bytes_away else self._rank.trained[network].shards.num_steps

    def _place(self, network: str, kind: str, name: str) -> Tensor:
        shards = self._rank.trained[network].shards
        if kind != REFERENCE:
            return shards.own(kind, name)
        assert self._rank.renewed is not None
        master = shards.own(MASTER, name)
        storage = master.untyped_storage()._cdata
        for whole, renewed in zip(shards.masters(), self._rank.renewed, strict=True):
            if whole.untyped_storage()._cdata == storage:
                begin = master.storage_offset() - whole.storage_offset()
                return renewed.view(-1)[begin : begin + master.numel()].view(master.shape)
        raise AssertionError(f"{name} is a part of a master")

    def _held(self) -> Iterator[Tensor]:
        reference = [] if self._rank.reference is None else [self._rank.reference.model]
        return held_tensors([self._rank.trained, reference, self._rank.renewed])

    def _emptied(self) -> list[Tensor]:
        return [tensor for trained in self._rank.trained.values() for tensor in trained.shards.room()]


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from these objects, each once."""
    waiting, seen = deque(roots), set[int]()
    kept = []
    """What was looked into: an object that was made on the way must not give its number to the next one."""
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        if isinstance(one, Tensor):
            yield one
            if one.is_leaf and one.grad is not None:
                waiting.append(one.grad)
        waiting.extend(_within(one))


def _within(one: Any) -> Iterator[Any]:
    """Yield what an object refers to, as far as tensors may be there."""
    if isinstance(one, dict):
        yield from one.keys()
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from one
    elif isinstance(one, Tensor | nn.Module) or type(one).__module__.startswith(PACKAGES):
        yield from getattr(one, "__dict__", {}).values()
        yield from (getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))
