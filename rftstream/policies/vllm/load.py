"""How busy vLLM's engine is, as it says after each of its passes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from rftstream.policies.base import EngineLoad

PAUSE_S = 1.0
"""Longest time in seconds between two passes that counts as work. In a longer one there were no requests, or new
weights were exchanged."""


FITS = 0.8
"""Share of the memory that counts as used when all of it is: an engine that puts requests back may be given some more
than fit."""


class EngineMeasures:
    """The measures of an engine, or the sum of several with data parallelism. `Engine` makes it, and vLLM calls
    `logger` for each engine, in the thread of the event loop. `load` may be read in any thread."""

    def __init__(self) -> None:
        self.load = EngineLoad(num_tokens=0, busy_s=0.0)
        self._at_s = 0.0
        self._waiting: dict[int, int] = {}
        self._memory: dict[int, float] = {}

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLogger:
        """Return the object to which vLLM tells an engine's statistics."""
        return StatLogger(self, engine_index)

    def add(self, engine: int, scheduler: Any, iteration: Any) -> None:
        """Add what an engine says of a pass: the state of its scheduler, and its tokens, if there were any."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._at_s, PAUSE_S) if self._is_busy else 0.0
        self._at_s = now_s
        if scheduler is not None:
            self._waiting[engine] = scheduler.num_waiting_reqs
            self._memory[engine] = FITS * scheduler.kv_cache_usage if scheduler.num_running_reqs else 0.0
        self.load = replace(
            self.load,
            num_tokens=self.load.num_tokens + (iteration.num_generation_tokens if iteration is not None else 0),
            busy_s=self.load.busy_s + passed_s,
            num_waiting=sum(self._waiting.values()),
            num_refused=self.load.num_refused + (iteration.num_preempted_reqs if iteration is not None else 0),
            memory=max(self._memory.values(), default=0.0),
        )

    @property
    def _is_busy(self) -> bool:
        return any(self._memory.values())


class StatLogger:
    """A logger of statistics, as vLLM's StatLoggerBase describes it. `EngineMeasures` makes it."""

    def __init__(self, measures: EngineMeasures, engine: int) -> None:
        self._measures, self._engine = measures, engine

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        """Take the statistics of a pass. Either may be None."""
        self._measures.add(self._engine, scheduler_stats, iteration_stats)

    def log(self) -> None:
        """Do nothing: there is no log to write."""

    def log_engine_initialized(self) -> None:
        """Do nothing, either."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing: asleep there are no passes."""
