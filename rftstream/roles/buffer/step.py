"""The buffer: verified -> batches and outcomes. Every admitted group gets exactly one outcome.

For each partition of `verified` the buffer commits the first offset of its oldest open group. The metadata tells how
far the buffer has read, which batch is next, whether the last one is written, and the state of the passes through the
demonstrations (progress.py). After a restart it reads from these positions again. Siblings of decided groups are
dropped. A sibling that was not read before (at or above the committed read offset) gets a late record of its own."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from rftstream.clock import Clock
from rftstream.config.role_sections import BufferSection, FeedbackSection, FeederSection
from rftstream.config.stages import Stage, Stages
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.control import Claim, TasksEnded
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import StepsSummary, Summary
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.errors import ContractError, StopRule
from rftstream.models.rendering import Renderer
from rftstream.roles.buffer import BUFFER
from rftstream.roles.buffer.decisions import Decision, Decisions, no_batch
from rftstream.roles.buffer.demonstrations import DEMONSTRATIONS, DemonstrationIntake, DemonstrationQueue, spread
from rftstream.roles.buffer.experiences import batch_records, encoded, experiences_of_share
from rftstream.roles.buffer.groups import Group, OpenGroups, sibling_of, unscorable_reasons
from rftstream.roles.buffer.operators import GroupOperators
from rftstream.roles.buffer.people.feedback import FEEDBACK, FeedbackIntake
from rftstream.roles.buffer.progress import BufferProgress
from rftstream.roles.buffer.reuse import ReusedBodies, ReusePool, metrics_of, takes_demonstrations, uses_of
from rftstream.roles.feeder.admission import VersionInForce
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log, Publish, Received, SingleStep, SingleTransaction
from rftstream.transport.base import Position

log = logging.getLogger(__name__)


class BufferStep(SingleStep):
    """The step of the buffer. It collects the siblings of groups, decides about each group once, and writes batches.
    `workers/buffer.py` makes it, and SingleService calls it in this order:

    - `recover` reads `outcomes` (the decisions so far) and takes the rest of its state from the committed positions.
    - `absorb` adds a rollout to its group. A complete group is ready, filtered or dead at once.
    - `advance` closes overdue groups. It returns a batch with its outcomes if there is one, else the outcomes that are
      due, else None. StopRule if too many groups were decided without completing a batch. Once the transaction is on
      the log, it forgets the bodies of decided groups and moves on to the next batch.

    It ends with the run, which the trainer announces."""

    def __init__(
        self,
        *,
        log_: Log,
        feeder: FeederSection,
        buffer: BufferSection,
        shares: int,
        clock: Clock,
        imported: bool = False,
        stages: Stages,
        demonstrations: DemonstrationQueue | None = None,
        pipeline: ExperiencePipeline | None = None,
        renderer: Renderer | None = None,
        feedback: FeedbackSection | None = None,
        seed: int = 0,
    ) -> None:
        """`log_` is the run's log, which is not read before `recover`. `imported` means that the versions of the
        rollouts belong to another run. `stages` define the composition of batches. `pipeline` has the operators of the
        experience side. `renderer` renders prompts of demonstrations that operators make of attempts. `feedback`
        defines the questions to annotators and their effect. `seed` is the run's."""
        self._renderer = renderer
        self._pipeline = pipeline or ExperiencePipeline({}, is_declared=False)
        self._imported = imported
        self._intake = DemonstrationIntake(demonstrations, stages, feeder.group_size)
        self._stages = stages
        self._feeder = feeder
        self._settings = buffer
        self._shares = shares
        self._clock = clock
        self._stop: StopRule | None = None
        self._feedback_settings, self._seed = feedback, seed
        self._reset(log_)

    def _reset(self, log_: Log) -> None:
        """Forget all state from the log, which is read again."""
        self._log = log_
        self._feedback = FeedbackIntake(self._feedback_settings, self._seed, self._clock)
        self._bodies = self._feedback.bodies(log_.transport, self._settings.max_body_bytes)
        self._groups = OpenGroups()
        self._decisions = Decisions(self._clock, with_operators=self._pipeline.is_declared, imported=self._imported)
        self._progress = BufferProgress()
        progress = None if self._imported else self._progress
        in_order = self._feeder.on_stale == "wait"
        self._reuse = ReusePool(self._pipeline.reusing, self._pipeline.run_seed, in_order)
        self._operators = GroupOperators(self._pipeline, self._bodies, progress, self._reuse)
        self._reused_bodies = ReusedBodies(log_.transport, self._renderer)
        self._ended: TasksEnded | None = None
        """The feeder's record that there are no more groups; None while there may be more."""
        self._in_force = VersionInForce()
        """The trainer's version. It is followed if batches may have no rollouts, since nothing else then keeps the
        buffer from running ahead."""

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Read the decisions so far, and begin at the committed positions."""
        self.close()
        self._reset(log_)
        # Operators, reuse and votes depend on more of the past than a summary holds.
        needs_all = self._pipeline.is_declared or bool(self._reuse) or self._feedback_settings is not None
        beginning = begin_with_summary(log_, "outcomes", whole=needs_all)
        if beginning.summary is not None and beginning.summary.outcomes is not None:
            self._progress.begin(beginning.summary.outcomes)
        for received in log_.messages("outcomes", start=beginning.positions):
            if isinstance(received.message, GroupOutcome):
                self._progress.recall(received.message)
                self._feedback.recall(received.message)
            self._operators.learn(received.message)
        for received in log_.messages("control"):
            self._absorb_control(received)
        begins = log_.transport.admin.begin_offsets("verified")
        missing = {place: Position(begin) for place, begin in begins.items()}  # of a deleted consumer group
        cursor = self._progress.restore(missing | log_.committed(BUFFER.name), begins)
        positions = {**self._progress.read, **self._intake.begin(log_, cursor), **self._feedback.begin(log_)}
        if not self._stages.always_explores:
            steps = begin_with_summary(log_, "steps")
            positions |= steps.positions
            for received in itertools.chain(steps.received(), log_.messages("steps", start=steps.positions)):
                self.absorb(received)
                positions[received.record.place] = received.record.offset + 1
        return positions

    def absorb(self, received: Received) -> None:
        """Add a rollout to its group; note demonstrations, and records of the trainer and the feeder."""
        if received.record.topic == DEMONSTRATIONS:
            self._intake.absorb(received.record)
            return
        if isinstance(received.message, Feedback):
            self._feedback.absorb(received.record, received.message)
            return
        if not isinstance(received.message, VerifiedRollout):
            self._absorb_control(received)
            return
        self._take(received.record, received.message)

    def _absorb_control(self, received: Received) -> None:
        match received.message:
            case TasksEnded() as ended:
                self._ended = ended
            case None if received.record.key == b"end":
                self._ended = None  # the run was given more steps
            case Summary(steps=StepsSummary() as steps):
                self._in_force.begin(steps)
            case StepRecord() as step:
                self._in_force.absorb(step)

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Treat an undecodable rollout as one without a reward."""
        if record.topic == DEMONSTRATIONS:
            self._intake.absorb(record)  # its dead letter is written when its turn comes
            return
        if record.topic == FEEDBACK:
            self._feedback.absorb(record, None)
            return
        ids = codec.ids_from_headers(record)
        if ids is None:
            self._progress.read[record.place] = record.offset + 1
            return
        self._take(
            record,
            VerifiedRollout(
                ids=ids, rollout=None, verdict=None, reason=UnscorableReason.undecodable, detail=str(error)
            ),
        )

    def _take(self, record: Record, verified: VerifiedRollout) -> None:
        place = record.place
        self._progress.read[place] = record.offset + 1
        sibling = sibling_of(verified, place, record.offset)
        if verified.ids.sequence in self._progress.decided:
            is_new = self._progress.is_new(place, record.offset)
            if is_new and self._progress.came_late(verified.ids.sequence, verified.ids.sibling):
                self._decisions.add_late(verified)
            return
        group = self._groups.add(verified, sibling, record.timestamp_s)
        if verified.verdict is not None:
            self._bodies.hold(place, record.offset, verified, len(record.value or b""))
        if group.complete or group.ready:  # the operators have not seen this sibling yet
            self._judge(group)

    # ------------------------------------------------------------------------------------------ deciding

    def _judge(self, group: Group) -> None:
        """Decide about a group that is complete or overdue. It may have to wait for answers of annotators."""
        if self._feedback.holds(group):
            return
        least = min(self._settings.min_siblings, group.size)
        if len(group.scored) < least:
            if group.complete:
                self._decide(group, GroupResult.dead, unscorable_reasons(group))
            else:
                self._decide(group, GroupResult.expired, "deadline")
            return
        filtered = self._operators.judge(group, least)
        if filtered is not None:
            self._decide(group, GroupResult.filtered, filtered)
        else:
            self._groups.mark_ready(group)

    def _decide(self, group: Group, result: GroupResult, reason: str) -> None:
        self._decisions.add(group, result, reason)
        self._groups.remove(group)
        self._progress.decide(group.sequence, group.size, group.siblings)
        self._feedback.decided(group, result, self._progress.next_batch)

    # ------------------------------------------------------------------------------------------ writing

    def advance(self) -> SingleTransaction | None:
        """Return the next batch with its outcomes if there is one, else the outcomes that are due. Questions and
        judgements are part of the same transaction."""
        if self._stop is not None:
            raise self._stop
        for group in self._feedback.fold(self._log, self._groups, self._progress):
            self._judge(group)
        return self._feedback.with_outputs(self._next_transaction())

    def _next_transaction(self) -> SingleTransaction | None:
        progress = self._progress
        if progress.is_last_written and self._all_in(0):
            return None
        for group in self._groups.overdue(self._clock.now(), self._settings.group_deadline_s):
            self._judge(group)
        for group in self._operators.outdated(self._groups):
            self._judge(group)
        chosen = self._choose()
        if chosen is not None and not (self._decisions and self._reuse.waits_for_outcomes):
            return self._batch(chosen)
        if not self._decisions:
            return None
        decided, outcomes = self._decisions.take(progress.tally, progress.next_batch)
        positions = progress.positions(self._groups.low_waters(), self._intake.cursor, next_batch=progress.next_batch)
        return SingleTransaction(tuple(outcomes), positions, partial(self._move_on, decided, outcomes))

    def _choose(self) -> list[Group] | None:
        """Return the groups of the next batch, none for one of demonstrations alone; None if the batch has to wait."""
        if not self._stage.takes_rollouts:
            may_be = self._intake.allows_batch(
                self._progress.next_batch,
                self._stage,
                version=self._in_force.name.version,
                max_staleness=self._feeder.max_staleness,
                ended=self._ended,
            )
            return [] if may_be else None
        size = self._feeder.groups_per_batch
        while True:
            if self._feeder.on_stale == "wait":
                chosen = self._groups.in_order(self._progress.decided, size)
            else:
                newest = self._progress.next_batch - self._feeder.max_staleness
                chosen = self._groups.oldest_first(size, -1 if self._imported else newest)
            stale = [group for group in chosen if self._staleness(group) > self._feeder.max_staleness]
            for group in stale:
                self._decide(group, GroupResult.expired, "stale")
            if not stale:
                break
        if self._all_in(len(chosen)):
            if chosen and self._intake.lacks(self._stage):
                log.warning("the last batch goes without demonstrations, since none came")
            return chosen  # otherwise a draining run would never end
        if len(chosen) < size:
            return None
        return None if self._intake.waits(self._stage) else chosen

    @property
    def _stage(self) -> Stage:
        """The stage of the next batch."""
        return self._stages.at(self._progress.next_batch)

    def _all_in(self, num_chosen: int) -> bool:
        """Whether no more groups will come after these."""
        return self._ended is not None and len(self._progress.decided) + num_chosen >= self._ended.admitted

    def _staleness(self, group: Group) -> int:
        oldest = group.oldest_version
        return 0 if oldest is None or self._imported else self._progress.next_batch - oldest

    def _batch(self, groups: Sequence[Group]) -> SingleTransaction:
        """Return the next batch of these groups and of demonstrations, with all outcomes that are due."""
        progress, stage, batch = self._progress, self._stage, self._progress.next_batch
        groups_of: dict[int, list[Group]] = defaultdict(list)
        for index, group in enumerate(groups):
            groups_of[index * self._shares // len(groups)].append(group)
        # Bodies before decisions, which change them. If a read fails for now, the step recovers.
        experiences_of = {
            share: experiences_of_share(groups_of[share], share, batch, self._bodies, progress.tally, self._imported)
            for share in range(self._shares)
        }
        again = self._reuse.choose(
            batch,
            [group.sequence for group in groups],
            takes_demonstrations=takes_demonstrations(self._stages, stage),
        )
        reused_bodies = self._reused_bodies.read(again)
        num_demonstrations = self._ended.experts if self._ended is not None else None
        demonstrations, letters = self._intake.take(stage, len(groups), num_demonstrations)
        staleness = [self._staleness(group) for group in groups]
        for group in groups:
            self._decide(group, GroupResult.batched, "complete" if group.complete else "deadline")
        decided, outcomes = self._decisions.take(progress.tally, batch)
        last = stage.takes_rollouts and self._all_in(0)
        for share, some in enumerate(spread(demonstrations, self._shares)):
            for demonstration in some:
                made = demonstration.experiences(batch, share, len(experiences_of[share]))
                experiences_of[share] += map(encoded, made)
        reused_of = self._reused_bodies.add_to(experiences_of, again, reused_bodies, batch)
        values = progress.tally.metrics_of_batch(
            None if self._imported else staleness, len(demonstrations), takes_rollouts=stage.takes_rollouts
        )
        reuse = []
        if self._reuse and groups:
            seen = self._operators.seen
            reuse = [Publish("outcomes", 0, BatchReuse(batch_sequence=batch, seen=seen, uses=uses_of(again)))]
            values |= metrics_of(again)
            staleness += [one.use.staleness for one in again]
        cursor = self._intake.cursor
        manifest = BatchManifest(
            batch_sequence=batch,
            share=0,
            num_shares=self._shares,
            count=0,
            digest="",
            groups=(),
            num_groups=len(groups),
            total_groups=progress.total_groups + len(groups),
            last=last,
            admitted=self._ended.admitted if last and self._ended is not None else None,
            max_staleness=max(0, max(staleness, default=0)),
            metrics=values,
            total_experts=cursor.total,
            scorers=progress.tally.scorers(),
        )
        positions = progress.positions(self._groups.low_waters(), cursor, next_batch=batch + 1, last=last)
        outputs = (*batch_records(experiences_of, groups_of, reused_of, manifest), *reuse, *outcomes, *letters)
        return SingleTransaction(outputs, positions, partial(self._move_on, decided, (*reuse, *outcomes), manifest))

    def _move_on(
        self, decided: Sequence[Decision], outputs: Sequence[Publish], manifest: BatchManifest | None = None
    ) -> None:
        """Forget the bodies of groups whose outcomes are on the log, and apply `outputs`, the new records of
        `outcomes`. If there is the manifest of a batch, move on to the next batch."""
        progress = self._progress
        for decision in decided:
            if decision.result is GroupResult.filtered:
                progress.filtered[decision.reason] += 1
            for sibling in decision.group.siblings.values():
                self._bodies.forget(sibling.place, sibling.offset)
        for output in outputs:
            self._operators.learn(output.message)
        if manifest is not None:
            progress.batch_written(manifest, of_rollouts=self._stage.takes_rollouts)
        elif self._pipeline and progress.filtered.total() >= self._settings.max_refill:
            ready = f"{self._groups.num_ready:,} of the {self._feeder.groups_per_batch:,} groups"
            self._stop = no_batch(progress.filtered, ready)

    # ------------------------------------------------------------------------------------------ the rest

    def idle_s(self) -> float:
        """Return the seconds until the next group is overdue or has waited long enough for annotators."""
        overdue_s = self._groups.next_deadline_s(self._clock.now(), self._settings.group_deadline_s)
        return min(overdue_s, self._feedback.next_release_s(self._groups))

    def close(self) -> None:
        """Close the readers of bodies."""
        self._bodies.close()
        self._reused_bodies.close()

    def health(self) -> Mapping[str, object]:
        """Return how many groups are in each state, and which batch is next."""
        return {
            **self._intake.health(),
            **self._feedback.health(),
            "open_groups": len(self._groups.by_sequence),
            "ready_groups": self._groups.num_ready,
            "decided_groups": len(self._progress.decided),
            "next_batch": self._progress.next_batch,
            "body_bytes": self._bodies.num_bytes,
            **({"reusable_groups": self._reuse.num_held} if self._reuse else {}),
        }
