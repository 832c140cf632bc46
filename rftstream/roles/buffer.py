"""The buffer: verified -> batches and outcomes. Every admitted group gets exactly one outcome.

It commits, per partition of `verified`, the first offset of its oldest open group, and as metadata how far it has
read, the next batch, and whether the last one is written. After a restart it reads from there again: what `outcomes`
names already is dropped, and a sibling that comes after the group's outcome (at or above the committed read offset)
gets a late record of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rftstream import codec, metrics
from rftstream.clock import Clock
from rftstream.errors import ContractError, StopRule
from rftstream.messages import (
    BatchManifest,
    Claim,
    Experience,
    GroupOutcome,
    GroupResult,
    LossKind,
    RolloutStatus,
    TasksEnded,
    UnscorableReason,
    VerifiedRollout,
)
from rftstream.roles.bodies import Bodies
from rftstream.roles.groups import DecidedSequences, Group, OpenGroups, late_outcome, sibling_of
from rftstream.roles.tally import Tally
from rftstream.runtime.role import FOREVER, Log, Publish, Received, Transaction
from rftstream.sections import BufferSection, FeederSection
from rftstream.transport.base import Position, Record, TopicPartition

log = logging.getLogger(__name__)

Decision = tuple[Group, GroupResult, str]


class BufferStep:
    outlives_the_run = False

    def __init__(
        self, *, feeder: FeederSection, buffer: BufferSection, shares: int, clock: Clock, imported: bool = False
    ) -> None:
        """`imported`: the versions of the rollouts are another run's, and say nothing about this one's."""
        self._imported = imported
        self._feeder = feeder
        self._settings = buffer
        self._shares = shares
        self._clock = clock
        self._min_siblings = min(buffer.min_siblings, feeder.group_size)
        self._done = False
        self._stop: StopRule | None = None
        self._reset(None)

    def _reset(self, bodies: Bodies | None) -> None:
        self._bodies = bodies
        self._groups = OpenGroups()
        self._decided = DecidedSequences()
        self._tally = Tally()
        self._admitted: int | None = None
        """How many groups there are in all, once the feeder has said so."""
        self._next_batch = 0
        self._total_groups = 0
        self._refilled = 0
        """Filtered groups since the last batch."""
        self._last_written = False
        self._read: dict[TopicPartition, int] = {}
        self._read_before: dict[TopicPartition, int] = {}
        self._decisions: list[Decision] = []
        self._late: list[GroupOutcome] = []
        self._written: list[Decision] = []
        """Decisions of the transaction that is being committed; more may be made before it is."""

    @property
    def done(self) -> bool:
        return self._done

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        self._reset(Bodies(log_.transport, self._settings.max_body_bytes))
        for received in log_.messages("outcomes"):
            if isinstance(received.message, GroupOutcome):
                self._recall(received.message)
        for received in log_.messages("control"):
            self._absorb_control(received)
        positions: dict[TopicPartition, int] = {}
        for place, position in log_.committed("buffer").items():
            positions[place] = position.offset
            read, next_batch, last = map(int, (position.metadata or f"{position.offset} 0 0").split())
            self._read_before[place] = read
            self._next_batch = max(self._next_batch, next_batch)
            self._last_written = self._last_written or bool(last)
        self._read = dict(positions)
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
        if not isinstance(received.message, VerifiedRollout):
            self._absorb_control(received)
            return
        self._take(received.record, received.message)

    def _absorb_control(self, received: Received) -> None:
        match received.message:
            case TasksEnded(admitted=admitted):
                self._admitted = admitted
            case None if received.record.key == b"end":
                self._admitted = None  # the run was given more to do

    def undecodable(self, record: Record, error: ContractError) -> None:
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
                self._late.append(late_outcome(verified, self._clock.now()))
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
                self._decide(group, GroupResult.dead, self._why_dead(group))
            else:
                self._decide(group, GroupResult.expired, "deadline")
        elif group.zero_variance and self._settings.zero_variance == "replace":
            self._decide(group, GroupResult.filtered, "zero_variance")
        else:
            self._groups.mark_ready(group)

    @staticmethod
    def _why_dead(group: Group) -> str:
        reasons = sorted({str(sibling.summary.reason) for sibling in group.siblings.values() if sibling.summary.reason})
        return "unscorable: " + ", ".join(reasons)

    def _decide(self, group: Group, result: GroupResult, reason: str) -> None:
        self._decisions.append((group, result, reason))
        self._groups.remove(group)
        self._decided.add(group.sequence)

    def _close_overdue(self) -> None:
        deadline = self._settings.group_deadline_s
        if deadline is None:
            return
        now = self._clock.now()
        for group in list(self._groups.by_sequence.values()):
            if not group.ready and now - group.first_at >= deadline:
                self._judge(group)

    def _next_deadline_s(self) -> float:
        deadline = self._settings.group_deadline_s
        if deadline is None:
            return FOREVER
        waiting = [group.first_at for group in self._groups.by_sequence.values() if not group.ready]
        return max(0.0, min(waiting) + deadline - self._clock.now()) if waiting else FOREVER

    # ------------------------------------------------------------------------------------------ writing

    def advance(self) -> Transaction | None:
        if self._stop is not None:
            raise self._stop
        if self._last_written and self._all_in(0):
            return None
        self._close_overdue()
        batch = self._choose()
        if batch is not None:
            return self._batch(batch)
        if self._decisions or self._late:
            return Transaction(tuple(self._outcomes()), self._positions(self._next_batch))
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
        if len(chosen) == size:
            return chosen
        return chosen if self._all_in(len(chosen)) else None

    def _all_in(self, num_chosen: int) -> bool:
        """Whether these are the last groups there will be."""
        return self._admitted is not None and len(self._decided) + num_chosen >= self._admitted

    def _staleness(self, group: Group) -> int:
        oldest = group.oldest_version
        return 0 if oldest is None or self._imported else self._next_batch - oldest

    def _batch(self, groups: Sequence[Group]) -> Transaction:
        outputs: list[Publish] = []
        by_share: dict[int, list[Group]] = defaultdict(list)
        for index, group in enumerate(groups):
            by_share[index * self._shares // len(groups)].append(group)
        staleness = max((self._staleness(group) for group in groups), default=0)
        for group in groups:
            self._decide(group, GroupResult.batched, "complete" if group.complete else "deadline")
        outcomes = self._outcomes()
        last = self._all_in(0)
        experiences_of = {share: self._experiences(by_share[share], share) for share in range(self._shares)}
        values = self._tally.metrics()
        if not self._imported:
            values["staleness_max"] = float(staleness)
        if groups and not self._imported:
            values["staleness_mean"] = sum(map(self._staleness, groups)) / len(groups)
        for share, experiences in experiences_of.items():
            encoded = [codec.encode(one) for one in experiences]
            manifest = BatchManifest(
                batch_sequence=self._next_batch,
                share=share,
                num_shares=self._shares,
                count=len(experiences),
                digest=codec.digest_of_experiences(encoded),
                groups=tuple(group.group_id for group in by_share[share]),
                num_groups=len(groups),
                total_groups=self._total_groups + len(groups),
                last=last,
                admitted=self._admitted if last else None,
                max_staleness=max(0, staleness),
                metrics=values,
            )
            outputs += [Publish("batches", share, *pair) for pair in zip(experiences, encoded, strict=True)]
            outputs.append(Publish("batches", share, manifest))
        return Transaction((*outputs, *outcomes), self._positions(self._next_batch + 1, last=last))

    def _experiences(self, groups: Sequence[Group], share: int) -> list[Experience]:
        assert self._bodies is not None
        experiences: list[Experience] = []
        for group in groups:
            for sibling in group.scored:
                verified = self._bodies.get(sibling.place, sibling.offset)
                rollout, verdict = verified.rollout, verified.verdict
                assert rollout is not None and verdict is not None
                self._tally.verdict(verdict, rollout.metrics)
                experiences.append(
                    Experience(
                        ids=verified.ids,
                        batch_sequence=self._next_batch,
                        share=share,
                        position=len(experiences),
                        loss_kind=LossKind.rl,
                        segments=rollout.segments,
                        reward=verdict.reward,
                        sampling=rollout.sampling,
                        truncated=rollout.status is RolloutStatus.truncated,
                        parts=verdict.parts,
                        metrics=verdict.metrics,
                        additions=verdict.additions,
                        attachments=rollout.attachments,
                    )
                )
        return experiences

    def _outcomes(self) -> list[Publish]:
        """Records for all that was decided since the last transaction."""
        now = self._clock.now()
        records = []
        self._written, self._decisions = self._decisions, []
        for group, result, reason in self._written:
            self._tally.group(group.taskset, result, group.summaries)
            metrics.GROUPS.labels(str(result)).inc()
            records.append(
                Publish(
                    "outcomes",
                    0,
                    GroupOutcome(
                        group_id=group.group_id,
                        taskset=group.taskset,
                        sequence=group.sequence,
                        result=result,
                        reason=reason,
                        rollouts=group.summaries,
                        decided_at=now,
                        batch_sequence=self._next_batch if result is GroupResult.batched else None,
                        group_size=group.size,
                    ),
                )
            )
        late, self._late = self._late, []
        return records + [Publish("outcomes", 0, one) for one in late]

    def _positions(self, next_batch: int, *, last: bool = False) -> dict[TopicPartition, Position]:
        """For all partitions. The metadata tells what no outcome tells: an empty last batch has none."""
        lows = self._groups.low_waters()
        return {
            place: Position(min(lows.get(place, read), read), f"{read} {next_batch} {int(last)}")
            for place, read in self._read.items()
        }

    def committed(self, transaction: Transaction) -> None:
        for group, result, _ in self._written:
            self._refilled += result is GroupResult.filtered
            for sibling in group.siblings.values():
                if self._bodies is not None:
                    self._bodies.forget(sibling.place, sibling.offset)
        self._written = []
        manifests = [output.message for output in transaction.outputs if isinstance(output.message, BatchManifest)]
        if manifests:
            self._next_batch += 1
            self._total_groups = manifests[0].total_groups
            self._last_written = manifests[0].last
            self._tally, self._refilled = Tally(), 0
        elif self._settings.zero_variance == "replace" and self._refilled >= self._settings.max_refill:
            self._stop = StopRule(
                "no_signal",
                f"buffer: {self._refilled} groups in a row had no spread in their rewards and no batch came together "
                "(buffer.max_refill); make the tasks easier or harder, or the groups larger",
            )

    # ------------------------------------------------------------------------------------------ the rest

    @property
    def full(self) -> bool:
        return False

    def idle_s(self) -> float:
        return self._next_deadline_s()

    def paused(self, paused: bool) -> None:
        pass

    def draining(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def health(self) -> Mapping[str, object]:
        return {
            "open_groups": len(self._groups.by_sequence),
            "ready_groups": self._groups.num_ready,
            "decided_groups": len(self._decided),
            "next_batch": self._next_batch,
            "body_bytes": self._bodies.num_bytes if self._bodies else 0,
        }

    def close(self) -> None:
        pass
