"""How many rollouts an explorer samples at once with `auto`, over made-up engines with their own time."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from rftstream.config.role_sections import ExplorerSection
from rftstream.errors import ConfigError
from rftstream.policies.base import EngineLoad
from rftstream.roles.explorer.concurrency import MOST, ConcurrencyController, concurrency_controller

TICK_S = 0.1
PREFILL = 20_000
"""Tokens of a put back rollout that are computed again in a second."""


class Engine:
    """An engine that samples `rate(rollouts, seconds)` tokens in a second, for rollouts with a long tail of lengths.
    With `memory`, in tokens, rollouts that do not fit are put back, and computed again later."""

    def __init__(self, rate: Callable[[int, float], float], *, noise: float = 0.03, places: int = 10_000,
                 memory: float = math.inf) -> None:  # fmt: skip
        self._rate, self._noise, self._places, self._memory = rate, noise, places, memory
        self._chance = Random(0)
        self._rollouts: list[list[float]] = []
        self._num_running = self._num_refused = 0
        self._now = self._tokens = self._owed = 0.0

    def run(self, controller: ConcurrencyController | int, seconds: float, tasks: int = 10_000) -> float:
        """Return the tokens of a second."""
        began, before = self._now, self._tokens
        while self._now < began + seconds:
            self._fill(controller, tasks)
            running, used = 0, 0.0
            for done, _ in self._rollouts[: self._places]:
                if (used := used + done + 50) > self._memory:
                    break
                running += 1
            put_back = self._rollouts[running : self._num_running]
            self._num_refused += len(put_back)
            self._owed += sum(done for done, _ in put_back)
            again_s = min(self._owed / PREFILL, TICK_S)
            self._owed -= again_s * PREFILL
            tokens = self._rate(running, self._now) * max(0.1, self._chance.gauss(1, self._noise)) * (TICK_S - again_s)
            self._tokens += tokens
            for rollout in self._rollouts[:running]:
                rollout[0] += tokens / running
            self._num_running = sum(done < length for done, length in self._rollouts[:running])
            self._rollouts = [rollout for rollout in self._rollouts if rollout[0] < rollout[1]]
            self._now += TICK_S
            self._fill(controller, tasks)
            if not isinstance(controller, int):
                controller.observe(self.load(running, used), len(self._rollouts))
        return (self._tokens - before) / (self._now - began)

    def load(self, running: int, used: float) -> EngineLoad:
        return EngineLoad(num_tokens=int(self._tokens), busy_s=self._now, num_refused=self._num_refused,
                          num_waiting=len(self._rollouts) - running, memory=min(used / self._memory, 0.98))  # fmt: skip

    def _fill(self, controller: ConcurrencyController | int, tasks: int) -> None:
        most = controller if isinstance(controller, int) else controller.limit
        while len(self._rollouts) < min(most, tasks):
            self._rollouts.append([0.0, self._chance.lognormvariate(math.log(200) - 0.5, 1.0)])


def linear(rollouts: int, now: float) -> float:
    return 20.0 * rollouts


def cliff(at: int) -> Callable[[int, float], float]:
    return lambda rollouts, now: 20.0 * (rollouts if rollouts <= at else 0.5 * at)


def knee(at: int) -> Callable[[int, float], float]:
    return lambda rollouts, now: 20.0 * min(rollouts, at)


ENGINES = {
    "steps that grow slowly": {"rate": lambda rollouts, now: rollouts / (0.08 + 0.004 * rollouts)},
    "a knee below the first number": {"rate": knee(20)},
    "a knee": {"rate": knee(150)},
    "a cliff below the first number": {"rate": cliff(20)},
    "a cliff": {"rate": cliff(100)},
    "a cliff, and much noise": {"rate": cliff(100), "noise": 0.2},
    "places": {"rate": linear, "places": 100},
    "memory": {"rate": linear, "memory": 30_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_it_comes_to_what_the_best_fixed_number_samples(name: str) -> None:
    def rate(number: int) -> float:
        engine = Engine(**ENGINES[name])
        engine.run(number, 40)
        return engine.run(number, 100)

    best = max(map(rate, (8, 16, 20, 32, 64, 96, 128, 192, 256, 512)))
    engine, controller = Engine(**ENGINES[name]), ConcurrencyController(start=64)
    engine.run(controller, 200)
    # Where rollouts are put back, the best number is one that the engine has no room for.
    assert engine.run(controller, 300) > (0.85 if name == "memory" else 0.95) * best


@pytest.mark.slow
def test_it_follows_an_engine_that_changes() -> None:
    falls = Engine(lambda rollouts, now: (cliff(200) if now < 100 else cliff(60))(rollouts, now))
    rises = Engine(lambda rollouts, now: (knee(60) if now < 100 else knee(200))(rollouts, now))
    for engine, after in ((falls, 60), (rises, 200)):
        controller = ConcurrencyController(start=64)
        engine.run(controller, 400)
        assert engine.run(controller, 300) > 0.9 * 20 * after


def test_without_tasks_enough_it_does_not_grow_and_the_same_measures_give_the_same_number() -> None:
    numbers = []
    for tasks in (10_000, 50, 10_000):
        controller = ConcurrencyController(start=64)
        Engine(linear).run(controller, 10, tasks=tasks)
        numbers.append(controller.limit)
    assert numbers[1] == 64 < numbers[0] == numbers[2] <= MOST


def load(busy_s: float = 0.0, **more: float) -> EngineLoad:
    return EngineLoad(num_tokens=int(100 * busy_s), busy_s=busy_s, **more)


def test_without_room_it_falls_at_once_and_again_only_when_fewer_are_sampled() -> None:
    controller = ConcurrencyController(start=100)
    for refused, sampled, limit in (
        (90, 100, 100), (101, 100, 85), (400, 100, 85), (400, 85, 85), (480, 85, 85), (490, 85, 72),
    ):  # fmt: skip
        controller.observe(load(num_refused=refused), sampled)
        assert controller.limit == limit, refused
    full = ConcurrencyController(start=1)
    full.observe(load(memory=1.0), 1)
    assert full.limit == 1


def test_it_grows_no_further_than_the_engines_memory() -> None:
    controller = ConcurrencyController(start=64)
    limits = []
    for tick in range(60):
        controller.observe(load(0.1 * tick, memory=0.5), controller.limit)
        limits.append(controller.limit)
    assert max(limits) == 121  # 64 take half of it


def test_a_policy_that_does_not_say_how_busy_it_is_needs_a_number() -> None:
    assert concurrency_controller(ExplorerSection(policy="joined")) is None
    found = concurrency_controller(ExplorerSection(policy="hf", max_concurrent="auto"))
    assert found is not None and found.limit == 64
    with pytest.raises(ConfigError, match="'joined' does not say how busy its engine is; set a number"):
        concurrency_controller(ExplorerSection(policy="joined", max_concurrent="auto"))
