"""The state of a run from its log: its progress, its rewards, and the messages on `control`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.service.control_view import ControlView
from rftstream.service.reading import read_to_ends
from rftstream.service.records.in_force import RecordsInForce
from rftstream.transport.base import Reader, Transport
from rftstream.weights.lineage import Lineage

OBSERVED = ("steps", "evals", "control")

RECENT_STEPS, FIRST_STEPS = 512, 5
"""StepRecords that are kept in full, the newest and the first; of the others only the reward is kept."""


class Curve:
    """The steps in force, in order of their versions. An `Observer` makes it and passes each step to `absorb`."""

    def __init__(self) -> None:
        self._lineage = Lineage()
        self._rewards: dict[int, float | None] = {}
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._first: list[StepRecord] = []

    def absorb(self, step: StepRecord) -> bool:
        """Add a step record. Return whether it is a newly trained step in force."""
        epoch_before = self._lineage.epoch
        if not self._lineage.take(step.name, resumed=step.resumed):
            return False
        if self._lineage.epoch > epoch_before:
            start = step.name.version if step.resumed else step.name.version - 1
            for version in [version for version in self._rewards if version > start]:
                del self._rewards[version]
            for kept in (self.recent, self._first):
                while kept and kept[-1].name.version > start:
                    kept.pop()
        if step.resumed:
            return False
        reward = step.metrics.get("reward")
        self._rewards[step.name.version] = reward if reward is not None and math.isfinite(reward) else None
        self.recent.append(step)
        if len(self._first) < FIRST_STEPS:
            self._first.append(step)
        return True

    @property
    def version(self) -> int:
        """Return the newest version in force; 0 before the first step."""
        return max(self._rewards, default=0)

    @property
    def num_steps(self) -> int:
        """Return how many steps are in force."""
        return len(self._rewards)

    @property
    def last(self) -> StepRecord | None:
        """Return the newest step, or None."""
        return self.recent[-1] if self.recent else None

    def steps(self) -> list[StepRecord]:
        """Return the kept steps, in order of versions: the first and the newest, and in a short run all."""
        newest = self.recent[0].name.version if self.recent else 0
        return [*(step for step in self._first if step.name.version < newest), *self.recent]

    def rewards(self) -> list[float]:
        """Return the rewards of the steps that have one, in order of versions."""
        return [reward for _, reward in sorted(self._rewards.items()) if reward is not None]

    def reward_first(self) -> float | None:
        """Return the mean reward of the first tenth of the steps that have one."""
        rewards = self.rewards()
        return _mean(rewards[: max(1, len(rewards) // 10)])

    def reward_last(self) -> float | None:
        """Return the mean reward of the last tenth of the steps that have one."""
        rewards = self.rewards()
        return _mean(rewards[-max(1, len(rewards) // 10) :])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class Observer:
    """Follows `steps`, `evals` and `control` from their beginning."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.reader: Reader = transport.reader({TopicPartition(topic, 0): 0 for topic in OBSERVED})
        self.control = ControlView()
        self.curve = Curve()
        self.evaluations: dict[str, tuple[EvalResult, EvalResult]] = {}
        """The first and the newest result of each evaluation."""
        self._rule = RecordsInForce(transport)
        self._polled: deque[Record] = deque()
        """Records that were read but not processed, since that may need the log, which may not answer now."""

    def catch_up(self) -> None:
        """Read up to the current ends of the topics. A single `poll` only returns records that have arrived."""
        admin = self._transport.admin
        ends = {place: end for topic in OBSERVED for place, end in admin.end_offsets(topic).items()}
        self._judge_polled()
        for records in read_to_ends(self._transport, self.reader, ends):
            self._polled.extend(records)
            self._judge_polled()

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
                    first, _ = self.evaluations.get(message.evaluation, (message, message))
                    self.evaluations[message.evaluation] = (first, message)
                    news.append(message)
                elif isinstance(message, StepRecord) and self.curve.absorb(message):
                    news.append(message)
            self._polled.popleft()
            if not self._polled:
                self._polled.extend(self.reader.poll())
        return news

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
