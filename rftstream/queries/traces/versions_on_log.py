"""Finds the records of single versions on `steps` and `weights`, in a few reads of a log of any length."""

from __future__ import annotations

from functools import cached_property, partial

from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import VersionRun
from rftstream.contracts.versions import VersionName
from rftstream.queries.traces.lineage import header, version_of
from rftstream.service.reading import read_between, search_by_halves
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage

AROUND = 128
"""Offsets on each side of a version that are read with it."""


class VersionsOnLog:
    """The records in force of versions, each with its body. `TraceRecords` makes it, and asks for versions.

    Trainers and their versions are on both topics in order, so that a search by halves finds the place of a version.
    The records around it are judged by the rule, which begins with the summary before them. If they do not show that
    the version is there, or that it cannot be, the topic is read from its beginning."""

    def __init__(self, log: Log) -> None:
        """The rule of `log` judges the records."""
        self._log, self._transport = log, log.transport
        self._known: dict[str, dict[VersionName, Record]] = {"steps": {}, "weights": {}}
        """Topic -> the first record of each version that was read."""
        self._whole: set[str] = set()
        """Topics of which all records were read."""

    @cached_property
    def runs(self) -> tuple[VersionRun, ...]:
        """The versions of each trainer on `steps`, in order of the trainers."""
        start = begin_with_summary(self._log, "steps")
        for _ in self._log.rule.messages(self._log.read("steps", start=start.positions)):
            pass  # they only have to be judged
        told = self._log.rule.summary("steps", 0)
        if told is not None and told.steps is not None:
            return told.steps.versions
        self._read_whole("steps")  # a summary would be incomplete
        names: dict[int, list[VersionName]] = {}
        for name in self._known["steps"]:
            names.setdefault(name.trainer_epoch, []).append(name)
        return tuple(
            VersionRun(
                trainer_epoch=epoch,
                first=of_epoch[0].version,
                last=of_epoch[-1].version,
                resumed=header(self._known["steps"][of_epoch[0]], "resumed") is not None,
            )
            for epoch, of_epoch in names.items()
        )

    @cached_property
    def lineage(self) -> Lineage:
        """The versions that the trainers started from."""
        lineage = Lineage()
        for run in self.runs:
            lineage.take(VersionName(trainer_epoch=run.trainer_epoch, version=run.first), resumed=run.resumed)
        return lineage

    def steps_of(self, version: int) -> list[Record]:
        """Return the step of each trainer that has this version, in order of the trainers."""
        names = (VersionName(trainer_epoch=run.trainer_epoch, version=version) for run in self.runs)
        found = (self.find("steps", name) for name in names if name in self)
        return [record for record in found if record is not None]

    def __contains__(self, name: VersionName) -> bool:
        """Return whether a trainer has recorded the version on `steps`."""
        run = self._by_epoch.get(name.trainer_epoch)
        return run is not None and run.first <= name.version <= run.last

    @cached_property
    def _by_epoch(self) -> dict[int, VersionRun]:
        return {run.trainer_epoch: run for run in self.runs}

    def find(self, topic: str, name: VersionName) -> Record | None:
        """Return the first record about a version, or None."""
        known = self._known[topic]
        if name not in known and topic not in self._whole and not self._read_around(topic, name):
            self._read_whole(topic)
        return known.get(name)

    def _read_around(self, topic: str, name: VersionName) -> bool:
        """Read the records around the place of a version. Return whether they show that it is there, or cannot be."""
        admin, place = self._transport.admin, TopicPartition(topic, 0)
        begin, end = admin.begin_offsets(topic)[place], admin.end_offsets(topic)[place]
        is_before = partial(self._is_before, name=name)
        low, high = search_by_halves(self._transport, place, (begin, end), is_before, within=AROUND)
        low, high = max(begin, low - AROUND), min(end, high + AROUND)
        start = begin_with_summary(self._log, topic, behind=end - low).positions
        told = self._keep(topic, start, {place: high})
        orders = [_order(one) for one in told]
        follows = start[place] == begin or min(orders, default=_order(name)) < _order(name)
        precedes = high == end or max(orders, default=_order(name)) > _order(name)
        return name in told or (follows and precedes)

    def _read_whole(self, topic: str) -> None:
        self._log.rule.begin_anew(topic)
        self._known[topic].clear()
        self._keep(topic, self._transport.admin.begin_offsets(topic), self._log.ends(topic))
        self._whole.add(topic)

    def _keep(self, topic: str, start: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> set[VersionName]:
        """Remember the first record in force of each version between these offsets, and return the versions."""
        told = set()
        for record, _ in self._log.rule.messages(read_between(self._transport, start, ends)):
            if (name := version_of(record)) is not None:
                told.add(name)
                self._known[topic].setdefault(name, record)
        return told

    def _is_before(self, record: Record, name: VersionName) -> bool | None:
        """Return whether a record names a version before this one; None if it names none that was recorded."""
        told = version_of(record)
        return None if told is None or told not in self else _order(told) < _order(name)


def _order(name: VersionName) -> tuple[int, int]:
    return name.trainer_epoch, name.version
