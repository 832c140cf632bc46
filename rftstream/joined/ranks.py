"""A joined training loop on several processes, such as those of torchrun. Each makes the same calls in the same order.

Rank 0 has the role's thread. It tells the others what its calls return or raise, so that all loops do the same. Shards
(DTensors, as FSDP2 has them) are gathered one after another, and only rank 0 keeps them, in main memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rftstream.backends.joined import BATCH, TrainerDesk
from rftstream.desk import AnswerRefused, WorkItem, WorkState
from rftstream.errors import ConfigError, RftError, TakenOver
from rftstream.joined.trainer import JoinedTrainer, StateOutdated, TrainingBatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

LOOK_S = 5.0
"""Seconds after which ranks that wait for a batch tell each other whether to stop. Collectives have a time limit."""

ERRORS = {kind.__name__: kind for kind in (AnswerRefused, ConfigError, StateOutdated, TakenOver)}
"""Errors of rank 0 that other ranks raise as they are. Of others they raise an RftError with the text."""

T = TypeVar("T")


def check_alone() -> None:
    """Raise ConfigError if this process is one of several ranks, and not the first: each trainer that joins takes the
    role from the one before."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if rank:
        raise ConfigError(
            f"role: rank {rank} of {size} joins as a trainer of its own, expected rank 0 alone, or all ranks together "
            "by `join(..., group=torch.distributed.group.WORLD)`"
        )


class RankTrainer(JoinedTrainer):
    """The joined trainer of one rank. `rftstream.join` makes one in each process of the group."""

    def __init__(self, group: ProcessGroup, join: Callable[[], JoinedTrainer]) -> None:
        """`join` joins the run. Only rank 0 calls it."""
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self._source = dist.get_global_rank(group, 0)
        self._inner: JoinedTrainer | None = None
        self._is_first = dist.get_rank(group) == 0
        inner = self._on_rank_0(join, tell=lambda found: None)
        super().__init__(TrainerDesk() if inner is None else inner._desk, None if inner is None else inner._thread)
        self._inner = inner
        self._folder: Path | None = None
        self._dtype: torch.dtype | None = None
        """The dtype in which weights are served; None before the first `state`."""
        self._is_over = self._due = False

    # ------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the weights to go on from, whole, on all ranks."""
        found: dict[str, Any] = self._copied(lambda: self._first.state())
        self._dtype = self._on_rank_0(lambda: None if (one := self._first._desk.weights) is None else one.dtype)
        return found

    @property
    def model_folder(self) -> Path:
        """The model folder of version 0, as rank 0 has it."""
        if self._folder is None:
            self._folder = self._on_rank_0(lambda: self._first.model_folder)
        return self._folder

    @property
    def kept(self) -> dict[str, Any] | None:
        """The map that the loop handed to `checkpoint`, with whole tensors. All ranks have to ask for it."""
        found: dict[str, Any] | None = self._copied(lambda: self._first.kept)
        return found

    # ------------------------------------------------------------------------------------------ batches

    def batches(self) -> Iterator[TrainingBatch]:
        """Yield the batches, the same ones on all ranks."""
        self._on_rank_0(lambda: self._first._begin())
        while not self._is_over:
            found = self._on_rank_0(self._look, tell=lambda found: (found[0] and found[0]._work, found[1]))
            stops = [False] * self._dist.get_world_size(self._group)
            self._dist.all_gather_object(stops, self._desk.stops, group=self._group)
            if any(stops):
                self._desk.stop()
            batch, self._is_over = found
            if batch is None:
                continue
            if not isinstance(batch, TrainingBatch):
                item = WorkItem(BATCH, batch)
                item.state = WorkState.taken
                batch = TrainingBatch(item)
            yield batch
            if batch._item.state is WorkState.taken:
                self._on_rank_0(lambda batch=batch: self._first._check_answered(batch))  # type: ignore[misc]

    def _look(self) -> tuple[Any, bool]:
        """Return a batch if there is one now, and whether there will be no more."""
        batch = self._first._next(LOOK_S)
        return batch, batch is None and self._first.has_ended

    def step(
        self, batch: TrainingBatch, *, weights: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Hand in the weights that the batch made: on each rank its shards, or whole ones, of which rank 0's count, as
        do its metrics. Otherwise as without a group."""
        whole = self._gathered(weights, "weights", self._dtype)
        self._answer(batch, lambda: self._first.step(batch, weights=whole, metrics=metrics))

    def skip(self, batch: TrainingBatch, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Leave a batch out, on all ranks."""
        self._answer(batch, lambda: self._first.skip(batch, metrics=metrics))

    def _answer(self, batch: TrainingBatch, call: Callable[[], None]) -> None:
        def answer() -> bool:
            call()
            return self._first.checkpoint_due

        self._due = self._on_rank_0(answer)
        if self._inner is None:
            batch._item.state = WorkState.answered

    @property
    def checkpoint_due(self) -> bool:
        """Whether `checkpoint` would keep a state now. The same on all ranks."""
        return self._due

    def checkpoint(self, state: Mapping[str, Any]) -> bool:
        """Keep the loop's state if it is due: shards of all ranks, and whatever else rank 0 has."""
        if not self._due:
            return False
        self._due = False
        whole = self._gathered(state, "state", None)
        return self._on_rank_0(lambda: self._first.checkpoint(whole))

    @property
    def has_ended(self) -> bool:
        """Whether no more batches will come, as far as this rank knows."""
        return self._is_over or self._desk.stops

    def close(self) -> None:
        """Leave the run. Ranks do not wait for each other here."""
        self._is_over = True
        if self._inner is not None:
            self._inner.close()

    # ------------------------------------------------------------------------------------------ among ranks

    @property
    def _first(self) -> JoinedTrainer:
        assert self._inner is not None, "only rank 0 has it"
        return self._inner

    def _on_rank_0(self, call: Callable[[], T], tell: Callable[[T], Any] = lambda found: found) -> T:
        """Make a call on rank 0, and return its result there, and `tell` of it on the others. Its error is raised on
        all ranks."""
        found: Any = None
        error: Exception | None = None
        answer: tuple[Any, tuple[str, str] | None] = None, None
        if self._is_first:
            try:
                found = call()
                answer = tell(found), None
            except Exception as caught:
                error, answer = caught, (None, (type(caught).__name__, str(caught)))
        told, problem = self._told(answer)
        if problem is not None:
            kind, text = problem
            raise error or ERRORS.get(kind, RftError)(text or kind)
        return found if self._is_first else told  # type: ignore[no-any-return]

    def _told(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        box = [value]
        self._dist.broadcast_object_list(box, src=self._source, group=self._group)
        return box[0]

    def _copied(self, call: Callable[[], Any]) -> Any:
        """Make a call on rank 0, and return a copy of its result on all ranks, tensor by tensor."""
        return self._copy(self._on_rank_0(call, tell=lambda found: None))

    def _copy(self, value: Any) -> Any:
        keys = self._told(list(value) if isinstance(value, Mapping) else None)
        if keys is None:
            return self._told(value)
        return {key: self._copy(None if value is None else value[key]) for key in keys}

    def _gathered(self, value: Any, where: str, dtype: torch.dtype | None) -> Any:
        """Return a map with all shards in it as whole tensors, on rank 0; elsewhere what was given. AnswerRefused on
        all ranks if they have not the same shards."""
        shards = [f"{name} {tuple(one.shape)}" for name, one in _shards(value, where)]
        of_ranks: list[list[str]] = [[]] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(of_ranks, shards, group=self._group)
        for rank, other in enumerate(of_ranks):
            if other != of_ranks[0]:
                odd = sorted(set(other) ^ set(of_ranks[0])) or ["another order"]
                raise AnswerRefused(
                    f"{where}: rank {rank} has {len(other)} shards (DTensors) and rank 0 has {len(of_ranks[0])} "
                    f"({odd[0]}), expected the same on all ranks; hand in the same map on each"
                )
        return self._whole(value, dtype)

    def _whole(self, value: Any, dtype: torch.dtype | None) -> Any:
        if hasattr(value, "full_tensor"):
            value = value.detach()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            found = value.full_tensor()  # a collective of the tensor's own ranks
            return found.cpu() if self._is_first else None
        if isinstance(value, Mapping):
            return {key: self._whole(one, dtype) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._whole(one, dtype) for one in value) if type(value) in (list, tuple) else value
        return value


def _shards(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the shards in nested maps and lists, with their places."""
    if hasattr(value, "full_tensor"):
        yield where, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _shards(one, f"{where}.{key}")
    elif type(value) in (list, tuple):
        for number, one in enumerate(value):
            yield from _shards(one, f"{where}[{number}]")
