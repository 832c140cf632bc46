"""Skips problems that the policy solves nearly always or nearly never: they teach little (GRESO, arXiv:2506.02177).

How often it solves them is read from the outcomes of their groups before. A share of what would be skipped is explored
all the same, since a policy that learns solves other problems than it did."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.config.ranges import Fraction, Positive
from rftstream.contracts.ids import unit_interval
from rftstream.data.operators.base import KEEP, Draw, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class SolveRate:
    """Skips problems whose mean reward, or mean named part, is out of range."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "solve_rate"`."""

        keep: tuple[float, float] = (0.05, 0.95)
        """Problems with a mean below the first or above the second number are skipped."""
        explore: Fraction = 0.1
        """Share of these that is admitted all the same."""
        on: str = ""
        """Named part of the verdict whose mean counts; default: the reward, before operators shape it."""
        min_scored: Positive = 1
        """Scored rollouts that a problem needs before it may be skipped."""
        last_group: bool = False
        """Only the newest group of a problem counts, instead of all of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.keep[0] > config.keep[1]:
            raise ConfigError(f"keep: got {list(config.keep)}, expected the smaller number first")

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem that is too easy or too hard, but for the share that is explored."""
        config, record = self._config, facts.problem(draw.taskset, draw.index)
        if record.num_scored < config.min_scored:
            return KEEP
        rate = record.recent(config.on) if config.last_group else record.mean(config.on)
        if rate is None or config.keep[0] <= rate <= config.keep[1]:
            return KEEP
        if unit_interval(seed) < config.explore:
            return KEEP
        return Skip("too hard" if rate < config.keep[0] else "too easy")
