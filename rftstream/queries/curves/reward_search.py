"""Finds the changes of the reward in a long run whose steps are not all read: by halves, in few records of `steps`."""

from __future__ import annotations

from rftstream.algorithms.reward_changes import RewardChange, differs
from rftstream.contracts.versions import StepRecord
from rftstream.queries.decoding import decoded
from rftstream.service.reading import read_between
from rftstream.service.records.steps_glance import STEPS
from rftstream.service.role import Log

LOOKED_AT = 8
"""Records that are read at each place: some are of starts of trainers, or of replaced ones, or name other tasksets."""

Scored = dict[str, tuple[str, int]]
"""Taskset -> name and version of its scorer, and the version of the step that says so."""


def search_reward_changes(log: Log) -> tuple[RewardChange, ...]:
    """Return the changes on `steps`, in order of versions. A change that was taken back before its steps were passed
    over is not found."""
    begin, end = log.transport.admin.begin_offsets("steps")[STEPS], log.ends("steps")[STEPS]
    oldest, newest = _scored_at(log, begin, end), _scored_at(log, max(begin, end - LOOKED_AT), end)
    found: list[RewardChange] = []
    for taskset, (scorer, version) in newest.items():
        stop = end
        while taskset in oldest and oldest[taskset][0] != scorer:
            change, stop = _change_to(log, range(begin, stop), taskset, (scorer, version), oldest[taskset][0])
            if differs(change.before, change.after):
                found.append(change)
            scorer, version = change.before, change.version
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


def _scored_at(log: Log, begin: int, end: int) -> Scored:
    """Return who scored the first step of each taskset, among the next LOOKED_AT records."""
    found: Scored = {}
    for record in read_between(log.transport, {STEPS: begin}, {STEPS: min(end, begin + LOOKED_AT)}):
        step = decoded(record, StepRecord)
        if step is not None:
            for taskset, scorer in step.scorers.items():
                found.setdefault(taskset, (scorer, step.name.version))
    return found
