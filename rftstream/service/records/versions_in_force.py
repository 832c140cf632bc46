"""The versions on `steps` or on `weights`, and the check whether a version may come next. RecordsInForce uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import KeptVersion, StepsSummary, VersionRun, WeightsSummary
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced
from rftstream.service.reading import read_between
from rftstream.service.records.newest_summaries import newest_summaries
from rftstream.transport.base import Transport

MAX_RUNS = 4096
"""Most trainers that a summary names. A run with more of them writes no summary."""

MAX_ITEMS = 8192
"""Most trainers and kept versions that a summary of `weights` names."""


class VersionsInForce:
    """The versions of a topic and model. RecordsInForce makes one for each, asks `why_not` and `is_ahead` about the
    next version, and calls `add` for each version in force."""

    def __init__(self) -> None:
        self.num_unread = 0
        """Unreadable records of a trainer since the last version. Each of them may be a version."""
        self._first: dict[int, int] = {}
        """Trainer epoch -> its first version."""
        self._newest: dict[int, int] = {}
        """Trainer epoch -> its newest version."""
        self._resumed: set[int] = set()
        """Trainer epochs whose first version is the state that they started from."""
        self._highest = 0
        self._step: tuple[VersionName, int, int, bool] | None = None
        """The newest step of the newest trainer: version, trained groups, trained rollouts, and whether it is the last
        step."""
        self._kept: dict[VersionName, VersionName | None] | None = {}
        """Announced versions whose objects still exist -> their delta's parent. None if this is unknown."""

    @classmethod
    def _of(cls, runs: tuple[VersionRun, ...], model: str) -> VersionsInForce:
        versions = cls()
        for run in runs:
            if run.model == model:
                versions._first[run.trainer_epoch] = run.first
                versions._newest[run.trainer_epoch] = run.last
                versions._resumed |= {run.trainer_epoch} if run.resumed else set()
                versions._highest = max(versions._highest, run.last)
                versions._keep(run)
        return versions

    @classmethod
    def of_steps(cls, summary: StepsSummary) -> VersionsInForce:
        """Return the versions that a summary of `steps` holds."""
        versions = cls._of(summary.versions, "")
        versions._step = (summary.name, summary.trained_groups, summary.trained_rollouts, summary.last)
        return versions

    @classmethod
    def of_weights(cls, summary: WeightsSummary) -> dict[str, VersionsInForce]:
        """Return the versions that a summary of `weights` holds, by model."""
        return {model: cls._of(summary.versions, model) for model in sorted({run.model for run in summary.versions})}

    def _keep(self, run: VersionRun) -> None:
        if self._kept is None or run.kept is None:
            self._kept = None
            return
        for one in run.kept:
            self._kept[VersionName(trainer_epoch=run.trainer_epoch, version=one.version)] = one.parent

    def names_the_same(self, other: VersionsInForce) -> bool:
        """Whether both name the same versions."""
        return (self._first, self._newest) == (other._first, other._newest)

    def __contains__(self, name: VersionName) -> bool:
        """Whether the version is on the topic. Only for topics on which a trainer's versions have no gaps."""
        epoch = name.trainer_epoch
        return epoch in self._first and self._first[epoch] <= name.version <= self._newest[epoch]

    def why_not(self, name: VersionName) -> str | None:
        """Return why the version cannot be the next one, or None."""
        newest = self._newest.get(name.trainer_epoch)
        if newest is not None and name.version == newest:
            return f"version {name.version} of epoch {name.trainer_epoch} stands there already"
        if newest is not None and name.version < newest:
            return f"version {name.version} does not follow version {newest} of the same trainer"
        if self.is_ahead(name):
            before = f"version {self._highest}" if newest is None else f"version {newest} of the same trainer"
            return f"version {name.version} does not follow {before}: versions follow one by one"
        return None

    def is_ahead(self, name: VersionName) -> bool:
        """Return whether versions before this one are missing. The first version on a topic never lacks any."""
        newest = self._newest.get(name.trainer_epoch)
        limit = self._highest if newest is None else newest + 1
        return bool(self._first) and name.version > limit + self.num_unread

    def add(self, message: StepRecord | WeightsAnnounced) -> None:
        """Add a version that is in force."""
        name = message.name
        if isinstance(message, StepRecord) and (
            self._step is None or name.trainer_epoch >= self._step[0].trainer_epoch
        ):
            self._step = (name, message.trained_groups, message.trained_rollouts, message.last)
        if isinstance(message, WeightsAnnounced) and self._kept is not None:
            for gone in message.gone:
                self._kept.pop(gone, None)
            self._kept[name] = message.parent
        if message.resumed and name.trainer_epoch not in self._first:
            self._resumed.add(name.trainer_epoch)
        self.add_name(name)

    def add_name(self, name: VersionName) -> None:
        """Add a version that is in force and of which only the name is known."""
        self._first.setdefault(name.trainer_epoch, name.version)
        self._newest[name.trainer_epoch] = name.version
        self._highest = max(self._highest, name.version)
        self.num_unread = 0

    # ------------------------------------------------------------------------------------------ summaries

    def _runs(self, model: str, kept: Mapping[int, list[KeptVersion]] | None = None) -> tuple[VersionRun, ...] | None:
        if self.num_unread or len(self._first) > MAX_RUNS:
            return None
        return tuple(
            VersionRun(
                trainer_epoch=epoch,
                first=first,
                last=self._newest[epoch],
                resumed=epoch in self._resumed,
                model=model,
                kept=None if kept is None else tuple(kept[epoch]),
            )
            for epoch, first in self._first.items()
        )

    def _kept_by_epoch(self) -> Mapping[int, list[KeptVersion]] | None:
        if self._kept is None:
            return None
        kept: defaultdict[int, list[KeptVersion]] = defaultdict(list)
        for name, parent in self._kept.items():
            kept[name.trainer_epoch].append(KeptVersion(version=name.version, parent=parent))
        return kept

    def steps_summary(self) -> StepsSummary | None:
        """Return the summary of `steps`; None if it would be incomplete."""
        runs = self._runs("")
        if runs is None or self._step is None:
            return None
        name, groups, rollouts, last = self._step
        return StepsSummary(versions=runs, name=name, trained_groups=groups, trained_rollouts=rollouts, last=last)

    @staticmethod
    def weights_summary(by_model: Mapping[str, VersionsInForce]) -> WeightsSummary | None:
        """Return the summary of `weights`; None if it would be incomplete."""
        runs = [there._runs(model, there._kept_by_epoch()) for model, there in sorted(by_model.items())]
        known = [run for some in runs if some is not None for run in some]
        if None in runs or not known or sum(1 + len(run.kept or ()) for run in known) > MAX_ITEMS:
            return None
        return WeightsSummary(versions=tuple(known))


# ------------------------------------------------------------------------------------------
#
# The versions in the headers of `steps`, from any writer, to check whether a version exists at all.


STEPS = TopicPartition("steps", 0)


class RecordedVersions:
    """The versions on `steps`. RecordsInForce makes it, and asks whether a version is on the topic: a run deletes
    something after each checkpoint, and each of these deletions is checked against the steps. Each call reads on from
    the end of the last call. The first call begins with a summary."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._there = VersionsInForce()
        self._end = 0
        """The offset on `steps` below which all records were read."""

    def __contains__(self, name: VersionName) -> bool:
        """Return whether the version is on `steps`. The topic is read to its end before the answer is False, because a
        step is on the log before any record names its checkpoint and before others see its announcement."""
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
        """Return the versions up to a summary, and the offset where the summary ends. Return no versions if the summary
        before it does not confirm it."""
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
        """Add the versions of some steps that directly follow."""
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
