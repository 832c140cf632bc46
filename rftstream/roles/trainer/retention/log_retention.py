"""What of the log nobody needs any more, in a run with [retention].

These are batches before the oldest checkpoint that is kept, and all records of groups that were through before it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import TopicPartition
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.roles.verifier import VERIFIER
from rftstream.service.role import Log

READERS = {topic: spec.name for spec in (EXPLORER, VERIFIER, BUFFER) for topic in spec.consumes}
"""Topics of the flow and the groups that read them."""

STEPS = TopicPartition("steps", 0)


class LogRetention:
    """The parts of the log that may be deleted, for one epoch of the trainer. Checkpoints makes it and calls
    `begin` once when `control` was read. After each checkpoint it calls `mark`, and then `plan` if enough checkpoints
    are kept."""

    def __init__(self, log_: Log) -> None:
        self._log = log_
        self._completed = CompletedGroups()
        self._read_outcomes: dict[TopicPartition, int] = {}
        self._marks: deque[tuple[int, dict[str, tuple[int, ...]]]] = deque()
        """How many groups were admitted when the topics of the flow ended at these offsets, oldest first."""
        self._through: Mapping[str, tuple[int, ...]] = {}
        """Where the topics of the flow ended when no group was admitted that is not through by now."""

    def begin(self, said: Trimmed) -> None:
        """Go on from the counts of groups that a predecessor has recorded."""
        self._completed = CompletedGroups(said.sequence, said.groups, said.rollouts)

    def mark(self) -> None:
        """Note the ends of the topics of the flow, and the number of groups admitted by then.

        The ends are read first: all records below them belong to groups that the feeder's count, which is read later,
        includes."""
        ends = {topic: _by_partition(self._log.ends(topic)) for topic in READERS}
        cursor = self._log.committed(FEEDER.name).get(STEPS)
        admitted = json.loads(cursor.metadata)["admitted"] if cursor is not None and cursor.metadata else 0
        self._marks.append((admitted, ends))

    def plan(self, now: Trimmed, version: int, positions: tuple[int, ...]) -> Trimmed:
        """Return the record of deletions so far (`now`), with all parts of the log that may go now.

        `version` and `positions` are those of the oldest checkpoint that a trainer may start from."""
        version = max(now.version, version)
        self._complete(version)
        offsets = {"batches": at_least(now.offsets.get("batches", ()), positions)}
        while self._marks and self._marks[0][0] <= self._completed.sequence:
            self._through = self._marks.popleft()[1]
        for topic, ends in self._through.items():
            offsets[topic] = at_least(now.offsets.get(topic, ()), self._as_far_as_read(topic, ends))
        completed = self._completed
        return replace(
            now,
            offsets={**now.offsets, **offsets},
            version=version,
            sequence=completed.sequence,
            groups=dict(completed.groups),
            rollouts=dict(completed.rollouts),
        )

    def _complete(self, version: int) -> None:
        """Read the outcomes that are new, and see which groups are through below this version."""
        for received in self._log.messages("outcomes", start=self._read_outcomes):
            if isinstance(received.message, GroupOutcome):
                self._completed.add(received.message)
            self._read_outcomes[received.record.place] = received.record.offset + 1
            self._completed.advance(version)
        self._completed.advance(version)

    def _as_far_as_read(self, topic: str, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Return the offsets, each no further than the readers of the topic have committed."""
        for reader in (READERS[topic], SYNTHESISER.name):
            committed = self._log.committed(reader)
            low_water = {place: at.offset for place, at in committed.items() if place.topic == topic}
            if low_water:  # a synthesiser reads one topic, if there is one
                offsets = tuple(min(pair) for pair in zip(offsets, _by_partition(low_water), strict=True))
        return offsets


def at_least(before: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Return the larger one of each pair of offsets; those of `offsets` if none were recorded before."""
    return tuple(max(pair) for pair in zip(before, offsets, strict=True)) if before else offsets


def _by_partition(offsets: Mapping[TopicPartition, int]) -> tuple[int, ...]:
    return tuple(offset for _, offset in sorted(offsets.items()))


# ------------------------------------------------------------------------------------------
#
# Which groups are through, told by their outcomes. Nobody needs again what stands below them on the flow's topics.


TRAINED = "trained"


@dataclass(slots=True)
class _Group:
    size: int
    result: GroupResult | None = None
    """Result of the group; None: only late siblings were seen."""
    batch: int = -1
    """Batch of the group; -1: none."""
    until: int = -1
    """The last batch that may use the group once more; -1: none may."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Result -> number of siblings that have it."""


class CompletedGroups:
    """Counts the groups below `sequence` and their rollouts by fate, in the words of the audit. LogRetention makes it,
    calls `add` for each outcome in log order, and `advance` in between.

    A group is through when it has its outcome, each of its siblings is named by it or by a late record, and its batch,
    if it is in one, lies below the version from which on batches are kept, with each batch that may have the group once
    more."""

    def __init__(self, sequence: int = 0, groups: Mapping[str, int] = {}, rollouts: Mapping[str, int] = {}) -> None:
        """Begin with a predecessor's counts."""
        self.sequence = sequence
        self.groups = Counter(groups)
        self.rollouts = Counter(rollouts)
        self._open: dict[int, _Group] = {}

    def add(self, outcome: GroupOutcome) -> None:
        """Take an outcome of a group, or a late record of one."""
        if outcome.sequence < self.sequence:
            return
        group = self._open.setdefault(outcome.sequence, _Group(outcome.group_size))
        if not outcome.late:
            group.result, group.batch = outcome.result, -1 if outcome.batch_sequence is None else outcome.batch_sequence
            group.until = max((offer.until for offer in outcome.offers), default=-1)
        group.rollouts.update(_fate(outcome, rollout) for rollout in outcome.rollouts)

    def advance(self, version: int) -> None:
        """Count the groups that are through, given that batches below `version` are needed no more."""
        while (group := self._open.get(self.sequence)) is not None:
            seen = group.size > 0 and group.rollouts.total() >= group.size
            if group.result is None or not seen or max(group.batch, group.until) >= version:
                return
            self.groups[TRAINED if group.result is GroupResult.batched else str(group.result)] += 1
            self.rollouts += group.rollouts
            del self._open[self.sequence]
            self.sequence += 1


def _fate(outcome: GroupOutcome, rollout: RolloutSummary) -> str:
    """Return the fate of a sibling. In a batched group a late sibling is expired, one without a reward is dead, and one
    that an operator rejected is filtered."""
    if outcome.late or outcome.result is not GroupResult.batched:
        return str(outcome.result)
    if rollout.rejected is not None:
        return str(GroupResult.filtered)
    scored = rollout.reward is not None and rollout.reason is None
    return TRAINED if scored else str(GroupResult.dead)
