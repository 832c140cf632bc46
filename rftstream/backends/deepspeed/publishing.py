"""Versions that all ranks publish, each of them its part.

Each rank has some of the tensors. It copies them from the weights, finds what changed, and writes its part of a version
into the store in a thread of its own, while all ranks train on. Rank 0 says when, and announces a version once all
parts are stored. So no process holds the whole model for it. Under ZeRO 3, where each rank has only a slice of each
weight, the slices go to the rank that writes the tensor, in the served dtype, one tensor after another."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rftstream import errors
from rftstream.backends.deepspeed.rank_processes import FOREVER, RankPlace, Ranks
from rftstream.backends.deepspeed.shards import Shards
from rftstream.backends.deepspeed.wire import drop, put, take
from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.errors import BackendError, WeightsError
from rftstream.weights.checkpoint_names import CheckpointNames
from rftstream.weights.snapshot import Line, RawTensor
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.tensors import SERVED, ServedTensors
from rftstream.weights.writer import PartWriter

PAUSE_S = 0.005
"""Pause in seconds between two looks for the other ranks' parts."""


@dataclass(kw_only=True)
class TensorGroup:
    """Published tensors that lie in the same parameters, and the rank that writes them."""

    parameters: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    num_elements: int = 0
    owner: int = 0


def share_out(sources: Mapping[str, Sequence[str]], sizes: Mapping[str, int], num_ranks: int) -> list[TensorGroup]:
    """Return all tensors in groups, in order of their first names, so that ranks have about as many elements.

    `sources`: the parameters in which a tensor lies. `sizes`: elements of the parameters."""
    group_of: dict[str, TensorGroup] = {}
    for name in sorted(sources):
        found = {id(group_of[one]): group_of[one] for one in sources[name] if one in group_of}
        group = next(iter(found.values()), TensorGroup())
        for other in [*found.values()][1:]:
            group.names |= other.names
            group.parameters |= other.parameters
        group.names.add(name)
        group.parameters |= set(sources[name])
        group_of |= dict.fromkeys(group.parameters, group)
    groups = sorted({id(group): group for group in group_of.values()}.values(), key=lambda group: min(group.names))
    for group in groups:
        group.num_elements = sum(sizes[one] for one in group.parameters)
    loads = [0] * num_ranks
    for group in sorted(groups, key=lambda group: -group.num_elements):  # the first of equal ones stays first
        group.owner = loads.index(min(loads))
        loads[group.owner] += group.num_elements
    return groups


class OwnedTensors(Mapping[str, Tensor]):
    """The tensors that a rank writes, each collected when it is requested, in order of names.

    All ranks make one for each version and read theirs; then all call `finish`, since a slice that a rank has of
    another's tensor is sent when that one's turn has come."""

    def __init__(
        self,
        groups: Sequence[TensorGroup],
        rank: int,
        collect: Callable[[str, int], Tensor | None],
        names: CheckpointNames | None,
    ) -> None:
        """`collect`: returns a parameter at the rank with this number, and None elsewhere; all ranks call it."""
        self._groups, self._rank, self._collect, self._names = groups, rank, collect, names
        self._group_of = {name: one for one in groups if one.owner == rank for name in one.names}
        self._held: dict[str, Tensor] = {}
        self._place = 0
        self._unread = set(self._group_of)

    def __getitem__(self, name: str) -> Tensor:
        group = self._group_of[name]
        if not group.parameters <= self._held.keys():
            self._go_on(self._groups.index(group, self._place) + 1)
        self._unread.discard(name)
        return self._held[name] if self._names is None else self._names.read(self._held)[name]

    def finish(self) -> None:
        """Send the slices of the tensors that others have still to read."""
        self._go_on(len(self._groups))
        self._held = {}

    def _go_on(self, end: int) -> None:
        for group in self._groups[self._place : end]:
            for done in [one for one in self._groups[: self._place] if one.owner == self._rank]:
                if not done.names & self._unread:
                    for parameter in done.parameters:
                        self._held.pop(parameter, None)
            for parameter in sorted(group.parameters):
                value = self._collect(parameter, group.owner)
                if value is not None and group.owner == self._rank:
                    self._held[parameter] = value
            self._place += 1

    def __contains__(self, name: object) -> bool:
        return name in self._group_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)


class RankPart:
    """A rank's part of all versions. `Rank` makes it for the first version, with the same `groups` in all ranks.

    The rank calls `take` between two updates. `write` and `lines` may run beside the next update, in one thread."""

    def __init__(
        self,
        place: RankPlace,
        shards: Shards,
        names: CheckpointNames | None,
        *,
        model: str,
        dtype: str,
        threads: int,
        store: Mapping[str, Any],
        prefix: str,
    ) -> None:
        """`store`: the settings of the object store. `prefix`: of the requests of one `RanksWriter`."""
        self.prefix = prefix
        self._number = 0
        """Number of the next request."""
        self._rank, self._shards, self._names, self._dtype = place.rank, shards, names, dtype
        self._turn = threading.Lock()
        shapes = shards.shapes
        if names is None:
            sources: dict[str, list[str]] = {name: [name] for name in shapes}
        else:
            sources = {name: [place.parameter for place in one.places] for name, one in names.tensors.items()}
        self._groups = share_out(sources, {name: shape.numel() for name, shape in shapes.items()}, place.size)
        opened = ObjectStore(**{**store, "base": Path(store["base"])})
        self._writer = PartWriter(opened, model, threads=threads, part=place.rank)

    def take(self, name: VersionName, parent: VersionName | None) -> None:
        """Copy this rank's tensors of a version. All ranks call it together."""
        dtype = SERVED[self._dtype]
        owned = OwnedTensors(
            self._groups, self._rank, lambda name, owner: self._shards.collect(name, owner, dtype), self._names
        )
        kept = self._names.kept_tensors if self._names is not None and self._rank == 0 else {}
        with self._turn:
            self._writer.take(ServedTensors(owned, self._dtype, kept), name, parent=parent)
        owned.finish()

    def write(self, kind: str) -> list[list[Any]] | None:
        """Write this rank's object of a version. Return name, size and digest."""
        with self._turn:
            written = self._writer.write(WeightsKind(kind))
        return None if written is None else [[one.name, one.num_bytes, one.digest] for one in written]

    def lines(self) -> list[list[Any]]:
        """Return the lines of this rank's tensors."""
        with self._turn:
            return [[name, dtype, list(shape), digest] for name, dtype, shape, digest in self._writer.lines()]

    def serve(self, place: RankPlace) -> None:
        """Carry out what rank 0 asks of this part, in a thread, until `end`."""
        store = place.connect()
        threading.Thread(target=self._serve, args=(store,), name="part", daemon=True).start()

    def end(self, store: Any) -> None:
        """End the thread, through another connection: another writer asks from now on, or none."""
        put(store, f"{self.prefix}/{self._number}", ["end", []])

    def _serve(self, store: Any) -> None:
        while True:
            key = f"{self.prefix}/{self._number}"
            store.wait([key], FOREVER)
            what, arguments = take(store, key)
            if what == "end":
                return
            try:
                answer = {"found": getattr(self, what)(*arguments)}
            except Exception as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            self._number += 1
            put(store, f"{key}/of/{self._rank}", answer)


class RanksWriter:
    """Writes versions in parts, one by each rank: a VersionWriter. Rank 0's backend makes one for each publisher."""

    def __init__(self, store: ObjectStore, call: Callable[..., Any], ranks: Callable[[], tuple[Ranks, Any]]) -> None:
        """`call`: has all ranks make a call, as `DeepSpeedBackend._call` does. `ranks`: returns the other ranks and
        this one, once the backend is open."""
        self._store, self._call, self._ranks = store, call, ranks
        self._connection: Any = None
        self._prefix, self._number = f"part/{secrets.token_hex(4)}", 0

    def take(self, tensors: Mapping[str, RawTensor], name: VersionName, *, parent: VersionName | None) -> None:
        """Have all ranks copy their tensors. They have the tensors, so those given here are not read."""
        arguments = {"store": self._store.settings, "prefix": self._prefix}
        self._call("take_part", {"name": name.stem, "parent": "" if parent is None else parent.stem, **arguments})

    def write(self, kind: WeightsKind) -> list[StoredObject] | None:
        """Have all ranks write their objects, side by side."""
        found = self._asked("write", kind.value)
        if any(one is None for one in found):
            return None
        written = [
            StoredObject(name=name, num_bytes=size, digest=digest) for one in found for name, size, digest in one
        ]
        for stored in written:
            self._store.check(stored, read=False)  # a store that ranks do not share would have only this rank's
        return written

    def lines(self) -> list[Line]:
        """Return the lines of all ranks' tensors."""
        return sorted((name, dtype, tuple(shape), digest) for one in self._asked("lines")
                      for name, dtype, shape, digest in one)  # fmt: skip

    def _asked(self, what: str, *arguments: Any) -> list[Any]:
        """Have all parts make a call, and return the results in order of ranks."""
        ranks, rank = self._ranks()
        store = self._connection = self._connection or ranks.place.connect()
        asked = f"{self._prefix}/{self._number}"
        self._number += 1
        put(store, asked, [what, arguments])
        found: list[Any] = []
        problem: Exception | None = None
        try:
            found.append(getattr(rank.part, what)(*arguments))
        except Exception as error:
            problem = error
        # Wait for all, so that no rank is still writing when the next version is taken.
        for other in range(1, ranks.place.size):
            key = f"{asked}/of/{other}"
            while not store.check([key]):
                if ranks.ended or (trouble := ranks.trouble()) is not None:
                    raise BackendError("backend deepspeed: its ranks have ended" if ranks.ended else trouble)
                time.sleep(PAUSE_S)
            answer = take(store, key)
            drop(store, key)
            if "error" in answer:
                problem = problem or _error(other, answer)
            else:
                found.append(answer["found"])
        drop(store, asked)
        if problem is not None:
            raise problem
        return found


def _error(rank: int, answer: Mapping[str, str]) -> Exception:
    kind = getattr(errors, answer["kind"], None)
    if isinstance(kind, type) and issubclass(kind, WeightsError):
        return kind(answer["error"])
    return BackendError(f"backend deepspeed: rank {rank} could not write its part: {answer['kind']}: {answer['error']}")
