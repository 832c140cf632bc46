"""What of the log nobody needs any more, in a run with [retention].

These are batches before the oldest checkpoint that is kept, and all records of groups that were through before it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import TopicPartition
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.feeder import FEEDER
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.roles.trainer.retention.completed_groups import CompletedGroups
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
