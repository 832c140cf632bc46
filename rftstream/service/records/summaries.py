"""Summaries: what a role must know of the past, so that it need not read a topic from the beginning.

The single role that writes a topic summarises it every so many records, on `summaries`, in one of its transactions
(docs/architecture.md, "Summaries"). It makes a summary of what it reads back from the log by the rule that all readers
have, and not of what it remembers. So the summary of what is below an offset is the same whoever makes it.

A reader trusts a summary that another one bears out: from the one before it, and what stands between the two, the same
must come. If it does not, or if there is only one, the reader begins at the beginning of the topic, and so it does with
a run that has none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.contracts.versions import WeightsAnnounced, WeightsKind
from rftstream.errors import ContractError
from rftstream.service.records.newest_summaries import SUMMARIES, newest_summaries
from rftstream.service.role import Log, Publish, Received
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

EVERY = {"outcomes": 512, "steps": 128, "weights": 128}
"""Topic -> records in force after which its writer summarises it again."""

MAX_RECORDS_A_LOOK = 2000
"""Records that a writer reads back at once, so that its other work goes on."""


@dataclass(frozen=True, slots=True)
class TopicStart:
    """The start of a reader of a topic: the place, and the summary of all before."""

    positions: dict[TopicPartition, int]
    """Offsets from which the topic is read on."""
    summary: Summary | None = None
    """Summary of the records below the positions; None: there is none, and the positions are the beginning of the
    topic."""
    record: Record | None = None
    """Record of the summary; None if there is none."""

    def received(self) -> list[Received]:
        """Return the summary as a step is given it; nothing where there is none."""
        return [] if self.record is None else [Received(self.record, self.summary)]


def begin_with_summary(reader: Log, topic: str, *, whole: bool = False, behind: int = 0) -> TopicStart:
    """Have the reader's rule begin with the newest summary of a topic that can be trusted, if there is one that leaves
    `behind` offsets at the end to be read; with `whole`, or if there is none, with the beginning of the topic."""
    begins, place = reader.transport.admin.begin_offsets(topic), TopicPartition(topic, 0)
    end = reader.transport.admin.end_offsets(topic)[place]
    newest = [] if whole else newest_summaries(reader.transport, topic, reader.rule.decode, below=end - behind)
    if len(newest) == 2 and newest[1][1].through >= begins[place]:
        (record, said), (_, before) = newest
        reader.rule.begin_anew(topic, before)
        judge(reader, topic, before.through, said.through)
        if reader.rule.summary(topic, said.through) == said:
            reader.rule.begin_anew(topic, said)
            return TopicStart({place: said.through}, said, record)
        log.warning(
            "%s: says something else of %s below offset %d than the one before it and what stands between them; "
            "reading all of it",
            record,
            topic,
            said.through,
        )
    reader.rule.begin_anew(topic)
    return TopicStart(begins)


def judge(reader: Log, topic: str, start: int, stop: int) -> None:
    """Have the reader's rule judge the records of a topic from one offset up to another."""
    for record in reader.read(topic, start={TopicPartition(topic, 0): start}):
        if record.offset >= stop:
            break
        with contextlib.suppress(ContractError):
            reader.rule.decode(record)


def says_all(summary: Summary) -> bool:
    """Whether the summary says all that one of this release does."""
    return summary.weights is None or all(run.kept is not None for run in summary.weights.versions)


class SummaryWriter:
    """Makes the summaries of the topics that a single role writes. SingleService makes it; it calls `begin` when the
    role was taken, then `look` before each transaction and `take` for what goes with it, and `committed` for what is
    on the log."""

    def __init__(self, transport: Transport, topics: Sequence[str], every: int | None = None) -> None:
        """`every`: after how many records a topic is summarised again; None: as EVERY has it."""
        self._transport = transport
        self._every = {topic: every or EVERY[topic] for topic in topics if topic in EVERY}
        self._topics: list[_Summarised] | None = None
        self._ready: list[Summary] = []

    def begin(self) -> None:
        """Begin with the state of the log: another process may have written since."""
        self._topics, self._ready = None, []

    def look(self) -> None:
        """Read back some of the written records, if it is time. If the log does not answer, they are read later."""
        if self._topics is None:
            there = SUMMARIES.topic in self._transport.admin.topics()  # a run of an older release has no such topic
            self._topics = [_Summarised(self._transport, *one) for one in self._every.items()] if there else []
        for topic in self._topics:
            if (summary := topic.look()) is not None:
                self._ready.append(summary)

    def __bool__(self) -> bool:
        """Whether there is a summary to be written."""
        return bool(self._ready)

    def take(self) -> list[Publish]:
        """Return the summaries to be written, once."""
        ready, self._ready = self._ready, []
        return [Publish(SUMMARIES.topic, 0, summary) for summary in ready]

    def committed(self, outputs: Sequence[Publish]) -> None:
        """Take note of what the role has written."""
        for topic in self._topics or ():
            topic.num_written += sum(output.topic == topic.name for output in outputs)


class _Summarised:
    """A topic that is summarised, as far as it was read back."""

    def __init__(self, transport: Transport, name: str, every: int) -> None:
        self.name = name
        self.num_written = every
        """Records that the role has written since this was looked at last. At first nobody knows how many."""
        self._every = every
        self._log = Log(transport)
        self._place = TopicPartition(name, 0)
        self._next: int | None = None
        """The offset to be read next; None: nothing is known yet."""
        self._num_since = 0
        """Records in force since the newest summary."""
        self._look_at = every
        """With so many it is time to look."""

    def look(self) -> Summary | None:
        """Read back, if it is time; return a summary if that came to the place for one."""
        if self._num_since + self.num_written < self._look_at:
            return None
        if self._next is None:
            start = begin_with_summary(self._log, self.name)
            if start.summary is not None and not says_all(start.summary):
                start = begin_with_summary(self._log, self.name, whole=True)
            self._next = start.positions[self._place]
        end = self._log.ends(self.name)[self._place]
        num_left = MAX_RECORDS_A_LOOK
        for record in self._log.read(self.name, start={self._place: self._next}):
            summary = self._judge(record)
            self._next = record.offset + 1
            if summary is not None:
                self._num_since, self._look_at = 0, self._every
                return summary
            num_left -= 1
            if not num_left:
                return None
        self._next = max(self._next, end)
        self.num_written = 0
        self._look_at = max(self._every, self._num_since + max(1, self._every // 8))
        return None

    def _judge(self, record: Record) -> Summary | None:
        """Judge the next record. Return a summary if there is one at this place."""
        due = self._num_since + 1 >= self._every
        before = self._log.rule.summary(self.name, record.offset) if due and self.name == "weights" else None
        try:
            message = self._log.rule.decode(record)
        except ContractError:
            return None
        self._num_since += 1
        if self.name != "weights":
            return self._log.rule.summary(self.name, record.offset + 1) if due else None
        # Followers begin with a full snapshot.
        return before if isinstance(message, WeightsAnnounced) and message.kind is WeightsKind.full else None
