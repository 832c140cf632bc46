"""Where training stands, by the steps that are in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rftstream.contracts.records import Record
from rftstream.contracts.versions import StepRecord
from rftstream.queries.audits.rows import headers_of, twin_key
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True)
class TrainingInForce:
    """Where training stands: the last record of the newest trainer."""

    trainer_epoch: int = 0
    version: int = 0
    trained_groups: int = 0


def follow_training(log: Log) -> Iterator[tuple[Record, TrainingInForce]]:
    """Yield each step in force, with where training stands then. A newer trainer that starts from version b takes what
    older ones wrote beyond b out of force."""
    newest = TrainingInForce()
    for record, step in log.in_force("steps"):
        if twin_key("steps", headers_of(record)) is None or not isinstance(step, StepRecord):
            continue
        if step.name.trainer_epoch >= newest.trainer_epoch:
            newest = TrainingInForce(step.name.trainer_epoch, step.name.version, step.trained_groups)
        yield record, newest
