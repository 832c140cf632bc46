"""Finds the changes of the reward in a long run whose steps are not all read: by halves, in few records of `steps`."""

from __future__ import annotations

from rftstream.algorithms.reward_changes import RewardChange, differs, find_reward_changes
from rftstream.contracts.versions import StepRecord
from rftstream.queries.decoding import decoded
from rftstream.service.reading import read_between
from rftstream.service.records.steps_glance import STEPS
from rftstream.service.role import Log

LOOKED_AT = 8
"""Records that are read at each place: some are of starts of trainers, or of replaced ones, or name other tasksets."""
NEAR = 64
"""Records without a change before and after those that are found: rewards of two hosts that score in turns change every
few steps."""

Scored = dict[str, tuple[str, int]]
"""Taskset -> name and version of its scorer, and the version of the step that says so."""


def search_reward_changes(log: Log) -> tuple[RewardChange, ...]:
    """Return the changes on `steps`, in order of versions. A change that was taken back before its steps were passed
    over is not found if no other is near it."""
    begin, end = log.transport.admin.begin_offsets("steps")[STEPS], log.ends("steps")[STEPS]
    oldest, newest = _scored_at(log, begin, end), _scored_at(log, max(begin, end - LOOKED_AT), end)
    found: list[RewardChange] = []
    for taskset, (scorer, version) in newest.items():
        stop = end
        while stop > begin and taskset in oldest and oldest[taskset][0] != scorer:
            offsets = range(begin, stop)
            change, place = _change_to(log, offsets, taskset, (scorer, version), oldest[taskset][0])
            changes, (scorer, version), stop = _changes_near(log, offsets, place, change)
            found += changes
    return tuple(sorted(found, key=lambda change: change.version))


def _change_to(
    log: Log, offsets: range, taskset: str, newest: tuple[str, int], oldest: str
) -> tuple[RewardChange, int]:
    """Return the change to the scorer at the end of the offsets, and an offset before which there may be another one.
    Places without the taskset count as the newest one's."""
    (scorer, version), before = newest, oldest
    low, high = offsets.start, offsets.stop
    while low < high:
        middle = (low + high) // 2
        there, made = _scored_at(log, middle, high).get(taskset, (scorer, version))
        if there == scorer:
            high, version = middle, made
        else:
            low, before = middle + 1, there
    return RewardChange(taskset=taskset, before=before, after=scorer, version=version), low


def _changes_near(
    log: Log, offsets: range, place: int, change: RewardChange
) -> tuple[tuple[RewardChange, ...], tuple[str, int], int]:
    """Return the change at an offset with all of its taskset that are near it; scorer and version of the first step
    that was looked at; and the offset before which there may be others. Halving finds any one of the changes of two
    rewards that score in turns."""
    near = NEAR
    while True:
        low, high = max(offsets.start, place - near), min(offsets.stop, place + near)
        scored = _scored_between(log, low, high, change.taskset)
        changes = find_reward_changes((version, {change.taskset: scorer}) for _, version, scorer in scored)
        if not changes:
            changes = (change,) if differs(change.before, change.after) else ()
            return changes, (change.before, change.version), place
        at = {version: offset for offset, version, _ in scored}
        first, last = at[changes[0].version], at[changes[-1].version]
        if low <= max(offsets.start, first - NEAR) and high >= min(offsets.stop, last + NEAR):
            return changes, (scored[0][2], scored[0][1]), low
        near *= 2


def _scored_between(log: Log, begin: int, end: int, taskset: str) -> list[tuple[int, int, str]]:
    """Return offset, version and scorer of the steps of a taskset, without those that were trained again."""
    found: list[tuple[int, int, str]] = []
    for record in read_between(log.transport, {STEPS: begin}, {STEPS: end}):
        step = decoded(record, StepRecord)
        if step is None:
            continue
        while found and found[-1][1] + (not step.resumed) > step.name.version:
            found.pop()
        if taskset in step.scorers:
            found.append((record.offset, step.name.version, step.scorers[taskset]))
    return found


def _scored_at(log: Log, begin: int, end: int) -> Scored:
    """Return who scored the first step of each taskset, among the next LOOKED_AT records."""
    found: Scored = {}
    for record in read_between(log.transport, {STEPS: begin}, {STEPS: min(end, begin + LOOKED_AT)}):
        step = decoded(record, StepRecord)
        if step is not None:
            for taskset, scorer in step.scorers.items():
                found.setdefault(taskset, (scorer, step.name.version))
    return found
