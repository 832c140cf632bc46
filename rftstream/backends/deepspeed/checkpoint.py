"""Checkpoints of what ranks train: the torch backend's files, written and read tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftstream.backends.base import CRITIC, MASTERS_FILE, MOMENTS_FILE
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.shards import MASTER, MOMENTS
from rftstream.backends.deepspeed.trained import Read
from rftstream.backends.torch.training import check_saved
from rftstream.weights.checkpoint_names import CheckpointNames
from rftstream.weights.snapshot import DTYPES, ITEM_BYTES, RawTensor, write_snapshot
from rftstream.weights.tensors import REFERENCE_FILE, SERVED, raw

log = logging.getLogger(__name__)


def write_network(
    folder: Path,
    name: str,
    shapes: Mapping[str, torch.Size],
    num_steps: float,
    gather: Callable[[str, str], Tensor],
) -> None:
    """Write masters and moments of a network. `gather` returns a whole tensor for a kind and a name."""
    write_tensors(folder / MASTERS_FILE[name], shapes, "float32", lambda one: gather(MASTER, one))
    moments = {f"{kind}/{one}": shape for kind in MOMENTS for one, shape in shapes.items()}
    moments |= {f"step/{shape}": torch.Size(()) for shape in shapes}

    def moment(key: str) -> Tensor:
        kind, _, one = key.partition("/")
        return torch.tensor(num_steps, dtype=torch.float32) if kind == "step" else gather(kind, one)

    write_tensors(folder / MOMENTS_FILE[name], moments, "float32", moment)


class SavedNetwork:
    """Masters and moments of a network in a checkpoint. Used as a context, it keeps the files open so that `read` can
    read them."""

    def __init__(self, folder: Path, name: str) -> None:
        from safetensors import safe_open

        self._masters: Any = safe_open(folder / MASTERS_FILE[name], framework="pt")
        self._moments: Any = safe_open(folder / MOMENTS_FILE[name], framework="pt")

    def __enter__(self) -> SavedNetwork:
        self._masters.__enter__()
        self._moments.__enter__()
        self._known = set(self._moments.keys())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._moments.__exit__(kind, error, traceback)
        self._masters.__exit__(kind, error, traceback)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the masters, by name."""
        return {name: torch.Size(self._masters.get_slice(name).get_shape()) for name in self._masters.keys()}  # noqa: SIM118

    @property
    def steps(self) -> list[float]:
        """Number of steps of each master; empty if no step was taken."""
        return [float(self._moments.get_tensor(key)) for key in self._known if key.startswith("step/")]

    def read(self, kind: str, name: str) -> Tensor:
        """Return a whole tensor; zeros for a moment that is not saved."""
        if kind == MASTER:
            return self._masters.get_tensor(name)  # type: ignore[no-any-return]
        key = f"{kind}/{name}"
        if key not in self._known:
            return torch.zeros(self._masters.get_slice(name).get_shape())
        return self._moments.get_tensor(key)  # type: ignore[no-any-return]


@contextlib.contextmanager
def swapped(call: Callable[..., Any]) -> Iterator[str]:
    """Have the renewed reference replace the policy in all ranks inside this context. Yield the kind of its masters."""
    call("swap_reference")
    try:
        yield MASTER
    finally:
        call("swap_reference")


class Restoring:
    """Restores a checkpoint on all ranks, except for random numbers. Rank 0 reads the files and sends the data to the
    others.

    `DeepSpeedBackend.load` makes one. The reference is restored before the policy, since the ranks receive it in the
    policy's place."""

    def __init__(self, folder: Path, rank: Rank, call: Callable[..., Any]) -> None:
        """`call`: has all ranks make a call, as `DeepSpeedBackend._call` does."""
        self._folder, self._rank, self._call = folder, rank, call

    def load(self, network: str, steps: Sequence[float], read: Read) -> None:
        """Restore a network. `steps` is the value of `SavedNetwork.steps`."""
        moments, num_steps = bool(steps), max(steps, default=0.0)
        arguments = {"network": network, "moments": moments, "num_steps": num_steps}
        self._call("load", arguments, {**arguments, "read": read})

    def load_reference(self) -> None:
        """Restore a renewed reference, or go back to version 0."""
        from safetensors import safe_open

        path = self._folder / REFERENCE_FILE
        if not path.is_file():
            self._call("load_reference", {"renewed": False})
            return
        with safe_open(path, framework="pt") as file:
            read: Read = lambda _, name: file.get_tensor(name)  # noqa: E731
            self._call("load_reference", {"renewed": True}, {"renewed": True, "read": read})

    def load_critic(self) -> None:
        """Restore the critic. If the checkpoint has none, the critic starts anew. ConfigError if the saved critic is of
        another model."""
        if not (self._folder / MASTERS_FILE[CRITIC]).is_file():
            log.warning("%s: the checkpoint has no critic; it begins anew", self._folder)
            self.load(CRITIC, [], self._rank.first_critic())
            return
        with SavedNetwork(self._folder, CRITIC) as saved:
            check_saved(self._folder, CRITIC, self._rank.spec, saved.shapes, self._rank.trained[CRITIC].shapes)
            self.load(CRITIC, saved.steps, saved.read)


class GatheredTensors(Mapping[str, RawTensor]):
    """The weights in the served dtype. Each tensor is gathered when it is read."""

    def __init__(
        self,
        parameters: Iterable[str],
        gather: Callable[[str, str], Tensor],
        dtype: str,
        names: CheckpointNames | None = None,
    ) -> None:
        """`names`: those under which the parameters are published, and what is published beside them; None: their
        own."""
        masters = _Masters(parameters, gather)
        self._tensors = masters if names is None else names.read(masters)
        self._kept = {} if names is None else names.kept_tensors
        self._dtype = SERVED[dtype]

    def __getitem__(self, name: str) -> RawTensor:
        if name in self._kept:
            return self._kept[name]
        return raw(self._tensors[name].detach().to(self._dtype, copy=True))

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._kept

    def __len__(self) -> int:
        return len(self._tensors) + len(self._kept)


class _Masters(Mapping[str, Tensor]):
    """Masters, each gathered when it is read. The two newest are kept, since the tensors of many experts lie in two of
    them."""

    def __init__(self, parameters: Iterable[str], gather: Callable[[str, str], Tensor]) -> None:
        self._parameters = dict.fromkeys(parameters)
        self._gathered = functools.lru_cache(maxsize=2)(functools.partial(gather, MASTER))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise KeyError(name)
        return self._gathered(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def write_tensors(
    path: Path,
    shapes: Mapping[str, torch.Size],
    dtype: str,
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. Each tensor is read once, when it is written."""
    layout = {name: (DTYPES[dtype], tuple(shape)) for name, shape in shapes.items()}
    write_layout(path, layout, lambda name: raw(read(name)), metadata)


def write_layout(
    path: Path,
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], RawTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file of tensors with these dtypes and shapes. Each is read once, when it is written."""
    unread = {
        name: RawTensor(dtype, shape, np.broadcast_to(np.uint8(0), math.prod(shape) * ITEM_BYTES[dtype]).data)
        for name, (dtype, shape) in layout.items()
    }
    with path.open("wb") as file:
        write_snapshot(file, unread, metadata, read=read)
