"""The buffer: verified -> batches and outcomes. Every admitted group gets exactly one outcome.

It commits, per partition of `verified`, the first offset of its oldest open group, and as metadata how far it has
read, the next batch, whether the last one is written, and where the passes through the demonstrations stand
(demonstrations.py). After a restart it reads from there again: what `outcomes`
names already is dropped, and a sibling that comes after the group's outcome (at or above the committed read offset)
gets a late record of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rftstream.clock import Clock
from rftstream.config.role_sections import BufferSection, FeederSection
from rftstream.config.stages import Stage, Stages
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, TasksEnded
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ContractError, StopRule
from rftstream.roles.buffer import BUFFER
from rftstream.roles.buffer.batch_records import batch_records
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.decisions import Decisions
from rftstream.roles.buffer.demonstration_intake import DemonstrationIntake
from rftstream.roles.buffer.demonstrations import EXPERTS, Cursor, DemonstrationQueue, spread
from rftstream.roles.buffer.experiences import experience_of
from rftstream.roles.buffer.groups import DecidedSequences, Group, OpenGroups, sibling_of, unscorable_reasons
from rftstream.roles.buffer.tally import Tally
from rftstream.roles.feeder.admission import VersionInForce
from rftstream.service.role import Log, Received, SingleTransaction
from rftstream.service.step_defaults import SingleStepDefaults
from rftstream.transport.base import Position

log = logging.getLogger(__name__)


class BufferStep(SingleStepDefaults):
    """The step of the buffer: it collects the siblings of groups, decides about each group once, and writes batches.
    `workers/buffer.py` makes it; SingleService calls it, in this order:

    - `recover` reads `outcomes` (what is decided) and takes the rest of its state from the committed positions.
    - `absorb` adds a rollout to its group; a group that is complete is ready, filtered or dead at once.
    - `advance` closes groups that are overdue, and returns a batch with its outcomes if there is one, else the
      outcomes that are due, else None. StopRule: no batch came together out of too many groups.
    - `committed` forgets the bodies of decided groups, and goes on to the next batch.

    It ends with the run: the trainer says when that is.
    """

    def __init__(
        self,
        *,
        feeder: FeederSection,
        buffer: BufferSection,
        shares: int,
        clock: Clock,
        imported: bool = False,
        stages: Stages,
        experts: DemonstrationQueue | None = None,
    ) -> None:
        """`imported`: the versions of the rollouts are another run's, and say nothing about this one's. `stages`: what
        batches are made of."""
        self._imported = imported
        self._intake = DemonstrationIntake(experts, stages, feeder.group_size)
        self._stages = stages
        self._feeder = feeder
        self._settings = buffer
        self._shares = shares
        self._clock = clock
        self._min_siblings = min(buffer.min_siblings, feeder.group_size)
        self._stop: StopRule | None = None
        self._reset(None)

    def _reset(self, bodies: Bodies | None) -> None:
        self._bodies = bodies
        self._groups = OpenGroups()
        self._decided = DecidedSequences()
        self._tally = Tally()
        self._ended: TasksEnded | None = None
        """The feeder's word that there are no more groups."""
        self._in_force = VersionInForce()
        """Told where batches may have no rollouts: then nobody else keeps it from running ahead."""
        self._next_batch = 0
        self._total_groups = 0
        self._refilled = 0
        """Filtered groups since the last batch."""
        self._last_written = False
        self._read: dict[TopicPartition, int] = {}
        self._read_before: dict[TopicPartition, int] = {}
        self._decisions = Decisions(self._clock)

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        self._reset(Bodies(log_.transport, self._settings.max_body_bytes))
        for received in log_.messages("outcomes"):
            if isinstance(received.message, GroupOutcome):
                self._recall(received.message)
        for received in log_.messages("control"):
            self._absorb_control(received)
        positions: dict[TopicPartition, int] = {}
        cursor: tuple[int, ...] = ()
        for place, position in log_.committed(BUFFER.name).items():
            positions[place] = position.offset
            read, next_batch, last, *passes = map(int, (position.metadata or f"{position.offset} 0 0").split())
            self._read_before[place] = read
            self._next_batch = max(self._next_batch, next_batch)
            self._last_written = self._last_written or bool(last)
            cursor = max(cursor, tuple(passes))
        self._read = dict(positions)
        positions |= self._intake.begin(log_, Cursor.of(cursor))
        if not self._stages.always_explores:
            positions |= log_.transport.admin.begin_offsets("steps")
            for received in log_.messages("steps"):
                self.absorb(received)
                positions[received.record.place] = received.record.offset + 1
        return positions

    def _recall(self, outcome: GroupOutcome) -> None:
        if outcome.late:
            return
        self._decided.add(outcome.sequence)
        if outcome.result is GroupResult.batched:
            self._total_groups += 1
            if self._next_batch != (outcome.batch_sequence or 0) + 1:
                self._next_batch = (outcome.batch_sequence or 0) + 1
                self._tally, self._refilled = Tally(), 0
            return
        self._refilled += outcome.result is GroupResult.filtered
        self._tally.group(outcome.taskset, outcome.result, outcome.rollouts)

    def absorb(self, received: Received) -> None:
        if received.record.topic == EXPERTS:
            self._intake.absorb(received.record)
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
                self._ended = None  # the run was given more to do
            case StepRecord() as step:
                self._in_force.absorb(step)

    def undecodable(self, record: Record, error: ContractError) -> None:
        if record.topic == EXPERTS:
            self._intake.absorb(record)  # its turn comes, and then its letter
            return
        ids = codec.ids_from_headers(record)
        if ids is None:
            self._read[record.place] = record.offset + 1
            return
        self._take(
            record,
            VerifiedRollout(
                ids=ids, rollout=None, verdict=None, reason=UnscorableReason.undecodable, detail=str(error)
            ),
        )

    def _take(self, record: Record, verified: VerifiedRollout) -> None:
        place = record.place
        self._read[place] = record.offset + 1
        sibling = sibling_of(verified, place, record.offset)
        if verified.ids.sequence in self._decided:
            if record.offset >= self._read_before.get(place, 0):
                self._decisions.add_late(verified)
            return
        group = self._groups.add(verified, sibling, record.timestamp_s)
        if verified.verdict is not None and self._bodies is not None:
            self._bodies.hold(place, record.offset, verified, len(record.value or b""))
        if group.complete:
            self._judge(group)

    # ------------------------------------------------------------------------------------------ deciding

    def _judge(self, group: Group) -> None:
        """A group that is complete, or whose time is up."""
        if len(group.scored) < self._min_siblings:
            if group.complete:
                self._decide(group, GroupResult.dead, unscorable_reasons(group))
            else:
                self._decide(group, GroupResult.expired, "deadline")
        elif group.zero_variance and self._settings.zero_variance == "replace":
            self._decide(group, GroupResult.filtered, "zero_variance")
        else:
            self._groups.mark_ready(group)

    def _decide(self, group: Group, result: GroupResult, reason: str) -> None:
        self._decisions.add(group, result, reason)
        self._groups.remove(group)
        self._decided.add(group.sequence)

    def _close_overdue(self) -> None:
        for group in self._groups.overdue(self._clock.now(), self._settings.group_deadline_s):
            self._judge(group)

    # ------------------------------------------------------------------------------------------ writing

    def advance(self) -> SingleTransaction | None:
        if self._stop is not None:
            raise self._stop
        if self._last_written and self._all_in(0):
            return None
        self._close_overdue()
        batch = self._choose() if self._stage.takes_rollouts else [] if self._may_go_on() else None
        if batch is not None:
            return self._batch(batch)
        if self._decisions:
            outcomes = self._decisions.outcomes(self._tally, self._next_batch)
            return SingleTransaction(tuple(outcomes), self._positions(self._next_batch))
        return None

    def _choose(self) -> list[Group] | None:
        """The groups of the next batch; None if it has to wait."""
        size = self._feeder.groups_per_batch
        while True:
            if self._feeder.on_stale == "wait":
                chosen = self._groups.in_order(self._decided, size)
            else:
                chosen = self._groups.oldest_first(size)
            stale = [group for group in chosen if self._staleness(group) > self._feeder.max_staleness]
            for group in stale:
                self._decide(group, GroupResult.expired, "stale")
            if not stale:
                break
        if self._all_in(len(chosen)):
            if chosen and self._intake.lacks(self._stage):
                log.warning("the last batch goes without demonstrations, since none came")
            return chosen  # else a run that is drained would never end
        if len(chosen) < size:
            return None
        return None if self._intake.waits(self._stage) else chosen

    @property
    def _stage(self) -> Stage:
        """Of the next batch."""
        return self._stages.at(self._next_batch)

    def _all_in(self, num_chosen: int) -> bool:
        """Whether these are the last groups there will be."""
        return self._ended is not None and len(self._decided) + num_chosen >= self._ended.admitted

    def _may_go_on(self) -> bool:
        """Of demonstrations alone: as many batches as the stages say, or else the feeder has counted, no further ahead
        of the trainer than rollouts would be."""
        if self._next_batch > self._in_force.name.version + self._feeder.max_staleness:
            return False
        if self._stages.named:
            return self._next_batch < (self._stages.steps or 0) and not self._intake.waits(self._stage)
        if self._ended is None or self._next_batch >= (self._ended.batches or 0):
            return False
        return self._intake.num_known >= self._ended.experts

    def _staleness(self, group: Group) -> int:
        oldest = group.oldest_version
        return 0 if oldest is None or self._imported else self._next_batch - oldest

    def _batch(self, groups: Sequence[Group]) -> SingleTransaction:
        # All that is read from the log, first: what fails for now is asked again, as if nothing had been begun.
        assert self._bodies is not None
        bodies = {
            sibling.place_offset: self._bodies.get(*sibling.place_offset)
            for group in groups
            for sibling in group.scored
        }
        taken, letters = self._intake.take(self._stage, len(groups), self._ended)
        by_share: dict[int, list[Group]] = defaultdict(list)
        for index, group in enumerate(groups):
            by_share[index * self._shares // len(groups)].append(group)
        staleness = max((self._staleness(group) for group in groups), default=0)
        for group in groups:
            self._decide(group, GroupResult.batched, "complete" if group.complete else "deadline")
        outcomes = self._decisions.outcomes(self._tally, self._next_batch)
        explores = self._stage.takes_rollouts
        last = explores and self._all_in(0)
        experiences_of = {share: self._experiences(by_share[share], share, bodies) for share in range(self._shares)}
        values = self._tally.metrics() if explores else {}
        for share, some in enumerate(spread(taken, self._shares)):
            for one in some:
                experiences_of[share] += one.experiences(self._next_batch, share, len(experiences_of[share]))
        if taken:
            values["experts"] = float(len(taken))
        if explores and not self._imported:
            values["staleness_max"] = float(staleness)
        if groups and not self._imported:
            values["staleness_mean"] = sum(map(self._staleness, groups)) / len(groups)
        outputs = batch_records(
            experiences_of,
            by_share,
            batch_sequence=self._next_batch,
            total_groups=self._total_groups + len(groups),
            last=last,
            admitted=self._ended.admitted if last and self._ended is not None else None,
            max_staleness=max(0, staleness),
            metrics=values,
            total_experts=self._intake.cursor.total,
        )
        return SingleTransaction((*outputs, *outcomes, *letters), self._positions(self._next_batch + 1, last=last))

    def _experiences(
        self, groups: Sequence[Group], share: int, bodies: Mapping[tuple[TopicPartition, int], VerifiedRollout]
    ) -> list[Experience]:
        experiences: list[Experience] = []
        for group in groups:
            for sibling in group.scored:
                verified = bodies[sibling.place_offset]
                self._tally.rollout(verified, None if self._imported else self._next_batch)
                experiences.append(experience_of(verified, self._next_batch, share, position=len(experiences)))
        return experiences

    def _positions(self, next_batch: int, *, last: bool = False) -> dict[TopicPartition, Position]:
        """For all partitions. The metadata tells what no outcome tells: an empty last batch has none."""
        lows = self._groups.low_waters()
        cursor = self._intake.cursor
        passes = f" {cursor.to_text()}" if cursor.begun else ""
        return {
            place: Position(min(lows.get(place, read), read), f"{read} {next_batch} {int(last)}{passes}")
            for place, read in self._read.items()
        }

    def committed(self, transaction: SingleTransaction) -> None:
        for decision in self._decisions.committed():
            self._refilled += decision.result is GroupResult.filtered
            for sibling in decision.group.siblings.values():
                if self._bodies is not None:
                    self._bodies.forget(sibling.place, sibling.offset)
        manifests = [output.message for output in transaction.outputs if isinstance(output.message, BatchManifest)]
        if manifests:
            explored = self._stage.takes_rollouts
            self._next_batch += 1
            self._total_groups = manifests[0].total_groups
            self._last_written = manifests[0].last
            if explored:
                self._tally, self._refilled = Tally(), 0
        elif self._settings.zero_variance == "replace" and self._refilled >= self._settings.max_refill:
            self._stop = StopRule(
                "no_signal",
                f"buffer: {self._refilled} groups in a row had no spread in their rewards and no batch came together "
                "(buffer.max_refill); make the tasks easier or harder, or the groups larger",
            )

    # ------------------------------------------------------------------------------------------ the rest

    def idle_s(self) -> float:
        return self._groups.next_deadline_s(self._clock.now(), self._settings.group_deadline_s)

    def health(self) -> Mapping[str, object]:
        return {
            **self._intake.health(),
            "open_groups": len(self._groups.by_sequence),
            "ready_groups": self._groups.num_ready,
            "decided_groups": len(self._decided),
            "next_batch": self._next_batch,
            "body_bytes": self._bodies.num_bytes if self._bodies else 0,
        }
