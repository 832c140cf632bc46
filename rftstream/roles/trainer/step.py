"""The trainer: batches -> weights and steps. Its positions are in its checkpoint.

Order of writing: first a version's object becomes durable. Then the announcement and the StepRecord are committed in
one transaction. If a checkpoint is due, the log is made durable and the checkpoint is written. Order of starting: claim
the role, read `steps` and `weights`, load the newest intact checkpoint in force, publish its state as the anchor of the
new epoch, and train the recorded batches from there. Before any deletion a committed record names it: `gone` of an
announcement, or a `Trimmed` (retention/checkpoints.py).

An update runs in the thread of the backend. The next update begins as soon as the version's weights are taken over and,
if a checkpoint is due, the state is saved to a temporary folder. Meanwhile other threads write the object and the
checkpoint, the latter once its step is on the log. A batch that comes meanwhile is trained at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, WeightsAnnounced
from rftstream.errors import ContractError, StopRule, WeightsGone
from rftstream.models.device_lock import DeviceLock
from rftstream.models.spec import ModelSpec
from rftstream.roles.trainer import TRAINER
from rftstream.roles.trainer.assembly import BatchAssembly, CommittedBatches
from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.device_share import TrainerShare
from rftstream.roles.trainer.pending_update import abandon, ends_within
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.retention.checkpoints import Checkpoints
from rftstream.roles.trainer.retention.trimmed_deletions import TrimmedDeletions
from rftstream.roles.trainer.run_end import RunEnd
from rftstream.roles.trainer.training import Training
from rftstream.roles.trainer.update_cycle import TrainedBatch, UpdateCycle, show_in_metrics
from rftstream.roles.trainer.version_publisher import VersionPublisher
from rftstream.roles.trainer.versions import Versions
from rftstream.roles.trainer.watches.held_out import HeldOut
from rftstream.service.role import Foreign, Log, Publish, Received, SingleStep, SingleTransaction
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

BATCHES_AHEAD = 1
"""Number of batches that are read while one is trained. Further batches stay on the log."""

LOOK_UP_S = 0.2
"""Seconds to wait for an update before the log is read."""

LOOK_FOR_BATCH_S = 0.02
"""Seconds to wait for a version being written before the log is read, while no update is computed."""


@dataclass(slots=True)
class _Publication:
    """A trained batch whose version is being written."""

    trained: TrainedBatch
    writing: Future[WeightsAnnounced] | None
    """Future of the writing of the object; None if the version is not published."""
    stays: bool
    """Whether the next batch must wait until the version is on the log, since the run ends."""
    rests_since: float
    """Time when the weights were taken over, by the clock."""
    share: dict[str, float]
    """Metrics of the wait for a shared device, in seconds; empty if the trainer has the device to itself."""
    goes_on: bool = False
    """Whether the next update has begun."""

    def abandon(self) -> None:
        """Cancel the announcement and wait until the writer has stopped."""
        if self.writing is not None:
            abandon(self.writing)


class TrainerStep(SingleStep):
    """The step of the trainer: it trains batches in order, and publishes versions. `workers/trainer.py` makes it, and
    SingleService calls it in this order:

    - `recover` reads `control`, `steps`, `weights` and `evals`, opens the backend, loads the newest checkpoint.
    - `absorb` assembles batches, until one more than the batch in training is ready (`full`).
    - `advance` first returns the anchor of this epoch. Later calls begin an update, wait a moment for it, then for the
      writing of its weights, and return step and weights. After a checkpoint they return the record of deletions, and
      at the end that of the run's end. Once a transaction is on the log, the step adopts its progress, and starts to
      write a checkpoint if one is due.
    - `leave` writes a checkpoint for the successor. `close` abandons the update and closes the backend.

    After the end of the run it stays until all recorded deletions are carried out (`outlives_the_run`, `done`)."""

    def __init__(
        self,
        *,
        config: RunConfig,
        model: ModelSpec,
        training: Training,
        store: ObjectStore,
        deletions: TrimmedDeletions,
        log_: Log,
        final: Path,
        newest_epoch: Callable[[], int],
        clock: Clock,
        compute: Executor,
        writing: Executor,
        checkpointing: Executor,
        held_out: HeldOut | None = None,
        lock: DeviceLock | None = None,
        describe: Callable[[Path, int], None] | None = None,
    ) -> None:
        """`deletions` is also used if the process finds the run finished. `log_` is the run's log, which is not read
        before `recover`. `final` is the folder for the trained model. `newest_epoch` reads the newest claim of the role
        from the log. `compute` has one thread, in which all methods of the backend are called. `writing` and
        `checkpointing` have one thread each, which write objects of versions and checkpoints. `lock` is the device's,
        if engines use the device, too. `describe` writes the card of a version into its model folder."""
        self._config = config
        self._settings = config.trainer
        self._model = model
        self._store = store
        self._deletions = deletions
        self._clock = clock
        self._held_out = held_out
        self._backend = BackendThread(training.backend, compute)
        self._share = TrainerShare(lock, self._backend, clock)
        export = self._backend.asked(training.backend.export)
        self._end = RunEnd(config, clock, final, export=export, describe=describe, newest_epoch=newest_epoch)
        self._updates = UpdateCycle(
            config=config, training=training, backend=self._backend, end=self._end, held_out=held_out, clock=clock
        )
        self._writing, self._checkpointing = writing, checkpointing
        self._publication: _Publication | None = None
        """Publication in progress; None if there is none."""
        self._paused = False
        self._reset(log_, epoch=0)

    def _reset(self, log_: Log, epoch: int) -> None:
        """Reset all state for a new epoch."""
        self._updates.abandon()
        if self._publication is not None:
            self._publication.abandon()
            self._publication = None
        self._updates.rest()
        self._updates.hacked.forget()
        self._deletions.begin_anew()
        self._end.forget()
        self._epoch = epoch
        self._progress = TrainerProgress()
        """Progress on the log. The backend has the same progress when no update is pending."""
        self._assembly = BatchAssembly(self._settings.shares, 0, CommittedBatches(log_))
        self._versions = Versions(self._config.evaluations, self._config.weights.keep)
        self._checkpoints = Checkpoints(
            config=self._config,
            store=self._store,
            clock=self._clock,
            log_=log_,
            deletions=self._deletions,
            versions=self._versions,
            backend=self._backend,
            executor=self._checkpointing,
        )
        self._publisher = VersionPublisher(
            self._model,
            anchor_every=self._config.weights.anchor_every,
            backend=self._backend,
            versions=self._versions,
            store=self._store,
            clock=self._clock,
            executor=self._writing,
        )
        self._is_anchor_due = True
        self._is_published = False
        """Whether the newest trained version is on the log. A run can only end with such a version."""
        self._stop: StopRule | None = None
        """The rule that ends the run once the trained version is on the log."""
        self._is_finished = False
        """Whether the log has the record of the run's end."""
        self._done = False

    @property
    def outlives_the_run(self) -> bool:
        """Whether deletions are still to be carried out."""
        return self._checkpoints.trim_due or self._deletions.owes

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Read the log, and load the newest checkpoint in force."""
        self._backend.give_up()
        self._checkpoints.abandon()
        self._reset(log_, claim.epoch)
        evals = log_.ends("evals")  # records that come while the rest is read are read again
        begin = self._versions.begin(log_, all_steps=self._updates.hacked.is_on)
        for topic in ("control", "steps", "weights", "evals"):
            for received in log_.messages(topic, start=begin):
                self.absorb(received)
                if (topic, received.record.key) == ("control", b"finished"):
                    self._is_finished = received.message is not None
        self._checkpoints.begin()
        offsets = log_.transport.admin.begin_offsets("batches")
        places, ends = sorted(offsets), log_.ends("batches")
        begins = tuple(offsets[place] for place in places)
        with self._share.recovering():
            self._backend.open()
            loaded = self._checkpoints.load(begins, tuple(ends[place] for place in places))
        if loaded is not None:
            self._progress = loaded
        if self._held_out is not None:
            self._held_out.begin(log_)
        if not self._progress.positions:
            self._progress.positions = begins
        self._assembly = BatchAssembly(self._settings.shares, self._progress.version, CommittedBatches(log_))
        log.info("starts from version %d (epoch %d)", self._progress.version, self._epoch)
        return {**dict(zip(places, self._progress.positions, strict=True)), **evals}

    def absorb(self, received: Received) -> Sequence[Foreign] | None:
        """Add a record of `batches` to its batch, or apply a record of another topic."""
        match received.message:
            case Experience() | BatchManifest():
                return self._assembly.add(received)
            case StepRecord() as step:
                self._versions.record(step)
                self._updates.hacked.record(step)
            case WeightsAnnounced() as announced:
                self._versions.announce(announced)
                metrics.PUBLISHED.labels(TRAINER.name).set(announced.name.version)
            case EvalResult() as result:
                self._versions.evaluate(result)
                self._updates.hacked.evaluate(result)
            case RunManifest() as manifest:
                self._end.created_at = manifest.created_at
            case TasksEnded() as ended:
                self._end.ended = ended
            case Trimmed() as trimmed:
                self._deletions.absorb(trimmed)
            case None if received.record.key == b"end":
                self._end.ended = None
        return None

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Check that the next batch is complete without the record."""
        if record.topic == "batches":
            self._assembly.undecodable(record, error)

    @property
    def full(self) -> bool:
        """Whether the next batch is ready."""
        return self._assembly.num_ready >= BATCHES_AHEAD

    # ------------------------------------------------------------------------------------------ one slice of work

    def advance(self) -> SingleTransaction | None:
        """Return the next due transaction: the anchor, deletions, or the next step with its weights."""
        rests = not self.busy and (self._paused or not self.full)
        self._checkpoints.look(LOOK_FOR_BATCH_S if rests else 0.0)
        if self._publication is not None:
            return self._go_on_publishing(self._publication)
        if self._stop is not None:
            raise self._stop
        self._deletions.delete_owed()
        if self._config.demonstrations_alone and not self._end.is_known():
            return None
        if self._is_anchor_due and not self._is_finished:
            anchor = self._publisher.anchor(self._epoch, self._progress, self._end.config, self._checkpoints.names)
            return SingleTransaction(anchor, then=partial(self._move_to, self._progress, anchor))
        if self._checkpoints.trim_due:
            trimmed = self._checkpoints.plan()
            if trimmed is not None:
                then = partial(self._checkpoints.carry_out, trimmed)
                return SingleTransaction((Publish("control", 0, trimmed),), then=then)
        if self._is_finished:
            return None
        if self._updates.pending is None:
            self._begin_update(self._progress)
        pending = self._updates.pending
        if pending is not None:
            has_ended = pending.ends_within(LOOK_UP_S)
            if not has_ended or not self._checkpoints.has_room(pending.progress.version + 1, LOOK_UP_S):
                return None
            trained = self._updates.finish(pending)
            return None if trained is None else self._publish(trained)
        if self._paused or self._share.is_waiting:
            return None
        # The run can also end without a batch. The feeder's record that there are no more tasks may follow the last
        # batch, the time may be up, or a resumed run may have got an end that it has already reached.
        reason = self._end.reason(self._progress)
        if reason is not None:
            finished = self._end.finish(reason, self._progress.name(self._epoch))
            outputs = (Publish("control", 0, finished),)
            return SingleTransaction(outputs, then=partial(self._move_to, self._progress, outputs))
        try:
            self._publisher.look_back(self._updates.idle_s)
        except WeightsGone:
            self.leave()
            raise
        return None

    def _begin_update(self, progress: TrainerProgress) -> bool:
        """Begin the update after `progress`, if its batch is ready. Return whether the update was begun."""
        is_written = self._publication is not None and self._publication.writing is not None
        is_over = self._end.comes_by_itself(progress) and (self._is_published or is_written)
        is_unknown = self._config.demonstrations_alone and not self._end.is_known()
        if self._paused or is_over or is_unknown or not self._assembly.num_ready:
            self._share.wait_no_more()  # the run may have been drained since the device was asked for
            return False
        if not self._share.take():
            return False
        batch = self._assembly.take()
        assert batch is not None, "it is ready"
        self._updates.begin(batch, progress)
        return True

    def _publish(self, trained: TrainedBatch) -> SingleTransaction | None:
        """Take over the weights of a trained batch and save a checkpoint, if these are due, and then begin the next
        update. Return the result of `_go_on_publishing`."""
        progress, is_last = trained.progress, trained.end_reason is not None
        # A trainer that is about to wait publishes in any case: the roles that it waits for may need this version.
        waits = not self._assembly.num_ready
        publish_now = waits or is_last or progress.version % self._settings.publish_every == 0
        taken = self._publisher.take(progress.name(self._epoch)) if publish_now else None
        if self._checkpoints.is_due(progress.version):
            self._checkpoints.stage()
        rests_since = self._updates.rest()
        stays = is_last or trained.stop is not None
        share = self._share.metrics()
        goes_on = not stays and self._begin_update(progress)
        if not goes_on:
            self._share.leave()
        writing = self._publisher.begin_write(taken) if taken is not None else None
        self._publication = _Publication(trained, writing, stays, rests_since, share, goes_on)
        return self._go_on_publishing(self._publication)

    def _go_on_publishing(self, publication: _Publication) -> SingleTransaction | None:
        """Return the step of a trained batch with its weights, once the weights are written; None before. Begin the
        update of a batch that has come meanwhile."""
        trained, writing = publication.trained, publication.writing
        progress = trained.progress
        if not (publication.goes_on or publication.stays):
            publication.goes_on = self._begin_update(progress)
        looks = not (publication.goes_on or publication.stays)
        if writing is not None and not ends_within(writing, LOOK_FOR_BATCH_S if looks else LOOK_UP_S):
            return None
        self._publication, self._stop = None, trained.stop
        announced = self._publisher.announcement(writing, self._checkpoints.names) if writing is not None else None
        written_at, name = self._clock.now(), progress.name(self._epoch)
        held_up_until = publication.rests_since if publication.goes_on else written_at
        record = trained.record(name, announced, held_up_until=held_up_until, stamp=self._clock.stamp())
        record = replace(record, metrics=record.metrics | publication.share)
        outputs = [Publish("steps", 0, record)]
        if announced is not None:
            outputs.insert(0, Publish("weights", 0, announced))
        if trained.end_reason is not None:
            outputs.append(Publish("control", 0, self._end.finish(trained.end_reason, name)))
        return SingleTransaction(tuple(outputs), then=partial(self._move_to, progress, outputs))

    # ------------------------------------------------------------------------------------------ afterwards

    def _move_to(self, progress: TrainerProgress, outputs: Sequence[Publish]) -> None:
        """Adopt the progress of a transaction that is on the log, with these outputs."""
        self._progress = progress
        self._backend.note_step(progress.version)
        finished = False
        for output in outputs:
            match output.message:
                case StepRecord() as step:
                    self._versions.record(step)
                    self._updates.hacked.record(step)
                    self._is_published = step.announced or step.resumed
                    show_in_metrics(step, self._progress)
                case WeightsAnnounced() as announced:
                    self._versions.announce(announced)
                    metrics.PUBLISHED.labels(TRAINER.name).set(announced.name.version)
                    self._deletions.delete_weights(announced.gone)
                case RunFinished():
                    finished = True
        self._is_anchor_due = False
        metrics.VERSION.labels(TRAINER.name).set(self._progress.version)
        if finished or self._stop is not None:
            self._checkpoints.write(self._epoch, self._progress)
        else:
            self._checkpoints.begin_write(self._epoch, self._progress)
        self._is_finished = finished
        if self._updates.pending is None:
            self._updates.rest()
        self._publisher.noted()

    # ------------------------------------------------------------------------------------------ the rest

    @property
    def done(self) -> bool:
        """Whether the run is finished, and all recorded deletions are carried out or given up."""
        if not self._done:
            self._done = self._is_finished and not self._checkpoints.trim_due and self._deletions.may_leave()
        return self._done

    def idle_s(self) -> float:
        """Return 0 while there is a batch or an update, otherwise the seconds until an owed deletion is retried."""
        if self.busy:
            return 0.0  # `advance` itself waits
        if self._share.is_waiting:
            return self._share.idle_s
        rests = not self._checkpoints.is_writing and (self._paused or not self.full)
        return self._deletions.again_in_s() if rests else 0.0

    @property
    def busy(self) -> bool:
        """Whether an update is running or a version is being written."""
        return self._updates.pending is not None or self._publication is not None

    def paused(self, paused: bool) -> None:
        """Begin no update while `paused`."""
        self._paused = paused
        if paused and not self.busy:
            self._share.leave()

    def draining(self) -> None:
        """End the run if no last batch will come."""
        self._end.drains = True

    def leave(self) -> None:
        """Write a checkpoint, so that a successor does not train any batch again. An update that takes long leaves its
        batch half trained first."""
        if self.busy:
            self._updates.stop()
        elif self._progress.version and not self._is_anchor_due and not self.done and self._stop is None:
            self._checkpoints.write_before_leaving(self._epoch, self._progress)

    def health(self) -> Mapping[str, object]:
        """Return the version, that of the checkpoint a successor goes on from, and the number of ready batches."""
        in_force = filter(self._versions.in_force, self._checkpoints.kept)
        ready, saved = self._assembly.num_ready, max((name.version for name in in_force), default=0)
        return {"version": self._progress.version, "saved": saved, "batches_ready": ready, **self._share.health()}

    def close(self) -> None:
        """Abandon the update and the version being written, and close the backend."""
        self._backend.give_up()
        self._updates.stop()
        self._updates.abandon()
        if self._publication is not None:
            self._publication.abandon()
        self._checkpoints.abandon()
        for executor in (self._writing, self._checkpointing):
            executor.shutdown()
        self._backend.close()
