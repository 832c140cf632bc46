"""Reads a run's records of its own training: the steps in force, and the settings of each of its trainers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ConfigError, ContractError, PositionMissing
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.recorded_batches import RecordedBatches
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage


@dataclass(slots=True)
class Recorded:
    """The records of a run's training that are in force, without those of a replaced trainer. `read_recorded` makes
    it."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    """Version -> the step that made it."""
    anchors: dict[int, StepRecord] = field(default_factory=dict)
    """Trainer epoch -> the record of its trainer's start."""
    lineage: Lineage = field(default_factory=Lineage)
    """The versions that the trainers started from. They decide which versions are in force."""

    @property
    def version(self) -> int:
        """Return the newest version in force; 0 before the first step."""
        return max(self.steps, default=0)

    def in_force(self, name: VersionName) -> bool:
        """Return whether a checkpoint of this version counts."""
        step = self.steps.get(name.version)
        known = name.version == 0 or (step is not None and step.name == name) or self._starts_at(name)
        return known and self.lineage.in_force(name)

    def _starts_at(self, name: VersionName) -> bool:
        anchor = self.anchors.get(name.trainer_epoch)
        return anchor is not None and anchor.name == name

    def epoch_of(self, version: int) -> int:
        """Return the epoch of the trainer that made the version. If the version has no recorded step, return the newest
        epoch that began below it, or 0."""
        if version in self.steps:
            return self.steps[version].name.trainer_epoch
        return max((epoch for epoch, one in self.anchors.items() if one.name.version < version), default=0)

    def digests(self, version: int) -> list[tuple[VersionName, str]]:
        """Return the digests of a version's weights, with the full name, from each record in force that has one."""
        found = [self.steps[version]] if version in self.steps else []
        found += [anchor for anchor in self.anchors.values() if anchor.name.version == version]
        return [
            (one.name, one.weights_digest)
            for one in found
            if one.weights_digest is not None and self.lineage.in_force(one.name)
        ]


def read_recorded(log: Log) -> Recorded:
    """Read `steps` and return the records in force."""
    recorded = Recorded()
    for _, message in log.in_force("steps"):
        if not isinstance(message, StepRecord) or not recorded.lineage.take(message.name, resumed=message.resumed):
            continue
        if message.resumed:
            recorded.anchors.setdefault(message.name.trainer_epoch, message)
        else:
            recorded.steps[message.name.version] = message
    recorded.steps = {version: one for version, one in recorded.steps.items() if recorded.lineage.in_force(one.name)}
    return recorded


def next_batch(batches: RecordedBatches) -> tuple[Batch | None, str]:
    """Return the next of the recorded batches; or None with the reason, if none can be trained."""
    try:
        return batches.next(), "the end of the log"
    except (ContractError, PositionMissing) as error:
        return None, str(error)


def settings_of(anchor: StepRecord | None, now: RunConfig) -> RunConfig:
    """Return the settings of a trainer, with the paths that the run has here. Return `now` if they were not recorded.
    ConfigError if this version of rftstream cannot read them."""
    if anchor is None or not anchor.config:
        return now
    try:
        then = loader.from_toml(anchor.config)
    except ConfigError as error:
        raise ConfigError(
            f"steps: the settings of trainer epoch {anchor.name.trainer_epoch} are not a config of this rftstream: "
            f"{error}; replay with the version that made the run"
        ) from None
    return dataclasses.replace(then, model=now.model, weights=now.weights, transport=now.transport, base=now.base)
