"""Operators that offer groups to later batches: to be trained on once more, or as demonstrations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Positive
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages, taken_kinds
from rftstream.contracts.batches import LossKind
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
from rftstream.data.operators.sampled import is_right, rollout_of
from rftstream.errors import ConfigError


class ReplayGroups:
    """Trains on groups once more: later batches have them beside their new groups (experience replay).

    It offers the groups that are trained on to later batches. Each batch of rollouts takes up to `per_batch` of them,
    beside `feeder.groups_per_batch` new ones.

    Which of them is chance, weighed by their priorities (see `priority`; 1 without it), from seeds that are derived.
    Tokens keep the logprobs of the policy that sampled them, so ratios are as right as the algorithm makes them;
    `grpo` corrects for them with `correction`. For algorithms that compare siblings a group whose rewards are all the
    same has nothing to say a second time either."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "replay"`."""

        per_batch: Positive = 4
        """Most groups of earlier batches in a batch."""
        max_uses: Positive = 2
        """Most batches that use a group, beside its own."""
        cool_down: Count = 1
        """Fewest batches between two that use the group; 0: the next batch may use it."""
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
        """Most groups that are remembered, the newest ones; their rollouts stay on the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reuse = _limits(ReuseKind.replay, config)

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Offer the group if it has something to compare."""
        is_flat = len({rollout.shaped_reward for rollout in group.rollouts}) <= 1
        return KEEP if is_flat and not self._config.flat_too else Offer()


class Hindsight:
    """Learns from what a failed attempt did reach: it is a demonstration for the problem that it solves (hindsight
    experience replay, arXiv:1707.01495).

    It offers attempts that are wrong, and of which the environment says what they did reach (`Reply.reached`), as
    demonstrations: the messages of the problem that the attempt solves, and what the policy said. An algorithm has to
    learn from demonstrations beside rollouts: `mix` or `chord`.

    It is asked about groups that the operators before it have kept. Place it before `zero_variance`: groups of which
    all attempts failed have the most to give. An attempt with several segments, such as one whose context was
    rewritten, or one that a limit cut off or that shows an image, is never a demonstration."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "hindsight"`."""

        per_batch: Positive = 4
        """Most groups that give demonstrations to a batch."""
        per_group: Positive = 1
        """Most attempts of a group that become demonstrations, chosen by the seed."""
        max_uses: Positive = 1
        """Most batches to which a group gives demonstrations."""
        cool_down: Count = 1
        """Fewest batches between two that use the group."""
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
        """Most groups that are remembered, the newest ones; their rollouts stay on the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reuse = _limits(ReuseKind.hindsight, config)

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Offer some of the attempts that reached something else."""
        config = self._config
        found = [
            rollout.sibling
            for rollout in group.rollouts
            if not is_right(rollout, config.on, config.right_from) and _reached_something(rollout)
        ]
        if not found:
            return KEEP
        by_luck = sorted(found, key=lambda sibling: derive_seed(seed, sibling))
        return Offer(tuple(sorted(by_luck[: config.per_group])))


def _limits(kind: ReuseKind, config: ReplayGroups.Config | Hindsight.Config) -> ReuseLimits:
    """Return the limits that settings of the same names give."""
    given = {one.name: getattr(config, one.name) for one in fields(ReuseLimits) if hasattr(config, one.name)}
    return ReuseLimits(kind=kind, **given)


def _reached_something(scored: ScoredRollout) -> bool:
    rollout = rollout_of(scored)
    if rollout.posted is None or not rollout.posted.reached or rollout.status is not RolloutStatus.completed:
        return False
    return len(rollout.segments) == 1 and 1 in rollout.segments[0].loss_mask.data and not rollout.segments[0].images


def makes_demonstrations(reusing: Collection[ReuseLimits]) -> bool:
    """Return whether any of these limits is about demonstrations."""
    return any(limits.kind is ReuseKind.hindsight for limits in reusing)


def check_demonstrating(config: RunConfig, reusing: Collection[ReuseLimits]) -> None:
    """Check that the run can learn from what operators offer. ConfigError if not."""
    if not makes_demonstrations(reusing):
        return
    stages = Stages.of(config)
    if stages.named:
        takes = any(stage.takes_rollouts and stage.kind is LossKind.sft for stage in stages.all)
    else:
        takes = {LossKind.rl, LossKind.sft} <= taken_kinds(config)
    if not takes:
        raise ConfigError(
            "pipeline: found an operator that makes demonstrations of attempts, as hindsight does, and no algorithm "
            "that learns from rollouts and demonstrations; expected trainer.algorithm = 'mix' or 'chord', or a stage "
            "with one"
        )
    if config.buffer.zero_variance == "replace":
        raise ConfigError(
            "buffer.zero_variance: found 'replace', which leaves out groups before operators such as hindsight are "
            'asked about them; expected op = "zero_variance" behind it in the pipeline'
        )
