"""Learns from what a failed attempt did reach: it is a demonstration for the problem that it solves (hindsight
experience replay, arXiv:1707.01495)."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.config.ranges import AboveZero, Count, Positive
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.outcomes import ReuseKind
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.data.operators.base import (
    KEEP,
    ExperienceDecision,
    Offer,
    ReuseLimits,
    ScoredGroup,
    ScoredRollout,
    Seed,
)
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import rollout_of
from rftstream.data.operators.shape import is_right


class Hindsight:
    """Offers attempts that are wrong, and of which the environment says what they did reach (`Reply.reached`), as
    demonstrations: the messages of the problem that the attempt solves, and what the policy said. An algorithm has to
    learn from demonstrations beside rollouts: `mix` or `chord`.

    It is asked about groups that the operators before it have kept. Place it before `zero_variance`: groups of which
    all attempts failed have the most to give. An attempt with several segments, such as one whose context was
    rewritten, or one that a limit cut off or that shows an image, is never a demonstration."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "hindsight"`."""

        per_batch: Positive = 4
        """At most so many groups give demonstrations to a batch."""
        per_group: Positive = 1
        """At most so many attempts of a group, chosen by the seed."""
        max_uses: Positive = 1
        """A group gives demonstrations to at most so many batches."""
        cool_down: Count = 1
        """So many batches lie between two of them, at least."""
        max_staleness: Count = 8
        """A group gives none at a version that is more than this above the oldest that sampled one of its tokens. Until
        then retention keeps its rollouts."""
        weight: AboveZero = 1.0
        """Factor of a demonstration's loss."""
        on: str = ""
        """Named part of the verdict that says whether a rollout is right; default: the reward, before it is shaped."""
        right_from: float = 0.5
        """A rollout is right from this value on."""
        max_held: Positive = 1024
        """So many groups are kept in mind, the newest ones; their rollouts stay on the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reuse = ReuseLimits(
            kind=ReuseKind.hindsight,
            per_batch=config.per_batch,
            max_uses=config.max_uses,
            cool_down=config.cool_down,
            max_staleness=config.max_staleness,
            weight=config.weight,
            max_held=config.max_held,
        )

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Offer some of the attempts that reached something else."""
        config = self._config
        found = [
            one.sibling
            for one in group.rollouts
            if not is_right(one, config.on, config.right_from) and _reached_something(one)
        ]
        if not found:
            return KEEP
        by_luck = sorted(found, key=lambda sibling: derive_seed(seed, sibling))
        return Offer(tuple(sorted(by_luck[: config.per_group])))


def _reached_something(scored: ScoredRollout) -> bool:
    rollout = rollout_of(scored)
    if rollout.posted is None or not rollout.posted.reached or rollout.status is not RolloutStatus.completed:
        return False
    return len(rollout.segments) == 1 and 1 in rollout.segments[0].loss_mask.data and not rollout.segments[0].images
