"""A log written record by record, as the roles would write it, for the views to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rftstream.contracts import ids
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.contracts.topics import TOPICS, num_partitions
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout
from rftstream.contracts.versions import StepRecord, StepTotals, VersionName
from rftstream.roles import role_specs
from rftstream.testing.played import played_records
from rftstream.transport.base import Position, TopicSettings, Transport

PROBLEM = Problem(messages=(ChatMessage(role="user", content="1+2="),), answer="3")


class SyntheticLog:
    def __init__(self, transport: Transport, *, partitions: int = 2, shares: int = 1, group_size: int = 2) -> None:
        self.transport, self.partitions, self.shares, self.group_size = transport, partitions, shares, group_size
        if not transport.admin.topics():
            transport.admin.ensure_topics(
                {
                    name: TopicSettings(
                        partitions=num_partitions(topic, partitions=partitions, shares=shares),
                        compacted=topic.compacted,
                    )
                    for name, topic in TOPICS.items()
                }
            )
            for spec in role_specs():
                transport.admin.commit_initial(spec.name, spec.positions)
        self._producer = transport.producer("synthetic")
        self._producer.start()
        self.trained: dict[int, int] = {0: 0}
        """Version -> groups trained by then."""
        self.totals: dict[int, StepTotals] = {}
        """Version -> what the steps up to it amount to."""

    # ------------------------------------------------------------------------------------------ writing

    def put(self, topic: str, *messages: Message, partition: int | None = None) -> None:
        self.put_all([(topic, message, partition) for message in messages])

    def put_all(self, entries: Iterable[tuple[str, Message, int | None]]) -> None:
        """One transaction."""
        places = [
            (topic, self._partition(topic, message) if partition is None else partition, message)
            for topic, message, partition in entries
        ]
        self._producer.commit(played_records(self.transport, "synthetic", places))

    def put_raw(self, *records: NewRecord) -> None:
        self._producer.commit(records)

    def passed(self, group: str, topic: str, offset: int, partition: int = 0, metadata: str = "") -> None:
        """A committed position."""
        positions = {TopicPartition(topic, partition): Position(offset, metadata)}
        self._producer.commit([], positions=positions, group=group)

    def _partition(self, topic: str, message: Message) -> int:
        if TOPICS[topic].width == "partitions" and isinstance(message, Task | Rollout | VerifiedRollout):
            return message.ids.sequence % self.partitions
        return message.share if isinstance(message, Experience | BatchManifest) else 0

    # ------------------------------------------------------------------------------------------ the flow

    def siblings(self, sequence: int) -> tuple[RolloutIds, ...]:
        group = ids.group_id("sums", 0, sequence, 0)
        return tuple(
            RolloutIds(
                rollout_id=ids.rollout_id(group, i),
                group_id=group,
                taskset="sums",
                sibling=i,
                group_size=self.group_size,
                sequence=sequence,
                min_version=0,
            )
            for i in range(self.group_size)
        )

    def admit(self, *sequences: int) -> None:
        for sequence in sequences:
            self.put("tasks", *(task(one) for one in self.siblings(sequence)))

    def sample(self, *sequences: int, num_tokens: int = 2) -> None:
        for sequence in sequences:
            self.put("rollouts", *(rollout(one, num_tokens=num_tokens) for one in self.siblings(sequence)))

    def verify(self, *sequences: int) -> None:
        for sequence in sequences:
            self.put("verified", *(verified(one, reward=float(one.sibling)) for one in self.siblings(sequence)))

    def flow(self, *sequences: int) -> None:
        """From admission to the buffer."""
        self.admit(*sequences)
        self.sample(*sequences)
        self.verify(*sequences)

    def batch(
        self,
        batch: int,
        sequences: Sequence[int],
        *,
        unscored: Sequence[str] = (),
        last: bool = False,
        leave_out: Sequence[str] = (),
    ) -> None:
        """A batch with its outcomes. `unscored` siblings have no reward; `leave_out` is for logs gone wrong."""
        entries: list[tuple[str, Message, int | None]] = []
        counts = [0] * self.shares
        groups: list[list[str]] = [[] for _ in range(self.shares)]
        for i, sequence in enumerate(sequences):
            share, siblings = i % self.shares, self.siblings(sequence)
            groups[share].append(siblings[0].group_id)
            for one in siblings:
                if one.rollout_id not in unscored and one.rollout_id not in leave_out:
                    entries.append(("batches", experience(one, batch, share, counts[share]), None))
                    counts[share] += 1
            entries.append(("outcomes", outcome(siblings, GroupResult.batched, batch=batch, unscored=unscored), None))
        for share in range(self.shares):
            entries.append(("batches", BatchManifest(
                batch_sequence=batch, share=share, num_shares=self.shares, count=counts[share],
                digest="sha256:" + "0" * 64, groups=tuple(groups[share]), num_groups=len(sequences),
                total_groups=0, last=last, scorers={"sums": "exact 1"},
            ), None))  # fmt: skip
        self.trained[batch + 1] = self.trained[batch] + len(sequences)
        self.put_all(entries)

    def decide(
        self, sequence: int, result: GroupResult, *, only: Sequence[int] | None = None, reason: str = "test"
    ) -> None:
        siblings = [one for one in self.siblings(sequence) if only is None or one.sibling in only]
        self.put("outcomes", replace(outcome(siblings, result), reason=reason))

    def late(self, sequence: int, sibling: int, result: GroupResult = GroupResult.expired) -> None:
        self.put("outcomes", outcome([self.siblings(sequence)[sibling]], result, late=True))

    def step(
        self,
        version: int,
        *,
        epoch: int = 1,
        resumed: bool = False,
        at: float = 0.0,
        metrics: dict[str, float] | None = None,
        last: bool = False,
        staleness: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        scorers: dict[str, str] | None = None,
        config: str = "",
    ) -> None:
        """`staleness`: of tokens, and of groups."""
        before = self.totals.get(version if resumed else version - 1, StepTotals())
        self.totals[version] = before if resumed else before.plus(metrics or {}, *staleness)
        self.put("steps", StepRecord(
            name=VersionName(trainer_epoch=epoch, version=version), batch_sequence=None if resumed else version - 1,
            positions=(0,) * self.shares, trained_groups=self.trained[version],
            trained_rollouts=self.trained[version] * self.group_size, weights_digest=None, metrics=metrics or {},
            resumed=resumed, last=last, recorded_at=at, token_staleness=staleness[0], group_staleness=staleness[1],
            totals=self.totals[version], scorers=scorers or {}, config=config,
        ))  # fmt: skip


def task(one: RolloutIds) -> Task:
    return Task(ids=one, problem=PROBLEM, sampling=Sampling(), seed=7)


def piece(one: RolloutIds, number: int, *, explorer: str = "explorer-0", num_tokens: int = 2) -> PartialRollout:
    return PartialRollout(
        ids=one, piece=number, turns=(), segments=(), num_tokens=num_tokens, continues=False, explorer=explorer
    )


def rollout(
    one: RolloutIds, *, num_tokens: int = 2, status: RolloutStatus = RolloutStatus.completed, version: int = 0
) -> Rollout:
    return Rollout(
        ids=one,
        status=status,
        problem=PROBLEM,
        num_tokens=num_tokens,
        sampling=Sampling(),
        turns=(Turn(role="assistant", content="3", num_tokens=num_tokens, finish_reason="stop"),),
        segments=(segment(num_tokens, version),),
    )


def segment(num_tokens: int = 2, version: int = 0) -> Segment:
    """Three prompt tokens, then the sampled ones."""
    mask = [0, 0, 0] + [1] * num_tokens
    return Segment(
        token_ids=Array.of(range(3 + num_tokens), "int32"),
        behavior_logprobs=Array.of([-0.5 * sampled for sampled in mask], "float32"),
        loss_mask=Array.of(mask, "uint8"),
        versions=(VersionSpan(start=3, count=num_tokens, trainer_epoch=1, version=version),) if num_tokens else (),
    )


def verified(one: RolloutIds, *, reward: float = 1.0, reason: UnscorableReason | None = None) -> VerifiedRollout:
    verdict = Verdict(reward=reward, scorer="exact", scorer_version="1")
    detail = "as it should be"
    return VerifiedRollout(
        ids=one, rollout=rollout(one), verdict=None if reason else verdict, reason=reason, detail=detail
    )


def experience(one: RolloutIds, batch: int, share: int, position: int) -> Experience:
    return Experience(
        ids=one,
        batch_sequence=batch,
        share=share,
        position=position,
        loss_kind=LossKind.rl,
        segments=(segment(),),
        reward=1.0,
        sampling=Sampling(),
    )


def outcome(
    siblings: Sequence[RolloutIds],
    result: GroupResult,
    *,
    batch: int | None = None,
    unscored: Sequence[str] = (),
    late: bool = False,
) -> GroupOutcome:
    first = siblings[0]
    return GroupOutcome(
        group_id=first.group_id, taskset=first.taskset, sequence=first.sequence, result=result, reason="test",
        batch_sequence=batch, late=late,
        rollouts=tuple(
            RolloutSummary(rollout_id=one.rollout_id, num_tokens=2, status=RolloutStatus.completed,
                           reward=None if one.rollout_id in unscored else 1.0,
                           reason=UnscorableReason.timeout if one.rollout_id in unscored else None)
            for one in siblings
        ),
    )  # fmt: skip
