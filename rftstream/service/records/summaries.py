"""Summaries: a role's knowledge of the past, so that it need not read a topic from its beginning.

The single role that writes a topic also summarises it at intervals, on `summaries`, in one of its transactions
(docs/architecture.md, "Summaries"). The trainer does it for `control`. It computes a summary from the records that it
reads back from the log, with the rule that all readers share, and not from its own memory. So a summary of the records
below an offset is the same whoever makes it.

A reader trusts a summary only if the one before it confirms it: the older summary and the records in between must give
the newer one. If they do not, if there is only one summary, or if there is none, the reader begins at the beginning of
the topic."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import Summary, summariser
from rftstream.contracts.versions import WeightsAnnounced, WeightsKind
from rftstream.errors import ContractError
from rftstream.service.reading import read_between
from rftstream.service.records.newest_summaries import SUMMARIES, newest_summaries
from rftstream.service.role import Log, Publish, Received
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

EVERY = {"outcomes": 512, "steps": 128, "weights": 128, "control": 64}
"""Topic -> number of records in force after which its writer summarises it again."""

MAX_RECORDS_A_LOOK = 2000
"""Most records that a writer reads back at once, so that its other work is not delayed."""


@dataclass(frozen=True, slots=True)
class TopicStart:
    """The place at which a reader of a topic starts, with the summary of everything before."""

    positions: dict[TopicPartition, int]
    """Offsets from which the topic is read on."""
    summary: Summary | None = None
    """Summary of the records below the positions; None if there is none and the positions are the beginning of the
    topic."""
    record: Record | None = None
    """Record of the summary; None if there is none."""

    def received(self) -> list[Received]:
        """Return the summary in the form that a step receives; an empty list if there is none."""
        return [] if self.record is None else [Received(self.record, self.summary)]


def begin_with_summary(reader: Log, topic: str, *, whole: bool = False, behind: int = 0) -> TopicStart:
    """Let the reader's rule begin with the newest trusted summary of a topic that leaves at least `behind` offsets to
    be read. With `whole`, or without such a summary, the rule begins at the beginning of the topic."""
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
    """Let the reader's rule judge the records of a topic from one offset up to another."""
    place = TopicPartition(topic, 0)
    for record in read_between(reader.transport, {place: start}, {place: min(stop, reader.ends(topic)[place])}):
        with contextlib.suppress(ContractError):
            reader.rule.decode(record)


def says_all(summary: Summary) -> bool:
    """Whether the summary has all the fields that this release writes."""
    return summary.weights is None or all(run.kept is not None for run in summary.weights.versions)


def summarised_by(role: str) -> list[str]:
    """Return the topics that a single role summarises."""
    return [topic for topic in EVERY if summariser(topic) == role]


class SummaryWriter:
    """Makes the summaries that a single role writes. SingleService makes it and calls `begin` after the
    claim. Before each transaction it calls `look`, then `take` for the summaries to publish, and `committed` with the
    records that are on the log."""

    def __init__(self, transport: Transport, topics: Sequence[str], every: int | None = None) -> None:
        """`every` is the number of records after which a topic is summarised again; None for the values of EVERY."""
        self._transport = transport
        self._every = {topic: every or EVERY[topic] for topic in topics}
        self._topics: list[_Summarised] | None = None
        self._ready: list[Summary] = []

    def begin(self) -> None:
        """Start from the state of the log, since another process may have written since."""
        self._topics, self._ready = None, []

    def look(self) -> None:
        """Read back some of the written records if it is time. If the log does not answer, they are read later."""
        if self._topics is None:
            there = SUMMARIES.topic in self._transport.admin.topics()  # a run of an older release has no such topic
            reader = Log(self._transport)  # one for all other topics, since its rule reads the claims on `control`
            self._topics = [
                _Summarised(Log(self._transport) if topic == "control" else reader, topic, every)
                for topic, every in self._every.items()
                if there
            ]
        for topic in self._topics:
            if (summary := topic.look()) is not None:
                self._ready.append(summary)

    def __bool__(self) -> bool:
        """Whether a summary is ready to be written."""
        return bool(self._ready)

    def take(self) -> list[Publish]:
        """Return the summaries that are ready, each once."""
        ready, self._ready = self._ready, []
        return [Publish(SUMMARIES.topic, 0, summary) for summary in ready]

    def committed(self, outputs: Sequence[Publish]) -> None:
        """Count the records that the role has written."""
        for topic in self._topics or ():
            if topic.name == "control":
                topic.num_written += 1  # others write there, too: about as often
            else:
                topic.num_written += sum(output.topic == topic.name for output in outputs)


class _Summarised:
    """A summarised topic, with the state up to the record that was read back last."""

    def __init__(self, reader: Log, name: str, every: int) -> None:
        self.name = name
        self.num_written = every
        """Records that were written since the last reading, about. The initial value makes the first reading due at
        once, since the number is not known."""
        self._every = every
        self._log = reader
        self._place = TopicPartition(name, 0)
        self._next: int | None = None
        """The offset to be read next; None before the first reading."""
        self._num_since = 0
        """Records in force since the newest summary."""
        self._look_at = every
        """Number of written records at which the next reading is due."""

    def look(self) -> Summary | None:
        """Read back if it is time. Return a summary if the reading has reached the place of one."""
        if self._num_since + self.num_written < self._look_at:
            return None
        if self._next is None and self.name == "control":
            self._next = self._log.rule.begin_control().offset
        elif self._next is None:
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
        """Judge the next record. Return a summary if one belongs at this place."""
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
