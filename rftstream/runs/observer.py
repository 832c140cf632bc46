"""The state of a run from its log: its progress, its rewards, and the messages on `control`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from rftstream.algorithms.reward_changes import by_newest_scorer, changed_at, find_reward_changes
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.service.control_view import ControlView
from rftstream.service.reading import read_to_ends
from rftstream.service.records.in_force import CONTROL, RecordsInForce
from rftstream.service.records.steps_glance import begin_near_the_end
from rftstream.service.role import Log
from rftstream.transport.base import Reader, Transport
from rftstream.weights.lineage import Lineage

OBSERVED = ("steps", "evals", "control")

RECENT_STEPS, FIRST_STEPS = 512, 100
"""Steps that are kept, the newest and the first."""
MOST_AVERAGED = 100
"""Most steps whose rewards `reward_first` and `reward_last` average."""


class Curve:
    """The first and the newest of the steps in force. An `Observer` makes it and passes each step to `absorb`. If steps
    are left out, it calls `pass_over` in between."""

    def __init__(self) -> None:
        self.version = 0
        """The newest version in force; 0 before the first record."""
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        """The newest steps in force, in order of versions."""
        self.settings = ""
        """Settings that the newest trainer wrote at its start, as TOML; "" if its record was left out."""
        self.trainer_epoch = 0
        """Epoch of the newest trainer that has written a step; 0 before the first record."""
        self._first: list[StepRecord] = []
        """The first steps in force that have a reward: a stage before may have trained demonstrations alone."""
        self._whole_to: int | None = None
        """The version up to which no step was left out; None before the first record."""
        self._lineage = Lineage()
        self._base: int | None = None
        """The version before the first step; None before the first record."""

    def pass_over(self, starts: Sequence[VersionName], newest: VersionName) -> None:
        """Leave out the steps up to `newest`, the version in force behind them. `starts` are the trainers so far, each
        with the version from which it started."""
        for start in starts:
            self._begin(start, resumed=True)
        self.version = newest.version

    def absorb(self, step: StepRecord) -> bool:
        """Add a step record. Return whether it is a newly trained step in force."""
        if not self._begin(step.name, resumed=step.resumed):
            return False
        assert self._whole_to is not None
        self.version, self.trainer_epoch = step.name.version, step.name.trainer_epoch
        if step.resumed:
            self.settings = step.config or self.settings
            return False
        self.recent.append(step)
        if self.version == self._whole_to + 1:
            self._whole_to = self.version
            if len(self._first) < FIRST_STEPS and _rewards([step]):
                self._first.append(step)
        return True

    def in_force(self, name: VersionName) -> bool:
        """Return False for a version that a later trainer has put out of force."""
        return self._lineage.in_force(name)

    def _begin(self, name: VersionName, *, resumed: bool) -> bool:
        """Drop the steps that a newer trainer puts out of force. Return False for a record of a replaced trainer."""
        epoch_before, start = self._lineage.epoch, name.version - (not resumed)
        if not self._lineage.take(name, resumed=resumed):
            return False
        if self._base is None:
            self._base = self._whole_to = start
        if self._lineage.epoch > epoch_before:
            assert self._whole_to is not None
            self._whole_to = min(self._whole_to, start)
            for kept in (self.recent, self._first):
                while kept and kept[-1].name.version > start:
                    kept.pop()
        return True

    @property
    def num_steps(self) -> int:
        """Return how many steps are in force: versions follow one by one."""
        return max(0, self.version - (self._base or 0))

    @property
    def last(self) -> StepRecord | None:
        """Return the newest step, or None."""
        return next(reversed(self.steps()), None)

    def steps(self) -> list[StepRecord]:
        """Return the kept steps, in order of versions: the first and the newest, and in a short run all."""
        newest = self.recent[0].name.version if self.recent else math.inf
        return [*(step for step in self._first if step.name.version < newest), *self.recent]

    @property
    def changed_at(self) -> int:
        """Return the version since which another reward scores; 0 if the reward never changed."""
        return changed_at(find_reward_changes((step.name.version, step.scorers) for step in self.steps()))

    def rewards(self) -> list[float]:
        """Return the rewards of the kept steps that have one, in order of versions, since the reward changed last."""
        since = self.changed_at
        return _rewards(step for step in self.steps() if step.name.version >= since)

    def reward_first(self) -> float | None:
        """Return the mean reward of the first tenth of the steps, of at most MOST_AVERAGED. None without a reward, or
        if another one scores now."""
        return None if self.changed_at else _mean(_rewards(self._first)[: self._num_averaged()])

    def reward_last(self) -> float | None:
        """Return the mean reward of the last tenth of the steps, of at most MOST_AVERAGED, by the reward of now."""
        return _mean(self.rewards()[-self._num_averaged() :])

    def _num_averaged(self) -> int:
        return num_averaged(self.num_steps)


def num_averaged(num_steps: int) -> int:
    """Return how many steps the first and the last mean reward of a run average: a tenth, at most MOST_AVERAGED."""
    return max(1, min(MOST_AVERAGED, num_steps // 10))


def _rewards(steps: Iterable[StepRecord]) -> list[float]:
    rewards = (step.metrics.get("reward") for step in steps)
    return [reward for reward in rewards if reward is not None and math.isfinite(reward)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class Observer:
    """Follows `evals` from its beginning, `control`, and the first and the newest of `steps`."""

    def __init__(self, transport: Transport, *, whole: bool = False, topics: Sequence[str] = OBSERVED) -> None:
        """`whole`: all of `steps` is read, for those who want each of them among the news. `topics`: those to follow,
        for roles that may not read all."""
        self.transport = transport
        self._topics = topics
        self.control = ControlView()
        self.curve = Curve()
        self.evaluations: dict[str, tuple[EvalResult, EvalResult]] = {}
        """The results of each evaluation at its first and its newest version, both by the newest reward."""
        self._rule = RecordsInForce(transport)
        control = self._rule.begin_control()
        positions = {TopicPartition(topic, 0): 0 for topic in topics} | {CONTROL: control.offset}
        if not whole:
            start = begin_near_the_end(Log(transport, self._rule))
            for step in start.first:
                self.curve.absorb(step)
            if start.newest is not None:
                self.curve.pass_over(start.starts, start.newest)
            positions |= start.positions
        self.reader: Reader = transport.reader(positions)
        self._polled = deque(control.records)
        """Records that were read but not processed, since that may need the log, which may not answer now."""

    def catch_up(self) -> list[StepRecord | EvalResult]:
        """Read up to the current ends of the topics, and return the news. A single `poll` only returns records that
        have arrived."""
        admin = self.transport.admin
        ends = {place: end for topic in self._topics for place, end in admin.end_offsets(topic).items()}
        news = self._judge_polled()
        for records in read_to_ends(self.transport, self.reader, ends):
            self._polled.extend(records)
            news += self._judge_polled()
        return news

    def poll(self) -> list[StepRecord | EvalResult]:
        """Return the news: newly trained steps in force, and evaluations."""
        self._polled.extend(self.reader.poll())
        return self._judge_polled()

    def _judge_polled(self) -> list[StepRecord | EvalResult]:
        """Process the records that were read, and those that arrive meanwhile."""
        news: list[StepRecord | EvalResult] = []
        while self._polled:
            for record, message in self._rule.messages([self._polled[0]]):
                if record.topic == "control":
                    self.control.absorb(record.key, message)
                elif isinstance(message, EvalResult):
                    held = self.evaluations.get(message.evaluation, (message, message))
                    self.evaluations[message.evaluation] = self._ends(*held, message)
                    news.append(message)
                elif isinstance(message, StepRecord) and self.curve.absorb(message):
                    news.append(message)
            self._polled.popleft()
            if not self._polled:
                self._polled.extend(self.reader.poll())
        return news

    def _ends(self, first: EvalResult, newest: EvalResult, result: EvalResult) -> tuple[EvalResult, EvalResult]:
        """Return the first and the newest of three results by their versions: somebody may ask for that of an older
        version at any time. Versions that are not in force any more are left out, if others are known."""
        known = by_newest_scorer([first, newest, result])
        found = [one for one in known if self.curve.in_force(one.name)]
        ordered = sorted(found or known, key=lambda one: (one.name.version, one.evaluated_at))
        return ordered[0], ordered[-1]

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
