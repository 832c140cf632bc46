"""Moves the tensors of a backend or an engine from their device to main memory and back, bit for bit.

Storages are moved, not tensors: a tensor keeps its place in models, optimizers and hooks, and has no bytes while its
storage is away. Nothing may compute with it meanwhile: at best, that ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def tensors_of(model: Any) -> Iterator[Tensor]:
    """Yield a model's parameters, their gradients and its buffers."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def held_tensors(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by transformers' names; tied ones once."""
    buffers = dict(model.named_buffers())
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: one for name, one in buffers.items() if name in saved}


@dataclass(frozen=True, slots=True)
class _Moved:
    """A storage without bytes, and the place of its bytes."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: Tensor | None
    """The bytes in main memory, uint8; None for a buffer without content."""


class DeviceState:
    """The tensors of a backend or engine, which leave the device together. Their owner makes this object, computes
    inside `present`, and calls `leave` to free the device.

    with state.present():
        update(rows)
    state.leave()
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        offload: bool,
        room: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """`tensors`: returns what the backend holds now, wherever it is; a tensor may come twice. `offload`: whether
        everything leaves the device at the end of each `present`. `room`: returns the tensors whose content matters
        only inside `present`, so that it need not be kept."""
        if device.type == "cuda" and device.index is None:  # `tensors` names it
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._tensors, self._room, self._offload = device, tensors, room, offload
        self._moved: dict[int, _Moved] = {}
        """Moved storages by address. The address of a storage stays the same while its bytes are away."""
        self._spare: dict[int, list[Tensor]] = {}
        """Buffers in main memory for later use, by their size in bytes: allocating pinned memory takes long."""
        self._depth = 0

    @property
    def is_on_cpu(self) -> bool:
        """Whether the device is a CPU, whose memory is main memory."""
        return self._device.type == "cpu"

    @property
    def num_bytes_away(self) -> int:
        """Number of bytes of the device's tensors that are in main memory."""
        return sum(moved.num_bytes for moved in self._moved.values())

    @property
    def is_away(self) -> bool:
        """Whether some tensors are in main memory."""
        return bool(self._moved)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Keep everything on the device inside this context. Contexts may be nested; the outermost one moves the
        tensors."""
        self.come()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._offload and not self._depth:
                self.leave()

    def leave(self) -> None:
        """Move everything to main memory, and release the device's memory to other processes."""
        assert not self._depth, "nothing computes with it"
        self._synchronize()  # what another stream still reads
        left: dict[int, _Moved] = {}
        empty = {tensor.untyped_storage()._cdata for tensor in self._room()}
        for tensor in self._tensors():
            if tensor.device != self._device or not tensor.untyped_storage().nbytes():
                continue
            if not tensor.untyped_storage().resizable():  # mapped from a file, on a CPU
                tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
            if storage._cdata not in left:
                host = None if storage._cdata in empty else self._host_buffer(storage.nbytes())
                left[storage._cdata] = _Moved(storage, storage.nbytes(), host)
                if host is not None:
                    host.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        for moved in left.values():
            moved.storage.resize_(0)
        self._moved |= left
        self._spare = {}  # buffers for tensors that now have another size
        if left and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def come(self) -> None:
        """Move everything back to the device. After an error, the tensors for which there was no memory are still away;
        a later call may bring them back."""
        if not self._moved:
            return
        while self._moved:
            address, moved = next(reversed(self._moved.items()))
            moved.storage.resize_(moved.num_bytes)  # there may be no memory
            if moved.host is not None:
                _bytes_of(moved.storage).copy_(moved.host, non_blocking=True)
                self._spare.setdefault(moved.num_bytes, []).append(moved.host)
            del self._moved[address]
        self._synchronize()

    def readable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return these tensors for reading; those that are away are returned as they are in main memory. Read them
        before the next update."""
        return {name: _as_in(self._moved.get(one.untyped_storage()._cdata), one) for name, one in tensors.items()}

    def forget(self) -> None:
        """Drop what is in main memory: the backend no longer holds anything."""
        self._moved, self._spare = {}, {}

    def _host_buffer(self, num_bytes: int) -> Tensor:
        spare = self._spare.get(num_bytes)
        if spare:
            return spare.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _as_in(moved: _Moved | None, tensor: Tensor) -> Tensor:
    """Return a tensor as a view of its storage's bytes in main memory; the tensor itself if it is not away."""
    if moved is None or moved.host is None:
        return tensor
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(moved.host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
