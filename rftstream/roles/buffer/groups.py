"""Groups in the buffer: which siblings have arrived, what is decided, and which groups make the next batch.

This module keeps summaries; bodies.py keeps the bodies."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rftstream.contracts.outcomes import DecidedSequences, GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.operators.pipeline import ExperienceResult
from rftstream.metrics import named_by_people
from rftstream.roles.explorer.attempt import oldest_version


@dataclass(frozen=True, slots=True)
class Sibling:
    """One record on `verified`."""

    summary: RolloutSummary
    place: TopicPartition
    offset: int
    oldest_version: int | None
    sibling: int
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the verdict's reward."""

    @property
    def scored(self) -> bool:
        """Whether it has a reward."""
        return self.summary.reward is not None

    @property
    def place_offset(self) -> tuple[TopicPartition, int]:
        """Partition and offset of the sibling's record."""
        return self.place, self.offset


def sibling_of(verified: VerifiedRollout, place: TopicPartition, offset: int) -> Sibling:
    """Return the sibling for a record of `verified`."""
    rollout = verified.rollout
    summary = RolloutSummary(
        rollout_id=verified.ids.rollout_id,
        num_tokens=rollout.num_tokens if rollout else 0,
        status=rollout.status if rollout else RolloutStatus.undecodable,
        reward=verified.verdict.reward if verified.verdict else None,
        reason=verified.reason,
        roles=verified.verdict.roles if verified.verdict else {},
    )
    return Sibling(
        summary,
        place,
        offset,
        oldest_version(rollout.segments) if rollout else None,
        verified.ids.sibling,
        verified.verdict.parts if verified.verdict else {},
    )


def unscorable_reasons(group: Group) -> str:
    """Return why a group has too few rewards: the distinct reasons of its siblings."""
    reasons = sorted({str(sibling.summary.reason) for sibling in group.siblings.values() if sibling.summary.reason})
    return "unscorable: " + ", ".join(reasons)


def late_outcome(verified: VerifiedRollout, now: float) -> GroupOutcome:
    """Return the record for a sibling that came after its group's outcome."""
    ids = verified.ids
    return GroupOutcome(
        group_id=ids.group_id,
        taskset=ids.taskset,
        sequence=ids.sequence,
        result=GroupResult.expired,
        reason="late",
        rollouts=(sibling_of(verified, TopicPartition("verified", 0), 0).summary,),
        late=True,
        decided_at=now,
        group_size=ids.group_size,
    )


@dataclass(slots=True)
class Group:
    """A group without an outcome."""

    group_id: str
    taskset: str
    sequence: int
    size: int
    first_at: float
    """Log time of its first record."""
    first_offset: int
    place: TopicPartition
    siblings: dict[int, Sibling] = field(default_factory=dict)
    ready: bool = False
    """Whether the group may be batched as it is."""
    result: ExperienceResult | None = None
    """Result of the operators when they last judged the group."""
    held: bool = False
    """Whether the group waits for answers of annotators."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Siblings that annotators keep out of the batch -> the reason."""

    @property
    def complete(self) -> bool:
        """Whether all siblings have arrived."""
        return len(self.siblings) >= self.size

    @property
    def scored(self) -> list[Sibling]:
        """The siblings that have a reward, in order."""
        return [self.siblings[number] for number in sorted(self.siblings) if self.siblings[number].scored]

    @property
    def kept(self) -> list[Sibling]:
        """Siblings for the batch, in order: those with a reward that no operator or annotator rejected."""
        rejected = self.rejected
        return [sibling for sibling in self.scored if sibling.sibling not in rejected]

    @property
    def rejected(self) -> Mapping[int, str]:
        """Siblings that operators or annotators keep out of the batch -> the reason."""
        of_operators = self.result.rejected if self.result is not None else {}
        return {**of_operators, **self.left_out} if self.left_out else of_operators

    @property
    def summaries(self) -> tuple[RolloutSummary, ...]:
        """Summaries of all siblings, in order."""
        rejected = self.rejected
        return tuple(
            replace(self.siblings[number].summary, rejected=rejected[number])
            if number in rejected
            else self.siblings[number].summary
            for number in sorted(self.siblings)
        )

    @property
    def priority(self) -> float:
        """Priority of the group: the product of the operators' factors."""
        return self.result.priority if self.result is not None else 1.0

    @property
    def part_means(self) -> dict[str, float]:
        """Mean of each named part over the scored siblings that have the part."""
        values: dict[str, list[float]] = {}
        for sibling in self.scored:
            for name, value in sibling.parts.items():
                values.setdefault(name, []).append(value)
        most_first = sorted(values.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        means = named_by_people({name: sum(some) / len(some) for name, some in most_first})
        return {name: mean for name, mean in sorted(means.items()) if math.isfinite(mean)}

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token of a kept sibling; None if no token was sampled."""
        versions = [sibling.oldest_version for sibling in self.kept if sibling.oldest_version is not None]
        return min(versions) if versions else None


def _turn(group: Group, last_chance: int) -> tuple[bool, float, int, int]:
    """Return a sort key: groups with smaller keys are batched first. First come groups that will be too old after this
    batch (sampled by `last_chance` or an older version), then groups with a higher priority, then older groups."""
    oldest = sys.maxsize if group.oldest_version is None else group.oldest_version
    return oldest > last_chance, -group.priority, oldest, group.sequence


class OpenGroups:
    """All groups that have a record and no outcome. The step makes it at each recovery and calls `add` for each record.
    It calls `mark_ready` and `remove` for its decisions, and asks for the groups of the next batch."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, Group] = {}
        self._ready: set[int] = set()
        """Sequences of ready groups."""

    def add(self, verified: VerifiedRollout, sibling: Sibling, timestamp_s: float) -> Group:
        """Add a sibling to its group, and return the group. A twin changes nothing."""
        ids = verified.ids
        group = self.by_sequence.get(ids.sequence)
        if group is None:
            group = Group(
                ids.group_id, ids.taskset, ids.sequence, ids.group_size, timestamp_s, sibling.offset, sibling.place
            )
            self.by_sequence[ids.sequence] = group
        group.siblings.setdefault(sibling.sibling, sibling)
        return group

    def mark_ready(self, group: Group) -> None:
        """Allow the group to be batched as it is."""
        group.ready = True
        self._ready.add(group.sequence)

    def remove(self, group: Group) -> None:
        """Forget a group that has an outcome."""
        del self.by_sequence[group.sequence]
        self._ready.discard(group.sequence)

    @property
    def ready(self) -> list[Group]:
        """Groups that may be batched, by sequence."""
        return [self.by_sequence[sequence] for sequence in sorted(self._ready)]

    @property
    def num_ready(self) -> int:
        """Number of groups that may be batched."""
        return len(self._ready)

    def in_order(self, decided: DecidedSequences, count: int) -> list[Group]:
        """Return up to `count` ready groups by sequence. Decided groups are skipped. The first group that is neither
        ready nor decided ends the search."""
        chosen: list[Group] = []
        sequence = decided.below
        while len(chosen) < count:
            group = self.by_sequence.get(sequence)
            if group is not None and group.ready:
                chosen.append(group)
            elif sequence not in decided:
                break
            sequence += 1
        return chosen

    def oldest_first(self, count: int, last_chance: int) -> list[Group]:
        """Return up to `count` ready groups, those first that become too old first. Otherwise a group with long
        rollouts that arrives last would expire behind fresh groups. Groups with tokens of version `last_chance` or
        older are too old for the next batch. Among the other groups, those with a higher priority come first."""
        ready = (self.by_sequence[sequence] for sequence in self._ready)
        return heapq.nsmallest(count, ready, key=lambda group: _turn(group, last_chance))

    def overdue(self, now: float, deadline_s: float | None) -> list[Group]:
        """Return the groups that have waited for siblings until the deadline."""
        if deadline_s is None:
            return []
        waiting = [group for group in self.by_sequence.values() if not (group.ready or group.held)]
        return [group for group in waiting if now - group.first_at >= deadline_s]

    def next_deadline_s(self, now: float, deadline_s: float | None) -> float:
        """Return the seconds until the next group is overdue; infinity if none will be."""
        if deadline_s is None:
            return math.inf
        waiting = [group.first_at for group in self.by_sequence.values() if not (group.ready or group.held)]
        return max(0.0, min(waiting) + deadline_s - now) if waiting else math.inf

    def low_waters(self) -> dict[TopicPartition, int]:
        """Return the first offset of the oldest open group, for each partition that has one."""
        lows: dict[TopicPartition, int] = {}
        for group in self.by_sequence.values():
            for sibling in group.siblings.values():
                lows[sibling.place] = min(lows.get(sibling.place, sibling.offset), sibling.offset)
        return lows
