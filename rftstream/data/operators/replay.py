"""Trains on groups once more: later batches have them beside their new groups (experience replay)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Positive
from rftstream.contracts.outcomes import ReuseKind
from rftstream.data.operators.base import KEEP, ExperienceDecision, Offer, ReuseLimits, ScoredGroup, Seed
from rftstream.data.operators.facts import Facts


class ReplayGroups:
    """Offers the groups that are trained on to later batches. Each batch of rollouts takes up to `per_batch` of them,
    beside `feeder.groups_per_batch` new ones.

    Which of them is chance, weighed by their priorities (see `priority`; 1 without it), from seeds that are derived.
    Tokens keep the logprobs of the policy that sampled them, so ratios are as right as the algorithm makes them;
    `grpo` corrects for them with `correction`. For algorithms that compare siblings a group whose rewards are all the
    same has nothing to say a second time either."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "replay"`."""

        per_batch: Positive = 4
        """At most so many groups of earlier batches are in a batch."""
        max_uses: Positive = 2
        """A group is in at most so many batches beside its own."""
        cool_down: Count = 1
        """So many batches lie between two that have the group, at least; 0: the next batch may have it."""
        max_staleness: Count = 8
        """A group is not used at a version that is more than this above the oldest that sampled one of its tokens.
        `feeder.max_staleness` is about a group's own batch alone. Until then retention keeps its rollouts."""
        weight: AboveZero = 1.0
        """Factor of the loss at the first reuse of a group."""
        decay: Annotated[float, Meta(gt=0, le=1)] = 0.5
        """Each further reuse has the factor of the one before times this."""
        flat_too: bool = False
        """Whether groups whose rewards are all the same are offered, too."""
        max_held: Positive = 1024
        """So many groups are kept in mind, the newest ones; their rollouts stay on the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reuse = ReuseLimits(
            kind=ReuseKind.replay,
            per_batch=config.per_batch,
            max_uses=config.max_uses,
            cool_down=config.cool_down,
            max_staleness=config.max_staleness,
            weight=config.weight,
            decay=config.decay,
            max_held=config.max_held,
        )

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Offer the group if it has something to compare."""
        is_flat = len({one.shaped_reward for one in group.rollouts}) <= 1
        return KEEP if is_flat and not self._config.flat_too else Offer()
