"""The backend of a joined training loop: every batch goes to a loop of the user's own, by way of a desk.

The loop answers a batch with the weights that it made of it. The backend keeps a copy of them in the served dtype. A
checkpoint holds this copy, and the state that the loop hands in for it. The trainer saves the copy before the step is
on the log; the loop's state comes after that, so another thread completes the checkpoint (`complete`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import MASTERS_FILE, POLICY, OptimizerSettings, Update, UpdatePlan
from rftstream.contracts.batches import Experience
from rftstream.desk import Desk, WorkItem, WorkState
from rftstream.errors import ConfigError, RftError, WeightsError
from rftstream.models.folders.folder import copy_companions
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import RawTensor, decode_snapshot

if TYPE_CHECKING:
    import numpy as np

    from rftstream.backends.joined_weights import JoinedWeights

log = logging.getLogger(__name__)

ABOUT_FILE, WEIGHTS_FILE = "joined.json", "joined.safetensors"

BATCH = "batch"
"""Key of the batch on the desk; there is only one at a time."""


class LoopLeft(RftError):
    """The loop has left without an answer, or the role does not wait for it any more. The batch is trained by whoever
    comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWork:
    """A batch on the desk."""

    sequence: int
    experiences: Sequence[Experience]
    rows: Sequence[TrainingRow]
    plan: UpdatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeights:
    """A loop's answer to a batch, checked."""

    served: Mapping[str, RawTensor] | None
    """The new weights; None if they stay as they were."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False


class TrainerDesk(Desk):
    """The desk of a joined training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.model_folder = Path()
        """Model folder of version 0."""
        self.weights: JoinedWeights | None = None
        """Names and shapes of the model's weights."""
        self.generation = 0
        """How often the role has loaded a state from which the loop must go on."""
        self.is_ready = False
        """Whether the role has recovered with that state."""
        self.state: Mapping[str, RawTensor] = {}
        """Weights of the newest version, as they are served."""
        self.kept: Mapping[str, Any] | None = None
        """State of the loop in the checkpoint from which the role began; None if there is none."""
        self.version = -1
        """Newest version that is on the log; -1 until the role says so."""
        self.left = False
        """Whether the loop is gone, so that no answer will come."""
        self.due = -1
        """Newest version of which a checkpoint is saved."""
        self.awaited: Path | None = None
        """Folder of the checkpoint that waits for the loop's state."""
        self.moved_on = -1
        """Newest version after which the loop has asked for another batch, so that no more state of it comes."""
        self.keeps_state = False
        """Whether the loop has handed in a state for a checkpoint, now or before."""
        self.is_given_up = False
        """Whether the role needs nothing that it waits for: it is about to begin with another state, or to end."""

    def leave(self) -> None:
        """Note that the loop is gone."""
        with self.changed:
            self.left = self.stops = True
            self.notify()

    def begin_state(self, state: Mapping[str, RawTensor], kept: Mapping[str, Any] | None) -> None:
        """Begin with another state. What the loop has in hand is void."""
        self.withdraw(BATCH)
        with self.changed:
            self.generation += 1
            self.state, self.kept, self.is_ready, self.is_given_up = state, kept, False, False
            self.version = self.due = self.moved_on = -1
            self.awaited, self.keeps_state = None, self.keeps_state or kept is not None
            self.notify()

    def wait_answer(self, item: WorkItem) -> TrainedWeights:
        """Wake the loop, and return its answer. LoopLeft if none will come."""
        self.collect()
        self.wait(lambda: item.state is WorkState.answered or self.is_given_up or self.left or self.has_ended)
        if item.state is not WorkState.answered:
            self.withdraw(item.key)
            raise LoopLeft("there is no answer to the batch; whoever trains next trains it")
        self.collect()
        answer: TrainedWeights = item.answer
        return answer


class JoinedBackend:
    """A backend as `Backend` describes it. `rftstream.join` brings the desk; without one there is nobody who trains."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        seed: int,
        desk: Desk | None = None,
    ) -> None:
        if not isinstance(desk, TrainerDesk):
            raise ConfigError(
                "trainer.backend: 'joined' has no loop that trains, expected one; "
                '`rftstream.join(RUN, role="trainer")` in Python brings it, and nobody else can train its batches again'
            )
        self.desk, self._model, self._seed = desk, model, seed
        desk.model_folder = model.folder
        self._batch: tuple[int, Sequence[Experience]] = 0, ()
        self._version = -1
        """Newest version that the loop has made of this state; -1 for none."""

    def open(self) -> None:
        """Load version 0, and the names of its weights."""
        from rftstream.backends.joined_weights import weights_of

        if self.desk.weights is None:
            self.desk.weights = weights_of(self._model, self._seed)
        self._begin(self.desk.weights.initial, None)

    def _begin(self, state: Mapping[str, RawTensor], kept: Mapping[str, Any] | None) -> None:
        self._version = -1
        self.desk.begin_state(state, kept)

    def begin_batch(self, sequence: int, experiences: Sequence[Experience]) -> None:
        """Note the batch whose rows come with the next `update`."""
        self._batch = sequence, experiences

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """Lay the batch on the desk, and wait for the loop's answer."""
        desk = self.desk
        sequence, experiences = self._batch
        work = BatchWork(sequence=sequence, experiences=experiences, rows=rows, plan=plan)
        answer = desk.wait_answer(desk.offer(BATCH, work))
        self._version = sequence + 1
        if answer.served is not None:
            desk.state = answer.served
        return Update(metrics=answer.metrics, skipped=answer.skipped)

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Raise ConfigError: only the loop has the policy."""
        raise ConfigError(
            "trainer.algorithm: needs logprobs of the policy or the reference before a batch, which only the loop can "
            "compute; use grpo or another one without them, and compute what the loss needs in the loop"
        )

    reference_logprobs = logprobs

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the weights that the loop handed in last, or those of the state that was loaded."""
        with self.desk.changed:
            self.desk.is_ready = True
            self.desk.notify()
        return self.desk.state

    def save(self, folder: Path) -> None:
        """Write the weights. The loop's state follows in `complete`. WeightsError if the loop leaves, and its state of
        this version is gone: an earlier checkpoint, which has one, is better."""
        from rftstream.weights.tensors import write_tensors

        desk = self.desk
        if desk.stops and desk.keeps_state and desk.moved_on >= self._version:
            raise WeightsError(f"the loop's state of version {self._version} is gone, expected it for a checkpoint")
        with desk.changed:
            desk.due = self._version
        write_tensors(folder / WEIGHTS_FILE, self.desk.state)
        about = {"backend": "joined", "model": self._model.name}
        (folder / ABOUT_FILE).write_text(json.dumps(about) + "\n", encoding="utf-8")

    def note_step(self, version: int) -> None:
        """Tell the loop that a version is on the log: it waits for that, and the role for the loop's next answer."""
        with self.desk.changed:
            self.desk.version = version
            self.desk.notify()

    def complete(self, folder: Path) -> None:
        """Wait until the loop has written its state into the folder, or will not do so any more. The trainer calls it
        in the thread that writes checkpoints, when the step is on the log."""
        desk = self.desk
        with desk.changed:
            desk.awaited = folder
            desk.notify()
        version = desk.due

        def is_settled() -> bool:
            return desk.awaited is None or desk.moved_on >= version or desk.left or desk.has_ended

        desk.wait(lambda: is_settled() or desk.is_given_up)
        with desk.changed:
            if not is_settled():
                desk.awaited = None
                raise LoopLeft(f"the role did not wait for the loop's state of version {version}")
            if desk.awaited is not None and desk.keeps_state:
                log.warning("the checkpoint of version %d lacks the loop's state; call `checkpoint`", version)
            desk.awaited = None

    def give_up(self) -> None:
        """Wait for nothing of the loop any more, until a state is loaded. The loop itself may be waiting for a step
        that will never be on the log."""
        with self.desk.changed:
            self.desk.is_given_up = True
            self.desk.notify()

    def load(self, folder: Path) -> None:
        """Begin with the state in a checkpoint: of a joined loop, or of the backend torch."""
        from rftstream.backends.joined_state import read_state

        assert self.desk.weights is not None, "open comes first"
        if (folder / WEIGHTS_FILE).is_file():
            found = decode_snapshot((folder / WEIGHTS_FILE).read_bytes(), where=str(folder / WEIGHTS_FILE))
            self._begin(found, read_state(folder))
            return
        masters = folder / MASTERS_FILE[POLICY]
        if not masters.is_file():
            raise ConfigError(f"{folder}: no checkpoint of a joined loop or of the backend torch, expected one of them")
        from safetensors.torch import load_file

        weights = load_file(masters)
        self._begin(self.desk.weights.served(weights), {"model": weights})

    def export(self, folder: Path) -> None:
        """Write a model folder with the newest weights."""
        from rftstream.weights.tensors import write_tensors

        copy_companions(self._model, folder)
        write_tensors(folder / "model.safetensors", self.desk.state, {"format": "pt"})

    def close(self) -> None:
        """Do nothing: the loop has the model."""
