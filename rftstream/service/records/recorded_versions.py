"""The versions that the headers of `steps` name, whoever wrote them: whether one was made at all."""

from __future__ import annotations

from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.service.reading import read_between
from rftstream.service.records.newest_summaries import newest_summaries
from rftstream.service.records.versions_in_force import VersionsInForce
from rftstream.transport.base import Transport

STEPS = TopicPartition("steps", 0)


class RecordedVersions:
    """The versions on `steps`. RecordsInForce makes it, and asks whether one is there: a run deletes something after
    each checkpoint, and each time it is judged by the steps. It reads on where the last question ended; the first one
    begins with a summary."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._there = VersionsInForce()
        self._end = 0
        """The offset on `steps` below which they were read."""

    def __contains__(self, name: VersionName) -> bool:
        """Return whether the version stands on `steps`, read to its end before the answer is no: a step is there before
        a checkpoint of it is spoken of, and before others see its announcement."""
        for settled in (False, True):  # an open transaction may hide it
            if name not in self._there:
                self._read_on(settled=settled)
        return name in self._there

    def _read_on(self, *, settled: bool) -> None:
        end = self._transport.admin.end_offsets("steps", settled=settled)[STEPS]
        begin = self._transport.admin.begin_offsets("steps")[STEPS]
        if not self._end:
            self._there, self._end = self._summarised(begin, end)
        self._read(self._there, max(self._end, begin), end)
        self._end = max(self._end, end)

    def _summarised(self, begin: int, end: int) -> tuple[VersionsInForce, int]:
        """Return the versions up to a summary, and where that ends; none where the one before does not bear it out."""
        newest = newest_summaries(self._transport, "steps", codec.from_record, below=end)
        if len(newest) == 2 and newest[1][1].through >= begin:
            (_, said), (_, before) = newest
            assert said.steps is not None and before.steps is not None, "they are of steps"
            there = VersionsInForce.of_steps(before.steps)
            self._read(there, before.through, said.through)
            if there.names_the_same(VersionsInForce.of_steps(said.steps)):
                return there, said.through
        return VersionsInForce(), 0

    def _read(self, there: VersionsInForce, start: int, end: int) -> None:
        """Add the versions of some steps that follow what is there."""
        if start >= end:
            return
        for record in read_between(self._transport, {STEPS: start}, {STEPS: end}, bodies=False):
            name = _name_of_headers(record)
            if name is not None and there.why_not(name) is None:
                there.add_name(name)


def _name_of_headers(record: Record) -> VersionName | None:
    epoch, version = record.header("trainer_epoch") or b"", record.header("version") or b""
    is_name = epoch.isdigit() and version.isdigit() and len(epoch) < 20 and len(version) < 20
    return VersionName(trainer_epoch=int(epoch), version=int(version)) if is_name else None
