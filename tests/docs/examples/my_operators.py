"""An operator of one's own: problems that were solved in their last groups come back less and less often."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.contracts.ids import unit_interval
from rftstream.data.operators.base import KEEP, Draw, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts


class Spaced:
    """Skips a solved problem more often the more groups of it were tried."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        solved: float = 0.9
        """Mean reward of the newest group from which on a problem counts as solved."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        past = facts.problem(draw.taskset, draw.index)
        newest = past.recent()
        if newest is None or newest < self._config.solved:
            return KEEP
        return KEEP if unit_interval(seed) < 1 / (1 + past.num_groups) else Skip("solved, not due yet")
