"""A version of the weights in this machine's memory, where the processes of an engine can read it."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rftstream.models.spec import ModelSpec
from rftstream.policies.served import Parameters
from rftstream.weights.adapters import write_adapter
from rftstream.weights.shared_memory import MEMORY, SharedTensors, WeightsMemory, name_prefix, remove_left_behind
from rftstream.weights.snapshot import ITEM_BYTES, RawTensor, data_view, decode_snapshot, write_snapshot

if TYPE_CHECKING:
    from typing_extensions import Buffer


class WeightsMirror:
    """Shared memory with weights for engines, for weights that no follower holds there: merged adapters, or the weights
    of a process without a follower. The policy makes it, and overwrites it with each version."""

    def __init__(self, parameters: Parameters) -> None:
        """`parameters`: the form of all tensors."""
        self._memory = WeightsMemory()
        self._parameters = parameters
        self._held: dict[str, RawTensor] = {}
        self._marks: dict[str, object] = {}

    def write(self, tensors: Mapping[str, RawTensor]) -> SharedTensors:
        """Write a version, only where it differs from the previous one, and return it. The next version overwrites it.
        Each tensor is read once, and must have the form in `parameters`."""
        with self._memory.changing():
            marks, self._marks = self._marks, {}  # after an error the content is unknown
            if marks:
                marks |= {name: object() for name in tensors if _replaced(self._held[name], tensors[name])}
            else:
                writer = _Writer(self._memory, sum(map(_num_bytes, self._parameters.values())))
                write_snapshot(writer, _sizes(self._parameters), read=tensors.__getitem__)
                self._held = decode_snapshot(writer.view)
                marks = {name: object() for name in self._held}
            self._marks = marks
        return SharedTensors(self._held, self._memory, dict(marks))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class _Writer:
    """Accepts a snapshot's bytes like a file, and writes them into memory that it allocates after the header."""

    def __init__(self, memory: WeightsMemory, num_bytes: int) -> None:
        """`num_bytes`: total size of the tensors."""
        self._memory, self._num_bytes, self._position = memory, num_bytes, 0
        self.view = memoryview(b"")

    def write(self, data: Buffer) -> None:
        part = memoryview(data).cast("B")
        if not self.view:
            self.view = self._memory.allocate(part.nbytes + self._num_bytes)
        self.view[self._position : self._position + part.nbytes] = part
        self._position += part.nbytes


def _num_bytes(form: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = form
    return math.prod(shape) * ITEM_BYTES[dtype]


def _sizes(parameters: Parameters) -> dict[str, RawTensor]:
    """Return tensors of these forms that take no memory."""
    zero = np.zeros(1, np.uint8)
    return {
        name: RawTensor(form[0], form[1], np.broadcast_to(zero, _num_bytes(form)).data)
        for name, form in parameters.items()
    }


def _replaced(held: RawTensor, new: RawTensor) -> bool:
    """Overwrite the held bytes with the new ones, and return whether they differed."""
    mine, others = (np.frombuffer(data_view(one), np.uint8) for one in (held, new))
    if np.array_equal(mine, others):
        return False
    mine[:] = others
    return True


class SharedAdapter:
    """An adapter as a PEFT folder, which other processes of this user can read until it is closed.

    The folder is in memory if there is room: containers have 64 MiB of it by default."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
        prefix = name_prefix("adapter")
        try:
            remove_left_behind(MEMORY, prefix)
            self.path = _written(prefix, MEMORY, spec, tensors)
        except OSError:
            self.path = _written(prefix, None, spec, tensors)

    def close(self) -> None:
        """Remove the folder. The engine keeps the adapter that it has read."""
        shutil.rmtree(self.path, ignore_errors=True)


def _written(prefix: str, where: Path | None, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> str:
    """Write an adapter into a new folder. After an error nothing of it is left."""
    path = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where)
    try:
        write_adapter(Path(path), spec, tensors)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path
