"""The first and the newest steps of a run: no more of them in a long run than in a short one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.service.reading import read_to_ends
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log

STEPS = TopicPartition("steps", 0)

FIRST_OFFSETS = 256
"""Offsets at the beginning of `steps` that a glance reads. On Kafka every second offset holds no record."""
NEWEST_OFFSETS = 512
"""Fewest offsets at the end of `steps` that a glance reads."""


@dataclass(frozen=True, slots=True)
class StepsGlance:
    """Where a reader of `steps` starts that needs only the first and the newest. `begin_near_the_end` makes it."""

    positions: dict[TopicPartition, int]
    """Offsets from which the newest steps are read."""
    first: tuple[StepRecord, ...] = ()
    """The first steps, all of them before the positions."""
    starts: tuple[VersionName, ...] = ()
    """Trainers before the positions, in order, each with the version from which it started."""
    newest: VersionName | None = None
    """The version in force at the positions; None if nothing is passed over."""


def begin_near_the_end(log: Log) -> StepsGlance:
    """Read the first steps, and let the rule of `log` begin with a summary near the end of `steps`. In a short run, and
    without a summary, nothing is passed over, and `steps` is read from its beginning."""
    begins, ends = log.transport.admin.begin_offsets("steps"), log.ends("steps")
    log.rule.begin_anew("steps")
    if ends[STEPS] - begins[STEPS] <= FIRST_OFFSETS + NEWEST_OFFSETS:
        return StepsGlance(begins)
    first = list(_first_steps(log, begins[STEPS], begins[STEPS] + FIRST_OFFSETS))
    start = begin_with_summary(log, "steps", behind=NEWEST_OFFSETS)
    if start.summary is None or start.summary.steps is None:
        return StepsGlance(start.positions)
    said, begin = start.summary.steps, start.positions[STEPS]
    return StepsGlance(
        start.positions,
        tuple(step for offset, step in first if offset < begin),
        tuple(
            VersionName(trainer_epoch=run.trainer_epoch, version=run.first - (not run.resumed)) for run in said.versions
        ),
        said.name,
    )


def _first_steps(log: Log, begin: int, end: int) -> Iterator[tuple[int, StepRecord]]:
    """Yield the steps between two offsets, with their offsets."""
    reader = log.transport.reader({STEPS: begin})
    try:
        for records in read_to_ends(log.transport, reader, {STEPS: end}, max_records=FIRST_OFFSETS):
            for record, message in log.rule.messages(records):
                if record.offset < end and isinstance(message, StepRecord):
                    yield record.offset, message
    finally:
        reader.close()
