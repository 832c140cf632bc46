"""Reads the history of a run from the records of its trainer and evaluator: steps and evaluations in force, and
restarts of trainers."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rftstream.algorithms.reward_changes import RewardChange, changed_at, comparable_results, find_reward_changes
from rftstream.contracts.control import DesiredState, RunState
from rftstream.contracts.messages import Message
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, StepTotals, VersionName, WeightsAnnounced
from rftstream.queries.curves.coarse import Coarse, begins_of_stages, eras
from rftstream.queries.curves.reward_search import search_reward_changes
from rftstream.queries.curves.setting_changes import SettingChange, find_setting_changes
from rftstream.queries.formatting import duration, plural, rates_text
from rftstream.runs.observer import num_averaged
from rftstream.service.records import steps_glance
from rftstream.service.role import Log
from rftstream.weights.lineage import Lineage

CURVES = ("steps", "evals", "control")
"""Topics that curves are drawn from."""
LONG_WAIT = 10.0
"""Steps that a wait for a batch must outlast to be told, and after which the newest steps say nothing of the next."""
NUM_SMOOTHED = 10
"""Number of steps in the mean beside the last reward."""
RATE_OVER_S = 60.0
"""Seconds that a speed is taken over, where the newest steps took less."""
LEAST_PAUSE_S = 60.0
"""Shortest gap in seconds before a trainer's restart that counts as a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The steps and evaluations in force. `read_history` makes it; plots and status read it."""

    steps: tuple[StepRecord, ...]
    """Steps in force, by version, without the records of trainers' starts. In a glance, only the first and the
    newest."""
    resumes: tuple[StepRecord, ...]
    """Records of trainers that took over from an earlier one, in the order of the log."""
    evaluations: tuple[EvalResult, ...]
    """Results for versions in force, by version. For each evaluation and version, only the newest is kept."""
    current: StepRecord | None
    """The newest record in force; None before the first."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Beginnings and ends of the times without a trainer at work: those of `asked_pauses`, and, judged by the trainer's
    records, before a resume, if longer than between any two steps."""
    asked_pauses: tuple[tuple[float, float], ...] = ()
    """Beginnings and ends of the pauses that somebody asked for, without the work in flight. One that goes on is left
    out."""

    passed_over: int = 0
    """Number of steps in force that are not in `steps`."""
    reward_changes: tuple[RewardChange, ...] = ()
    """Tasksets that another reward scores since some version, in order of versions."""
    setting_changes: tuple[SettingChange, ...] = ()
    """Settings that `resume` changed, in order of versions."""
    reached: int = 0
    """The newest version that any trainer had made: above `version` while batches are trained again."""

    def speed_texts(self, waits_at: float | None = None) -> list[str]:
        """Return what the trainer did in the newest steps, as one sentence; nothing where no step tells. `waits_at`:
        the time now if the trainer has no batch, which is told if it lasts far longer than a step."""
        newest = [step.metrics for step in self.steps[-NUM_SMOOTHED:]]
        waited, trained, published = (
            sum(max(0.0, metrics.get(name, 0.0)) for metrics in newest) for name in ("wait_s", "step_s", "publish_s")
        )
        if not (all_s := waited + trained + published):
            return []
        parts = f"waits for batches {waited / all_s:.0%} of its time, trains {trained / all_s:.0%}"
        text = f"the trainer {parts}, publishes {published / all_s:.0%} (last {plural(len(newest), 'step')})"
        if waits_at is not None and (idle_s := waits_at - self.steps[-1].recorded_at) > LONG_WAIT * all_s / len(newest):
            text += f"; now it has had no batch for {duration(idle_s)}"
        steps, seconds = self._newest()
        return [text, *rates_text([step.metrics for step in steps[1:]], seconds)]

    def _newest(self) -> tuple[list[StepRecord], float]:
        """Return the steps of the last minute, or the newest ones if they took longer, and their seconds of work."""
        if not self.steps:
            return [], 0.0
        steps = self.steps[self._end_of_gap() :]
        since = steps[-1].recorded_at - RATE_OVER_S
        newest = [step for step in steps[:-NUM_SMOOTHED] if step.recorded_at >= since]
        newest += steps[-NUM_SMOOTHED:]
        return newest, self.at_work_s(newest[-1].recorded_at) - self.at_work_s(newest[0].recorded_at)

    def _end_of_gap(self) -> int:
        """Return the place of the first step behind those that a glance passes over."""
        versions = [step.name.version for step in self.steps] if self.passed_over else []
        places = range(len(versions) - 1, 0, -1)
        return next((place for place in places if versions[place] != versions[place - 1] + 1), 0)

    def seconds_left(self, num_steps: int | None, now: float) -> float | None:
        """Estimate the seconds until `num_steps` are done, by the newest steps; None if unknown, or if the step in
        progress takes far longer than these."""
        newest, spent_s = self._newest()
        if num_steps is None or len(newest) < 2 or self.again:
            return None
        mean_s = spent_s / (newest[-1].name.version - newest[0].name.version)
        is_moving = self.at_work_s(now) - self.at_work_s(newest[-1].recorded_at) <= LONG_WAIT * mean_s
        return max(0, num_steps - self.version) * mean_s if spent_s and is_moving else None

    @property
    def num_steps(self) -> int:
        """Return how many steps are in force."""
        return len(self.steps) + self.passed_over

    @property
    def metrics(self) -> list[tuple[int, Mapping[str, float]]]:
        """Return version and metrics of each step."""
        return [(step.name.version, step.metrics) for step in self.steps]

    @property
    def _totals(self) -> StepTotals | None:
        return None if self.current is None else self.current.totals

    @property
    def version(self) -> int:
        """Return the version in force; 0 before the first record."""
        return 0 if self.current is None else self.current.name.version

    @property
    def again(self) -> str:
        """Return words about the batches that are trained again; empty if there are none."""
        return f"batches up to version {self.reached:,} are trained again" if self.reached > self.version else ""

    def at_work_s(self, at: float) -> float:
        """Return a clock time minus the pauses before it. Differences between such times are seconds of work."""
        return at - sum(min(at, end) - begin for begin, end in self.pauses if begin < at)

    def spent(self) -> dict[str, float]:
        """Return the cost of the verdicts of all batches, by kind such as `requests`."""
        return self._summed().spent

    def staleness(self) -> tuple[list[int], list[int]]:
        """Return how many tokens, and how many groups, were trained at each staleness, over all steps."""
        totals = self._summed()
        return list(totals.token_staleness), list(totals.group_staleness)

    def _summed(self) -> StepTotals:
        totals = self._totals
        if totals is None:
            totals = StepTotals()
            for step in self.steps:
                totals = totals.plus(step.metrics, step.token_staleness, step.group_staleness)
        return totals

    @property
    def changed_at(self) -> int:
        """Return the version since which the rewards of steps compare; 0 if the reward never changed."""
        return changed_at(self.reward_changes)

    @property
    def since_change(self) -> str:
        """Return words that say since when the rewards compare; empty if the reward never changed."""
        return f" since it changed at version {self.changed_at:,}" if self.changed_at else ""

    def comparable(self) -> History:
        """Return the history since the reward changed last, whose rewards compare, with the results of each evaluation
        by its newest scorer."""
        since = self.changed_at
        results = [one for some in comparable_results(self.evaluations).values() for one in some]
        return replace(
            self,
            steps=tuple(step for step in self.steps if step.name.version >= since),
            evaluations=tuple(sorted(results, key=lambda one: (one.name.version, one.evaluation))),
        )

    def rewards(self) -> list[float]:
        """Return the rewards of the steps that have one, since the reward changed last."""
        since = self.changed_at
        rewards = (step.metrics.get("reward", math.nan) for step in self.steps if step.name.version >= since)
        return [reward for reward in rewards if math.isfinite(reward)]

    def reward_ends(self) -> tuple[float, float, int]:
        """Return the first and the last mean reward since the reward changed last, as the end of a run tells them, and
        the number of steps in each; `rewards` may not be empty."""
        since = self.changed_at
        rewards, count = self.rewards(), num_averaged(self.version - since + 1 if since else self.num_steps)
        first, last = rewards[:count], rewards[-count:]
        return sum(first) / len(first), sum(last) / len(last), len(last)


class HistoryReader:
    """Reads steps and evaluations of a log, and then only new records. Use it to show a run repeatedly, and
    `read_history` to show it once. One thread calls `read`; any thread may call the other methods.

    It keeps every step and every evaluation in memory: some kilobytes for each version.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._next: dict[str, dict[TopicPartition, int]] = {topic: {} for topic in (*CURVES, "weights")}
        self.steps: list[tuple[float, StepRecord]] = []
        """Log time in seconds and record, in the order of the log; records no longer in force are included."""
        self._evaluations: list[tuple[float, EvalResult]] = []
        self._states: list[tuple[float, RunState]] = []
        self.announced: dict[VersionName, WeightsAnnounced] = {}
        """The announcements of versions; those no longer in force are included."""
        self.newest_version = 0
        """The newest version of any trainer."""
        self._fold = _Fold()
        self._now = self._fold.history()
        self._coarse = CoarseHistory()

    def read(self, topics: Sequence[str] = (*CURVES, "weights")) -> bool:
        """Read the records since the last call. Return whether there were any."""
        found = False
        for topic in topics:
            start = self._next[topic]
            ends = self._log.ends(topic)
            if all(start.get(place, 0) >= end for place, end in ends.items()):
                continue
            found = True
            for record, message in self._log.rule.messages(self._log.read(topic, start=start)):
                start[record.place] = max(start.get(record.place, 0), record.offset + 1)
                self._take(record.timestamp_s, message)
            for place, end in ends.items():
                start[place] = max(start.get(place, 0), end)
        if found:
            self._now = self._fold.history()
        return found

    def _take(self, at: float, message: Message | None) -> None:
        if isinstance(message, StepRecord):
            self.steps.append((at, message))
            self._fold.add(message)
            self.newest_version = max(self.newest_version, 0 if message.resumed else message.name.version)
        elif isinstance(message, EvalResult):
            self._evaluations.append((at, message))
            self._fold.add_result(message)
        elif isinstance(message, RunState):
            self._states.append((at, message))
            self._fold.add_state(message)
        elif isinstance(message, WeightsAnnounced):
            self.announced.setdefault(message.name, message)

    def history(self, until_s: float = math.inf) -> History:
        """Return the history at a log time, by default now."""
        if math.isinf(until_s):
            return self._now
        return _fold(
            [step for at, step in self.steps if at <= until_s],
            [result for at, result in self._evaluations if at <= until_s],
            [state for at, state in self._states if at <= until_s],
        )

    def charted(self, until_s: float = math.inf) -> History:
        """Return the history for curves: in a long run, each step is the mean of several."""
        return self._coarse.of(self._now) if math.isinf(until_s) else CoarseHistory().of(self.history(until_s))

    def glance(self, until_s: float = math.inf) -> History:
        """Return the history with only the first and the newest steps."""
        found = self.history(until_s)
        first, newest = steps_glance.FIRST_OFFSETS, steps_glance.NEWEST_OFFSETS
        if len(found.steps) <= first + newest:
            return found
        return replace(
            found,
            steps=found.steps[:first] + found.steps[-newest:],
            passed_over=len(found.steps) - first - newest,
        )


def read_history(log: Log) -> History:
    """Read the history of a run from its log."""
    reader = HistoryReader(log)
    reader.read(CURVES)
    return reader.history()


def read_glance(log: Log) -> History:
    """Read the first and the newest steps of a run, and all its evaluations. Read all steps if there is no summary, or
    if the steps do not hold totals of those before."""
    start = steps_glance.begin_near_the_end(log)
    if start.newest is None:
        return read_history(log)
    newest = [message for _, message in log.rule.messages(log.read("steps", start=start.positions))]
    steps: list[StepRecord | VersionName] = [*start.first, *start.starts]
    steps += [step for step in newest if isinstance(step, StepRecord)]
    results = [result for _, result in log.in_force("evals") if isinstance(result, EvalResult)]
    states = [state for _, state in log.rule.messages(log.read("control")) if isinstance(state, RunState)]
    found = _fold(steps, results, states)
    totals = None if found.current is None else found.current.totals
    if totals is None:
        return read_history(log)
    changes = search_reward_changes(log) if found.reward_changes else ()
    return replace(found, passed_over=totals.steps - len(found.steps), reward_changes=changes or found.reward_changes)


def _fold(
    records: Iterable[StepRecord | VersionName], evaluations: Iterable[EvalResult], states: Iterable[RunState]
) -> History:
    """Return the part of these records that is in force. The arguments are in the order of the log."""
    fold = _Fold()
    for step in records:
        fold.add(step)
    for result in evaluations:
        fold.add_result(result)
    for state in states:
        fold.add_state(state)
    return fold.history()


class _Fold:
    """The steps and results in force among the records so far. Its owner calls `add` and `add_result` in the order of
    the log, and `history` at any time."""

    def __init__(self) -> None:
        self._lineage = Lineage()
        self._steps: dict[int, StepRecord] = {}
        self._resumes: list[StepRecord] = []
        self._starts: dict[int, StepRecord] = {}
        self._results: dict[tuple[int, str], EvalResult] = {}
        self._current: StepRecord | None = None
        self._gaps: list[tuple[float, float]] = []
        self._longest_s = LEAST_PAUSE_S
        self._reached = 0
        self._asked: list[tuple[float, float]] = []
        self._paused_at: float | None = None

    def add(self, message: StepRecord | VersionName) -> None:
        """Add a step. A VersionName stands for the start of a trainer of which nothing else is known."""
        if isinstance(message, VersionName):
            self._start(message, resumed=True)
            return
        if not self._lineage.accepts(message.name.trainer_epoch):
            return
        before, self._current = self._current, message
        if not message.resumed:
            self._start(message.name, resumed=False)
            self._steps[message.name.version] = message
            self._reached = max(self._reached, message.name.version)
            if before is not None:
                self._longest_s = max(self._longest_s, message.recorded_at - before.recorded_at)
            return
        self._starts[message.name.trainer_epoch] = message
        if self._lineage.epoch:
            self._resumes.append(message)
        if before is not None:
            self._gaps.append((before.recorded_at, message.recorded_at))
        self._start(message.name, resumed=True)

    def _start(self, name: VersionName, *, resumed: bool) -> None:
        if name.trainer_epoch <= self._lineage.epoch:
            return
        self._lineage.take(name, resumed=resumed)
        in_force = self._lineage.in_force
        self._steps = {version: step for version, step in self._steps.items() if in_force(step.name)}
        self._results = {key: result for key, result in self._results.items() if in_force(result.name)}

    def add_result(self, result: EvalResult) -> None:
        """Add the result of an evaluation."""
        if self._lineage.in_force(result.name):
            self._results[result.name.version, result.evaluation] = result

    def add_state(self, state: RunState) -> None:
        """Add what the run was asked to be."""
        if state.state is DesiredState.paused:
            self._paused_at = state.since if self._paused_at is None else self._paused_at
        elif self._paused_at is not None:
            self._asked.append((self._paused_at, state.since))
            self._paused_at = None

    def _asked_pauses(self, steps: Sequence[StepRecord]) -> tuple[tuple[float, float], ...]:
        """Return the pauses after the first step, each from its last step on: what was in flight is finished first."""
        times = [step.recorded_at for step in steps]
        found: list[tuple[float, float]] = []
        for begin, end in self._asked:
            if before := times[: bisect_right(times, end)]:
                found.append((max(begin, before[-1]), end))
        return tuple((begin, end) for begin, end in found if begin < end)

    def history(self) -> History:
        """Return the history in force now."""
        steps = tuple(self._steps[version] for version in sorted(self._steps))
        asked = self._asked_pauses(steps)
        gaps = [(begin, end) for begin, end in self._gaps if end - begin > self._longest_s]
        epochs = {step.name.trainer_epoch for step in (*steps, *((self._current,) if self._current else ()))}
        return History(
            steps=steps,
            reward_changes=find_reward_changes((step.name.version, step.scorers) for step in steps),
            setting_changes=find_setting_changes(
                self._starts[epoch] for epoch in sorted(epochs) if epoch in self._starts
            ),
            resumes=tuple(self._resumes),
            evaluations=tuple(self._results[key] for key in sorted(self._results)),
            current=self._current,
            pauses=_united([*gaps, *asked]),
            asked_pauses=asked,
            reached=self._reached,
        )


def _united(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return what these spans cover, in spans that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


class CoarseHistory:
    """A history with at most MAX_CHARTED steps. HistoryReader makes it and calls `of` for each new history. Earlier
    merges are not repeated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: tuple[History, History] | None = None
        self._steps: Coarse[StepRecord] = Coarse()
        self._results: dict[str, Coarse[EvalResult]] = {}

    def of(self, history: History) -> History:
        """Return the history with merged steps and results, each the mean of its neighbours."""
        with self._lock:
            if self._of is None or self._of[0] is not history:
                self._of = history, self._made(history)
            return self._of[1]

    def _made(self, history: History) -> History:
        results: dict[str, list[EvalResult]] = {}
        for result in history.evaluations:
            results.setdefault(result.evaluation, []).append(result)
        settings = {change.version + 1 for change in history.setting_changes}
        coarse: list[EvalResult] = []
        for name, some in results.items():
            scored = [(one.name.version, {name: one.scored_by} if one.scored_by else {}) for one in some]
            begins = settings | {change.version for change in find_reward_changes(scored)}
            coarse += self._results.setdefault(name, Coarse()).through(tuple(some), eras(some, begins))
        begins = settings | {change.version for change in history.reward_changes} | begins_of_stages(history.steps)
        return replace(
            history,
            steps=tuple(self._steps.through(history.steps, eras(history.steps, begins))),
            evaluations=tuple(sorted(coarse, key=lambda one: (one.name.version, one.evaluation))),
        )
