"""A joined training loop: batches for a loop of the user's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.joined import BatchWork, TrainedWeights, TrainerDesk
from rftstream.contracts.batches import Experience
from rftstream.desk import AnswerRefused, WorkItem, WorkState
from rftstream.errors import RftError
from rftstream.joined.worker import JoinedLoop, RoleThread, named_numbers

if TYPE_CHECKING:
    from torch import Tensor


class StateOutdated(RftError):
    """The trainer goes on from another state than the loop has. The loop has to load `state()`."""


class TrainingBatch:
    """A batch to train on. `JoinedTrainer.batches` hands it out. Arrays are padded on the right with zeros; B is the
    number of rows, T the length of the longest. Position t of each belongs to token t, given the tokens before it."""

    def __init__(self, item: WorkItem) -> None:
        self._item = item
        work: BatchWork = item.work
        self._work = work

    @property
    def version(self) -> int:
        """The version whose weights the batch is trained on. The step makes the next one."""
        return self._work.sequence

    @property
    def lr(self) -> float:
        """Learning rate of this batch, by the run file's schedule."""
        return self._work.plan.lr

    @property
    def rows(self) -> Sequence[TrainingRow]:
        """The rows as numpy arrays without padding."""
        return self._work.rows

    @property
    def groups(self) -> list[list[Experience]]:
        """The rollouts of each problem with rewards and segments, for a loop that computes its own advantages."""
        found = itertools.groupby(self._work.experiences, lambda experience: experience.ids.group_id)
        return [list(group) for _, group in found]

    @functools.cached_property
    def tokens(self) -> Tensor:
        """Token ids, int64 [B, T]."""
        return self._padded("token_ids", np.int64)

    @functools.cached_property
    def attention_mask(self) -> Tensor:
        """1 for tokens and 0 for padding, int64 [B, T]."""
        return self._stack([np.ones(len(row.token_ids), np.int64) for row in self.rows])

    @functools.cached_property
    def masks(self) -> Tensor:
        """1 for tokens to train on, float32 [B, T]."""
        return self._padded("loss_mask", np.float32)

    @functools.cached_property
    def logprobs(self) -> Tensor:
        """Logprobs of the sampled tokens under the policy that sampled them, float32 [B, T]."""
        return self._padded("behavior_logprobs", np.float32)

    @functools.cached_property
    def advantages(self) -> Tensor:
        """Advantages by the run's algorithm, float32 [B, T]."""
        return self._padded("advantages", np.float32)

    @functools.cached_property
    def temperatures(self) -> Tensor:
        """Temperature of each row's sampler, by which logits are divided, float32 [B]."""
        return self._tensor(np.array([row.temperature for row in self.rows], np.float32))

    @functools.cached_property
    def segments(self) -> Tensor:
        """Number of the group, inside the batch, to which each row belongs, int64 [B]. A row is one segment of a
        rollout; most rollouts have one."""
        return self._tensor(np.array([row.group for row in self.rows], np.int64))

    def _padded(self, name: str, dtype: Any) -> Tensor:
        return self._stack([np.asarray(getattr(row, name), dtype) for row in self.rows])

    def _stack(self, arrays: Sequence[np.ndarray]) -> Tensor:
        found = np.zeros((len(arrays), max(map(len, arrays))), arrays[0].dtype)
        for row, array in zip(found, arrays, strict=True):
            row[: len(array)] = array
        return self._tensor(found)

    def _tensor(self, array: np.ndarray) -> Tensor:
        import torch

        return torch.from_numpy(array)

    def __repr__(self) -> str:
        return f"<TrainingBatch at version {self.version}: {len(self.rows)} rows>"


class JoinedTrainer(JoinedLoop):
    """A trainer whose training loop is the user's own. `rftstream.join(RUN, role="trainer")` makes it, for a run whose
    run file says `trainer.backend = "joined"`.

    with rftstream.join("runs/x", role="trainer") as me:
        model.load_state_dict(me.state())
        for batch in me.batches():
            loss = my_loss(model, batch)
            loss.backward()
            optimizer.step()
            me.step(batch, metrics={"loss": loss}, weights=model.state_dict())
            me.checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    """

    _desk: TrainerDesk

    def __init__(self, desk: TrainerDesk, thread: RoleThread | None = None) -> None:
        super().__init__(desk, thread)
        self._generation = 0
        """The state that the loop has loaded."""
        self._stepped = -1
        """The version that the loop made last."""

    # ------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the weights to go on from, as `load_state_dict` takes them: those that the loop kept under "model" in
        its last checkpoint, else those of the version in force, in the served dtype."""
        desk = self._wait_for_state()
        self._generation, self._stepped = desk.generation, -1
        if desk.kept is not None and isinstance(desk.kept.get("model"), Mapping):
            return dict(desk.kept["model"])
        assert desk.weights is not None
        return dict(desk.weights.state(desk.state))

    @property
    def model_folder(self) -> Path:
        """The model folder of version 0, for the model's config and the tokenizer."""
        return self._wait_for_state().model_folder

    @property
    def kept(self) -> dict[str, Any] | None:
        """The map that the loop handed to `checkpoint`, as it was for the state to go on from; None if there is none,
        as at the beginning."""
        desk = self._wait_for_state()
        return None if desk.kept is None else dict(desk.kept)

    # ------------------------------------------------------------------------------------------ batches

    def batches(self) -> Iterator[TrainingBatch]:
        """Yield the batches in order. Each is answered by `step` or `skip` before the next comes. The loop ends when
        the run has finished, or after `stop`. A loop that was interrupted is followed by one that begins with the batch
        that it had. StateOutdated if the loop has not loaded the state from which the trainer goes on."""
        self._begin()
        while (batch := self._next()) is not None:
            yield batch
            self._check_answered(batch)

    def _begin(self) -> None:
        self._check_state()
        self._desk.take_back()

    def _next(self, wait_s: float | None = None) -> TrainingBatch | None:
        """Return the next batch. None if the time is over, or if no more come."""
        self._move_on()
        items = self._desk.take(wait_s=wait_s)
        self._check_state()
        return TrainingBatch(items[0]) if items else None

    def _check_answered(self, batch: TrainingBatch) -> None:
        if batch._item.state is WorkState.taken and not self.has_ended:
            raise AnswerRefused(
                f"batch {batch.version}: no answer, expected one before the next batch; call `step`, or `skip` to "
                "leave it out"
            )

    def step(
        self, batch: TrainingBatch, *, weights: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Hand in the weights that the batch made, all of them, by the names of `state()` or of the model's checkpoint.
        They are copied. `metrics` are numbers by name. When this returns, the step is on the log for good, with the
        position, the version and its announcement, in one transaction.

        AnswerRefused if the weights are not those of the model; the batch stays in hand. TakenOver if another trainer
        has taken the role: then the step is not on the log, and nothing of it counts."""
        self._desk.check()
        assert self._desk.weights is not None
        self._check_answerable(batch)
        served = self._desk.weights.served(weights)
        self._hand_in(batch, TrainedWeights(served=served, metrics=named_numbers(metrics or {}, "metrics")))
        self._settle(batch)

    def skip(self, batch: TrainingBatch, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Leave a batch out, for example after a loss that is not finite. It counts as trained, and the next version
        has the same weights. The loop's model and optimizer must be as they were before the batch."""
        self._check_answerable(batch)
        self._hand_in(batch, TrainedWeights(served=None, metrics=named_numbers(metrics or {}, "metrics"), skipped=True))
        self._settle(batch)

    @property
    def checkpoint_due(self) -> bool:
        """Whether `checkpoint` would keep a state now (`trainer.checkpoint_every`, and at the end)."""
        return self._stepped >= 0 and self._desk.due == self._stepped

    def checkpoint(self, state: Mapping[str, Any]) -> bool:
        """Keep the loop's state after the last step, if it is due: tensors, numbers and texts in dicts and lists. A
        process that goes on from there gets it as `kept`. Call it after each step. Return whether it was kept."""
        self._desk.check()
        if not isinstance(state, Mapping):
            raise AnswerRefused(f"state: got a {type(state).__name__}, expected a dict, such as {{'model': ...}}")
        if not self.checkpoint_due:
            return False
        from rftstream.backends.joined_state import write_state

        desk, generation = self._desk, self._generation
        desk.wait(lambda: desk.awaited is not None or desk.has_ended or desk.generation != generation)
        desk.check()
        self._check_state()
        if (folder := desk.awaited) is None:
            return False
        try:
            write_state(folder, state)
        except OSError:
            if not desk.is_given_up:
                raise
            return False  # the role has dropped this checkpoint, and the next call says why
        with desk.changed:
            desk.keeps_state, desk.awaited, desk.due = True, None, -1
            desk.notify()
        return True

    # ------------------------------------------------------------------------------------------ the desk

    def _wait_for_state(self) -> TrainerDesk:
        desk = self._desk
        desk.wait(lambda: desk.is_ready or desk.has_ended)
        desk.check()
        if not desk.is_ready:
            raise RftError("the run has ended, so there is no state to go on from; leave the loop")
        return desk

    def _check_state(self) -> None:
        self._desk.check()
        if self._generation != self._desk.generation and not self.has_ended:
            what = "the trainer began anew from its checkpoint" if self._generation else "nothing is loaded yet"
            raise StateOutdated(f"{what}, expected the loop to go on from its state; load `state()`, then `batches()`")

    def _check_answerable(self, batch: TrainingBatch) -> None:
        self._desk.check()
        if not isinstance(batch, TrainingBatch):
            raise AnswerRefused(f"got a {type(batch).__name__}, expected a batch that `batches` has given")
        if batch._item.state is WorkState.answered:
            raise AnswerRefused(f"batch {batch.version}: handed in for the second time, expected once")

    def _hand_in(self, batch: TrainingBatch, answer: TrainedWeights) -> None:
        desk, generation = self._desk, self._generation
        if not desk.answer(batch._item, answer):
            desk.wait(lambda: desk.has_ended or desk.generation != generation)  # it says why
            self._check_state()
            raise RftError(f"batch {batch.version}: the role has left, so the step is not on the log; join again")
        self._stepped = batch.version + 1

    def _settle(self, batch: TrainingBatch) -> None:
        """Wait until the step is on the log."""
        desk, version, generation = self._desk, batch.version + 1, self._generation

        def is_settled() -> bool:
            is_on_log = desk.version >= version or (desk.awaited is not None and desk.due == version)
            return is_on_log or desk.has_ended or desk.generation != generation

        desk.wait(is_settled)
        if desk.version < version:
            desk.check()
            self._check_state()

    def _move_on(self) -> None:
        desk = self._desk
        with desk.changed:
            desk.moved_on = max(desk.moved_on, self._stepped)
            desk.notify()
