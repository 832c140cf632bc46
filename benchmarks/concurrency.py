"""`explorer.max_concurrent = "auto"` beside the best fixed number of a sweep, in one run.

With `hf` on the CPU, wall time from the first task to the last rollout. With made-up engines whole explorers work by a
clock of their own, so the figures are the same on every machine: one engine's steps grow slowly with its rows, the
other one samples half as much beyond a number of rows, as an engine without memory does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks._exploring import explore, make_load
from benchmarks._tasks import one_task
from benchmarks.turns import MODEL
from rftstream.clock import Clock
from rftstream.config import loader
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies import fake_model
from rftstream.policies.base import Completion, EngineLoad
from rftstream.policies.fake import FakePolicy
from rftstream.roles.explorer.step import ExplorerStep
from rftstream.service.loops.concurrent import ConcurrentService
from rftstream.testing import MemoryRun, RoleDriver
from rftstream.weights.publisher import publish

FIXED = (32, 64, 96, 128, 256)
NUM_GROUPS = 320
VIRTUAL_S, TICK_S, NUM_TASKS = 300.0, 0.05, 8000
"""Seconds of a made-up engine, of which the first fifth is not counted, and its tasks."""


def run() -> list[dict[str, Any]]:
    rows = [_hf()]
    for name, engine in (("steps that grow", SlowlyGrowing), ("a cliff at 100", Cliff)):
        with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
            rows.append(_row(name, "virtual ", partial(_virtual, engine, Path(folder))))
    return rows


def _row(name: str, seconds: str, rate: Callable[[int | str], float]) -> dict[str, Any]:
    """`rate`: number of rollouts, or auto -> tokens a second."""
    ours = rate("auto")
    rates = {number: rate(number) for number in FIXED}
    best = max(rates, key=rates.__getitem__)
    return {
        "name": f"concurrency: {name}, explorer.max_concurrent = auto",
        "unit": f"tokens/{seconds}s",
        "ours": ours,
        "reference": rates[best],
        "reference_name": f"{best}, the best of {', '.join(map(str, FIXED))}",
        "ratio": ours / rates[best],
    }


def _hf() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        load = make_load({"make": MODEL}, 1, folder, "hf", concurrent=max(FIXED), groups=NUM_GROUPS)

        def rate(number: int | str) -> float:
            run = loader.replace(load.run, explorer__max_concurrent=number)
            return sum(load.lengths[1:]) / explore(replace(load, run=run), Path(folder) / str(number))

        return _row("hf, a made model, 1 thread", "", rate)


# ------------------------------------------------------------------------------------------ made-up engines


class MadeUpEngine(FakePolicy):
    """A policy whose engine samples `rate(rows)` tokens in a second, of all rows together."""

    def __init__(self, config: FakePolicy.Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self._paced = PacedClock(clock)
        super().__init__(config, model=model, renderer=renderer, clock=self._paced)
        self._worked_s = 0.0

    def rate(self, num_rows: int) -> float:
        """Return the tokens of a second."""
        raise NotImplementedError

    def step(self) -> list[Completion]:
        """Let the time since the last step pass at the pace of the rows."""
        if self._active:
            pace = self.rate(len(self._active)) / len(self._active) / self._config.tokens_per_s
            self._worked_s += self._paced.move(pace)
        else:
            self._paced.move(1.0)
        return super().step()

    def engine_load(self) -> EngineLoad:
        """Return the tokens, and the seconds that have passed."""
        return replace(super().engine_load(), busy_s=self._worked_s)


class SlowlyGrowing(MadeUpEngine):
    def rate(self, num_rows: int) -> float:
        return num_rows / (0.02 + 0.0005 * num_rows)


class Cliff(MadeUpEngine):
    def rate(self, num_rows: int) -> float:
        return 20.0 * (num_rows if num_rows <= 100 else 50)


class PacedClock:
    """A clock that moves at another's pace when it is told to."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen = clock, clock.now()
        self._now = self._seen

    def move(self, pace: float) -> float:
        """Let what has passed on the other clock pass here, times `pace`. Return the seconds of the other one."""
        now, before = self._clock.now(), self._seen
        self._seen = now
        self._now += pace * (now - before)
        return now - before

    def now(self) -> float:
        return self._now

    def stamp(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def _virtual(engine: type[MadeUpEngine], folder: Path, number: int | str) -> float:
    """Tokens in a second of the engine's time."""
    name = f"{__name__}:{engine.__name__}"
    config = {
        "run": {"name": "concurrency", "steps": 1},
        "model": {"path": "fake", "dtype": "float32"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "explorer": {"policy": name, "max_concurrent": number},
        "policies": {name: {"batch_size": 2048, "tokens_per_s": 20.0, "mean_tokens": 100.0}},
        "sampling": {"max_tokens": 4096},
        "transport": {"partitions": 1},
    }
    run = MemoryRun(loader.from_dict(config), folder=folder / str(number))
    run.put_manifest()
    tensors = {
        fake_model.SKILL: fake_model.serve(np.zeros(1, np.float32), "float32"),
        fake_model.FILLER: fake_model.serve(np.zeros(8, np.float32), "float32"),
    }
    first = VersionName(trainer_epoch=1, version=0)
    run.put("weights", publish(run.store, tensors, first, "fake", "float32", resumed=True))
    run.put("tasks", *(one_task(place, run.config.sampling, question="1+2=", answer="3") for place in range(NUM_TASKS)))
    explorer = RoleDriver(run, "explorer")
    step = cast(ExplorerStep, cast(ConcurrentService, explorer.service).step)
    policy = cast(MadeUpEngine, step._policy)
    before = 0
    for tick in range(round(VIRTUAL_S / TICK_S)):
        if tick == round(0.2 * VIRTUAL_S / TICK_S):
            before = policy.engine_load().num_tokens
        explorer.tick()
        run.clock.advance(TICK_S)
    assert policy.num_active, "there are tasks left"
    return (policy.engine_load().num_tokens - before) / (0.8 * VIRTUAL_S)
