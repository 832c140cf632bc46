"""Checkpoints of what ranks train: the torch backend's files, written and read tensor by tensor."""

from __future__ import annotations

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

    def __init__(self, names: Iterable[str], gather: Callable[[str, str], Tensor], dtype: str) -> None:
        self._names, self._gather, self._dtype = dict.fromkeys(names), gather, SERVED[dtype]

    def __getitem__(self, name: str) -> RawTensor:
        if name not in self._names:
            raise KeyError(name)
        return raw(self._gather(MASTER, name).detach().to(self._dtype, copy=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_tensors(
    path: Path,
    shapes: Mapping[str, torch.Size],
    dtype: str,
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. Each tensor is read once, when it is written."""
    known = DTYPES[dtype]
    layout = {
        name: RawTensor(known, tuple(shape), np.broadcast_to(np.uint8(0), math.prod(shape) * ITEM_BYTES[known]).data)
        for name, shape in shapes.items()
    }
    with path.open("wb") as file:
        write_snapshot(file, layout, metadata, read=lambda name: raw(read(name)))
