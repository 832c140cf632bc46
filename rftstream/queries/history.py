"""Reads a run as its trainer and evaluator recorded it: steps and evaluations in force, and where trainers started
anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage

NUM_SMOOTHED = 10
"""How many steps the mean beside the last reward covers."""
LEAST_PAUSE_S = 60.0
"""Shortest time in seconds before a trainer's new start that counts as a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The steps and evaluations in force. `read_history` makes it; plots and status read it."""

    steps: tuple[StepRecord, ...]
    """Steps in force, by version, without the records that say that a trainer started."""
    resumes: tuple[StepRecord, ...]
    """Records of trainers that took over from an earlier one, in the order of the log."""
    evaluations: tuple[EvalResult, ...]
    """Results for versions in force, by version. Only the newest of each evaluation and version is kept."""
    current: StepRecord | None
    """The newest record in force; None before the first."""
    pauses: tuple[tuple[float, float], ...] = ()
    """From when to when no trainer was at work, as far as its records tell: before a resume, for longer than between
    any two steps."""

    @property
    def version(self) -> int:
        """Return the version in force; 0 before the first record."""
        return 0 if self.current is None else self.current.name.version

    def at_work_s(self, at: float) -> float:
        """Return a clock time without the pauses before it. Differences of such times are seconds of work."""
        return at - sum(min(at, end) - begin for begin, end in self.pauses if begin < at)

    def spent(self) -> dict[str, float]:
        """Return what the verdicts of all batches cost, by kind such as `requests`."""
        amounts: dict[str, float] = {}
        for step in self.steps:
            for name, value in step.metrics.items():
                if name.startswith("spent/"):
                    kind = name.removeprefix("spent/")
                    amounts[kind] = amounts.get(kind, 0.0) + value
        return amounts

    def staleness(self) -> tuple[list[int], list[int]]:
        """Return how many tokens, and how many groups, all steps trained at each staleness."""
        return (
            [sum(column) for column in zip_longest(*(step.token_staleness for step in self.steps), fillvalue=0)],
            [sum(column) for column in zip_longest(*(step.group_staleness for step in self.steps), fillvalue=0)],
        )

    def rewards(self) -> list[float]:
        """Return the rewards of the steps that have one."""
        return [step.metrics["reward"] for step in self.steps if "reward" in step.metrics]


class HistoryReader:
    """Reads steps and evaluations of a log, and goes on with what has come since. Who shows a run again and again makes
    one; `read_history` is for a single look.

    It keeps every step and every evaluation in memory: some kilobytes for each version."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._next: dict[str, dict[TopicPartition, int]] = {"steps": {}, "evals": {}, "weights": {}}
        self.steps: list[tuple[float, StepRecord]] = []
        """Log time in seconds and record, in the order of the log; also those that are out of force by now."""
        self._evaluations: list[tuple[float, EvalResult]] = []
        self.announced: dict[VersionName, WeightsAnnounced] = {}
        """The announcements of versions, also of those that are out of force."""

    def read(self, topics: Sequence[str] = ("steps", "evals", "weights")) -> bool:
        """Read what has come since the last call. Return whether there was anything."""
        found = False
        for topic in topics:
            start = self._next[topic]
            ends = self._log.ends(topic)
            if all(start.get(place, 0) >= end for place, end in ends.items()):
                continue
            found = True
            for record, message in self._log.rule.messages(self._log.read(topic, start=start)):
                start[record.place] = max(start.get(record.place, 0), record.offset + 1)
                if isinstance(message, StepRecord):
                    self.steps.append((record.timestamp_s, message))
                elif isinstance(message, EvalResult):
                    self._evaluations.append((record.timestamp_s, message))
                elif isinstance(message, WeightsAnnounced):
                    self.announced.setdefault(message.name, message)
            for place, end in ends.items():
                start[place] = max(start.get(place, 0), end)
        return found

    def history(self, until_s: float = math.inf) -> History:
        """Return the history as it was at a log time, by default as it is now."""
        return _fold(
            [step for at, step in self.steps if at <= until_s],
            [result for at, result in self._evaluations if at <= until_s],
        )


def read_history(log: Log) -> History:
    """Read the history of a run from its log."""
    reader = HistoryReader(log)
    reader.read(("steps", "evals"))
    return reader.history()


def _fold(records: Sequence[StepRecord], evaluations: Sequence[EvalResult]) -> History:
    """Return what of these is in force. Both are in the order of the log."""
    lineage = Lineage()
    found: list[StepRecord] = []
    resumes: list[StepRecord] = []
    current: StepRecord | None = None
    gaps: list[tuple[float, float]] = []
    longest_s = LEAST_PAUSE_S
    for message in records:
        if not lineage.accepts(message.name.trainer_epoch):
            continue
        before, current = current, message
        if message.resumed:
            if lineage.epoch:
                resumes.append(message)
            if before is not None:
                gaps.append((before.recorded_at, message.recorded_at))
            if message.name.trainer_epoch > lineage.epoch:
                lineage.start(message.name)
        else:
            found.append(message)
            if before is not None:
                longest_s = max(longest_s, message.recorded_at - before.recorded_at)
    results = {
        (result.name.version, result.evaluation): result for result in evaluations if lineage.in_force(result.name)
    }
    steps = {step.name.version: step for step in found if lineage.in_force(step.name)}
    return History(
        steps=tuple(steps[version] for version in sorted(steps)),
        resumes=tuple(resumes),
        evaluations=tuple(results[key] for key in sorted(results)),
        current=current,
        pauses=tuple((begin, end) for begin, end in gaps if end - begin > longest_s),
    )
