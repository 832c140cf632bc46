"""The trainer: batches -> weights and steps. Its positions live in its checkpoint.

Order of writing: object durable -> announcement and StepRecord in one transaction -> every so often a checkpoint,
before which the log is made durable. Order of starting: claim, read `steps` and `weights`, load the newest good
checkpoint in force, publish its state as the anchor of the new epoch, train the recorded batches from there. What is
deleted was named by a committed record before: `gone` of an announcement, or `Trimmed` (checkpoint_retention.py).

An update runs in a thread of its own, where the backend lives. As soon as the weights of a version are taken over the
next update begins, unless a checkpoint is to be made of the version before: the object is written and announced beside
it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from rftstream import metrics
from rftstream.algorithms.base import spread_needed
from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL, is_without_signal
from rftstream.backends.numerics import computed_with
from rftstream.clock import Clock
from rftstream.config.loader import to_toml
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.errors import ContractError, StopRule, WeightsError, WeightsGone
from rftstream.models.spec import ModelSpec
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.assembly import BatchAssembly, CommittedBatches
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.checkpoint_cycle import CheckpointCycle
from rftstream.roles.trainer.checkpoint_retention import Keeping
from rftstream.roles.trainer.final import leave_final
from rftstream.roles.trainer.held_out import HeldOut
from rftstream.roles.trainer.mismatch import MismatchWatch
from rftstream.roles.trainer.pending_update import PendingUpdate
from rftstream.roles.trainer.progress import TrainerProgress, too_many_skips
from rftstream.roles.trainer.run_end import RunEnd
from rftstream.roles.trainer.schedule import rate_at
from rftstream.roles.trainer.signal_watch import SignalWatch
from rftstream.roles.trainer.training import Training, check_made_for
from rftstream.roles.trainer.version_publisher import VersionPublisher
from rftstream.roles.trainer.versions import Versions
from rftstream.service.role import Foreign, Log, Publish, Received, SingleTransaction
from rftstream.service.step_defaults import SingleStepDefaults
from rftstream.weights.store import ObjectStore

log = logging.getLogger(__name__)

LOOK_BACK_S = 60.0
"""So long without a batch, and the trainer looks whether its newest weights are still there: without them there will be
none. Then after twice as long, and so on."""

BATCHES_AHEAD = 1
"""Read while one is trained; more stay on the log, however many were recorded."""

LOOK_UP_S = 0.2
"""So long it waits for an update before it looks at the log."""


class TrainerStep(SingleStepDefaults):
    """The step of the trainer: it trains batches in order, and publishes versions. `workers/trainer.py` makes it;
    SingleService calls it, in this order:

    - `recover` reads `control`, `steps`, `weights` and `evals`, opens the backend, and loads the newest checkpoint in
      force.
    - `absorb` puts batches together, until one more than is trained is ready (`full`).
    - `advance` returns the anchor of this epoch first. Then it begins an update, waits a moment for it, and returns its
      step and its weights when it has ended; after a checkpoint what is trimmed; and at last the end of the run.
    - `committed` makes the progress of that transaction its own, and writes a checkpoint when one is due.
    - `leave` writes a checkpoint for the successor. `close` abandons the update and closes the backend.

    When the run is finished it stays until what was given up is deleted (`outlives_the_run`, `done`).
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        model: ModelSpec,
        training: Training,
        store: ObjectStore,
        final: Path,
        clock: Clock,
        compute: Executor,
        held_out: HeldOut | None = None,
    ) -> None:
        """`compute`: of one thread; all that the backend is asked is asked there."""
        self._config = config
        self._held_out = held_out
        self._settings = config.trainer
        self._model = model
        self._training = training
        self._backend = BackendThread(training.backend, compute)
        self._store = store
        self._final = final
        self._clock = clock
        self._mismatch = MismatchWatch(config)
        self._signal = SignalWatch(config)
        self._paused = False
        self._end = RunEnd(config, clock)
        self._underway: PendingUpdate | None = None
        self._reset()

    def _reset(self) -> None:
        self._abandon()
        self._epoch = 0
        self._progress = TrainerProgress()
        self._versions = Versions(self._config.evaluations, self._config.weights.keep)
        self._retention = Keeping(self._config, self._store, self._clock)
        self._checkpoints = CheckpointCycle(self._retention, self._versions, self._backend, self._store, self._settings)
        self._publisher = VersionPublisher(
            self._model,
            anchor_every=self._config.weights.anchor_every,
            backend=self._backend,
            versions=self._versions,
            store=self._store,
            clock=self._clock,
        )
        self._finished_said = False
        self._assembly: BatchAssembly | None = None
        """Known once it has recovered."""
        self._end.forget()
        self._next: TrainerProgress | None = None
        """What `committed` makes the progress, once the transaction is on the log."""
        self._anchor_due = True
        self._published = False
        """Whether the version that was trained last is: a run ends with no other."""
        self._done = False
        self._stop: StopRule | None = None
        self._waited_since = self._clock.now()
        """Since when the backend has had nothing to do."""
        self._look_back_after_s = LOOK_BACK_S
        self._log: Log | None = None

    def _abandon(self) -> None:
        if self._underway is not None:
            self._underway.abandon()
            self._underway = None

    @property
    def done(self) -> bool:
        return self._done

    @property
    def outlives_the_run(self) -> bool:
        return self._checkpoints.trim_due or self._retention.owes

    def after_the_end(self, log_: Log) -> bool:
        return self._retention.after_the_end(log_)

    # ------------------------------------------------------------------------------------------ recovering

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        self._reset()
        self._log = log_
        self._epoch = claim.epoch
        evals = log_.ends("evals")  # what comes while the rest is read is read again
        for topic in ("control", "steps", "weights", "evals"):
            for received in log_.messages(topic):
                self.absorb(received)
                if (topic, received.record.key) == ("control", b"finished"):
                    self._finished_said = received.message is not None
        self._backend.open()
        self._retention.begin(log_)
        offsets = log_.transport.admin.begin_offsets("batches")
        places, ends = sorted(offsets), log_.ends("batches")
        begins = tuple(offsets[place] for place in places)
        found = self._checkpoints.load(begins, tuple(ends[place] for place in places))
        if found is not None:
            self._progress = found
        if self._held_out is not None:
            self._held_out.begin(log_)
        if not self._progress.positions:
            self._progress.positions = begins
        self._assembly = BatchAssembly(self._settings.shares, self._progress.version, CommittedBatches(log_))
        log.info("starts from version %d (epoch %d)", self._progress.version, self._epoch)
        return {
            **dict(zip(places, self._progress.positions, strict=True)),
            **evals,
        }

    # ------------------------------------------------------------------------------------------ reading

    def absorb(self, received: Received) -> Sequence[Foreign] | None:
        match received.message:
            case Experience() | BatchManifest():
                assert self._assembly is not None, "nobody reads batches before"
                return self._assembly.add(received)
            case StepRecord() as step:
                self._versions.record(step)
            case WeightsAnnounced() as announced:
                self._versions.announce(announced)
            case EvalResult() as result:
                self._versions.evaluate(result)
            case RunManifest() as manifest:
                self._end.created_at = manifest.created_at
            case TasksEnded() as ended:
                self._end.ended = ended
            case Trimmed() as trimmed:
                self._retention.absorb(trimmed)
            case None if received.record.key == b"end":
                self._end.ended = None
        return None

    def undecodable(self, record: Record, error: ContractError) -> None:
        if record.topic == "batches":
            assert self._assembly is not None, "nobody reads batches before"
            self._assembly.undecodable(record, error)

    # ------------------------------------------------------------------------------------------ training

    def advance(self) -> SingleTransaction | None:
        if self._stop is not None:
            raise self._stop
        self._retention.delete_owed()
        if self._config.experts_alone and not self._end.is_known():
            return None
        if self._anchor_due and not self._finished_said:
            return self._anchor()
        if self._checkpoints.trim_due:
            trimmed = self._checkpoints.plan()
            if trimmed is not None:
                return SingleTransaction((Publish("control", 0, trimmed),))
            self._look_at_end()
        if self._finished_said:
            self._look_at_end()
            return None
        if self._underway is None and not self._begin(self._progress):
            return None if self._paused else self._without_batch()
        assert self._underway is not None
        return self._end_update(self._underway) if self._underway.ends_within(LOOK_UP_S) else None

    def _without_batch(self) -> SingleTransaction | None:
        """The feeder's word that there is no more may come after the batch, time passes without batches too, and a run
        that goes on may have been given an end that it has reached already."""
        reason = self._end.reason(self._progress)
        if reason is None:
            self._look_back()
            return None
        name = VersionName(trainer_epoch=self._epoch, version=self._progress.version)
        self._next = self._progress
        return SingleTransaction((self._finished(reason, name),))

    def _anchor(self) -> SingleTransaction:
        """The state that this epoch starts from, as an object and a record of its own."""
        progress = self._progress
        name = VersionName(trainer_epoch=self._epoch, version=progress.version)
        announced = self._publisher.write(self._publisher.take(name, resumed=True), self._retention.names)
        self._next = progress
        record = StepRecord(
            name=name,
            batch_sequence=None,
            positions=progress.positions,
            trained_groups=progress.trained_groups,
            trained_rollouts=progress.trained_rollouts,
            weights_digest=announced.weights_digest,
            metrics={},
            resumed=True,
            recorded_at=self._clock.now(),
            config=to_toml(self._end.config),
            computed_with=computed_with(self._model.device, self._model.threads),
        )
        return SingleTransaction((Publish("weights", 0, announced), Publish("steps", 0, record)))

    def _begin(self, progress: TrainerProgress) -> bool:
        """Begins the update after `progress`, if there is a batch for it."""
        if self._paused or (self._end.comes_by_itself(progress) and self._published):
            return False
        batch = self._assembly.take() if self._assembly is not None else None
        if batch is None:
            return False
        self._backend.is_touched = True
        stage, lr = self._end.stages.at(progress.version), rate_at(self._end.stages, progress.version)
        if self._end.stages.named:
            check_made_for(batch, stage)
        self._underway = PendingUpdate(
            batch,
            progress,
            lambda: self._training.at(stage).update(batch, lr),
            compute=self._backend.executor,
            clock=self._clock,
            waited_s=self._clock.now() - self._waited_since,
        )
        return True

    def _end_update(self, underway: PendingUpdate) -> SingleTransaction:
        update, values, step_s = underway.result()
        self._underway = None
        batch, progress = underway.batch, underway.progress
        self._mismatch.look(values, batch.experiences)
        ended = self._clock.now()
        stage = self._end.stages.at(progress.version)
        training = self._training.at(stage)
        following = progress.after(
            batch,
            skipped=update.skipped,
            rewards_kept=self._config.run.stop_reward_over,
            without_signal=stage.takes_rollouts and is_without_signal(values, spread_needed(training.algorithm)),
        )
        if not self._config.without_tasks:
            values[STEPS_WITHOUT_SIGNAL] = float(following.steps_without_signal)
        reason = self._end.reason(following)
        if self._end.stages.named:
            values["stage"] = stage.number + 1.0
        if self._held_out is not None and self._held_out.due(stage, following.version, last=reason is not None):
            values |= self._backend.asked(self._held_out.look)(stage)
        name = VersionName(trainer_epoch=self._epoch, version=following.version)
        no_signal = self._signal.look(values)
        self._stop = too_many_skips(self._settings, following, batch) or (no_signal if reason is None else None)
        # Before it has to wait it publishes in any case: what it waits for may be waiting for this version.
        waits = not self._num_ready
        publish_now = waits or reason is not None or following.version % self._settings.publish_every == 0
        taken = self._publisher.take(name) if publish_now else None
        self._waited_since = self._clock.now()
        beside = (
            reason is None and self._stop is None and not self._checkpoints.is_due(following) and self._begin(following)
        )
        announced = self._publisher.write(taken, self._retention.names) if taken is not None else None
        now = self._clock.now()
        held_up_s = (self._waited_since if beside else now) - ended
        values |= underway.speeds(values, step_s=step_s, publish_s=held_up_s) | training.speeds(values, step_s)
        record = StepRecord(
            name=name,
            batch_sequence=batch.sequence,
            positions=batch.positions,
            trained_groups=following.trained_groups,
            trained_rollouts=following.trained_rollouts,
            weights_digest=announced.weights_digest if announced else None,
            metrics=values,
            skipped=update.skipped,
            announced=announced is not None,
            last=reason is not None,
            recorded_at=now,
        )
        self._next = following
        outputs = [Publish("steps", 0, record)]
        if announced is not None:
            outputs.insert(0, Publish("weights", 0, announced))
        if reason is not None:
            outputs.append(self._finished(reason, name))
        return SingleTransaction(tuple(outputs))

    def _look_back(self) -> None:
        """Explorers that cannot follow stay on older weights, and the batches that this trainer waits for may have to
        be sampled with newer ones. It cannot announce a version twice; one that begins anew announces an anchor."""
        if self._clock.now() - self._waited_since < self._look_back_after_s:
            return
        self._look_back_after_s *= 2
        try:
            self._publisher.check_back()
        except WeightsGone as error:
            self.leave()
            raise WeightsGone(
                f"{error}; explorers cannot follow: the trainer begins anew, with a full snapshot"
            ) from error
        except WeightsError as error:
            log.warning("%s; looking again later", error)

    # ------------------------------------------------------------------------------------------ ending

    def _finished(self, reason: str, name: VersionName) -> Publish:
        """`final/` is there before the run is said to be finished."""
        leave_final(self._final, self._backend.asked(self._backend.backend.export))
        return Publish("control", 0, RunFinished(reason=reason, name=name, finished_at=self._clock.now()))

    # ------------------------------------------------------------------------------------------ afterwards

    def committed(self, transaction: SingleTransaction) -> None:
        if self._next is None:
            for output in transaction.outputs:
                if isinstance(output.message, Trimmed):
                    self._checkpoints.carry_out(output.message)
                    self._look_at_end()
            return
        trained = self._next is not self._progress
        self._progress, self._next = self._next, None
        finished = False
        for output in transaction.outputs:
            match output.message:
                case StepRecord() as step:
                    self._versions.record(step)
                    self._published = step.announced or step.resumed
                    if not step.resumed:
                        metrics.STEPS.labels("skipped" if step.skipped else "trained").inc()
                        metrics.WITHOUT_SIGNAL.set(self._progress.steps_without_signal)
                    for metric, value in step.metrics.items():
                        metrics.TRAIN.labels(metric).set(value)
                case WeightsAnnounced() as announced:
                    self._versions.announce(announced)
                    metrics.PUBLISHED.set(announced.name.version)
                    self._retention.delete_weights(announced.gone)
                case RunFinished():
                    finished = True
        self._anchor_due = False
        metrics.VERSION.labels(TRAINER.name).set(self._progress.version)
        if (trained and self._checkpoints.is_due(self._progress)) or finished or self._stop is not None:
            self._checkpoints.write(self._epoch, self._progress)
        self._finished_said = finished
        self._look_at_end()
        if self._underway is None:
            self._waited_since = self._clock.now()
        self._look_back_after_s = LOOK_BACK_S

    def _look_at_end(self) -> None:
        """The trainer leaves a finished run when what goes is said and deleted."""
        self._done = self._finished_said and not self._checkpoints.trim_due and self._retention.may_leave()

    # ------------------------------------------------------------------------------------------ the rest

    @property
    def _num_ready(self) -> int:
        return self._assembly.num_ready if self._assembly is not None else 0

    @property
    def full(self) -> bool:
        return self._num_ready >= BATCHES_AHEAD

    def idle_s(self) -> float:
        if self._underway is not None:
            return 0.0  # it waits by itself
        return self._retention.again_in_s() if self._num_ready == 0 or self._paused else 0.0

    @property
    def busy(self) -> bool:
        return self._underway is not None

    def paused(self, paused: bool) -> None:
        self._paused = paused

    def draining(self) -> None:
        self._end.drains = True

    def leave(self) -> None:
        """Saves where it is, so that whoever goes on trains nothing again."""
        if self._progress.version and not self._anchor_due and not self._done and self._stop is None:
            self._checkpoints.write_before_leaving(self._epoch, self._progress)

    def health(self) -> Mapping[str, object]:
        return {"version": self._progress.version, "batches_ready": self._num_ready}

    def close(self) -> None:
        self._abandon()
        self._backend.close()
