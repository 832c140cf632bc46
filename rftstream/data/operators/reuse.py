"""Operators that offer groups to later batches: to be trained on again, or as demonstrations."""

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
    """Trains on groups again: later batches contain them beside their new groups (experience replay).

    It offers the groups that are trained on to later batches. Each batch of rollouts takes up to `per_batch` of them,
    beside `feeder.groups_per_batch` new ones.

    The choice is random, weighted by their priorities (see `priority`; 1 without it), with derived seeds. Tokens keep
    the logprobs of the policy that sampled them, so the algorithm has to correct for the difference; `grpo` does so
    with `correction`. For algorithms that compare siblings, a group with equal rewards teaches nothing the second time
    either."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "replay"`."""

        per_batch: Positive = 4
        """Largest number of groups from earlier batches in a batch."""
        max_uses: Positive = 2
        """Largest number of batches that reuse a group."""
        cool_down: Count = 1
        """Smallest number of batches between two that use the group; 0: the next batch may use it."""
        max_staleness: Count = 8
        """Largest difference between the version that reuses a group and the oldest version that sampled one of its
        tokens. `feeder.max_staleness` applies only to a group's own batch. Until then retention keeps the group's
        rollouts."""
        weight: AboveZero = 1.0
        """Factor of the loss at the first reuse of a group."""
        decay: Annotated[float, Meta(gt=0, le=1)] = 0.5
        """Factor from one reuse's weight to the next one's."""
        flat_too: bool = False
        """Whether groups with equal rewards are also offered."""
        max_held: Positive = 1024
        """Largest number of remembered groups; the newest are kept, and their rollouts stay on the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reuse = _limits(ReuseKind.replay, config)

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Offer the group if its siblings can be compared."""
        rewards = {(one.shaped_reward, *sorted(one.roles.items(), key=lambda pair: pair[0])) for one in group.rollouts}
        is_flat = len(rewards) <= 1
        return KEEP if is_flat and not self._config.flat_too else Offer()


class Hindsight:
    """Learns from failed attempts: an attempt is a demonstration for the problem that it does solve (hindsight
    experience replay, arXiv:1707.01495).

    It offers wrong attempts as demonstrations if the environment reports what they reached (`Reply.reached`). A
    demonstration consists of the messages of the solved problem, and the policy's turns. The algorithm has to learn
    from demonstrations beside rollouts: `mix` or `chord`.

    It sees groups that earlier operators have kept. Place it before `zero_variance`: groups in which all attempts
    failed are the most useful. An attempt is never a demonstration if it has several segments (for example after a
    rewritten context), was cut off by a limit, or shows an image."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "hindsight"`."""

        per_batch: Positive = 4
        """Largest number of groups that give demonstrations to a batch."""
        per_group: Positive = 1
        """Largest number of a group's attempts that become demonstrations, chosen by the seed."""
        max_uses: Positive = 1
        """Largest number of batches to which a group gives demonstrations."""
        cool_down: Count = 1
        """Smallest number of batches between two that use the group."""
        max_staleness: Count = 8
        """Largest difference between the version that uses a group's demonstrations and the oldest version that sampled
        one of its tokens. Until then retention keeps the group's rollouts."""
        weight: AboveZero = 1.0
        """Factor of a demonstration's loss."""
        on: str = ""
        """Named part of the verdict that decides whether a rollout is right; default: the reward, before it is
        shaped."""
        right_from: float = 0.5
        """Smallest value of a right rollout."""
        max_held: Positive = 1024
        """Largest number of remembered groups; the newest are kept, and their rollouts stay on the log."""

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
    """Return the limits from the settings with the same names."""
    given = {one.name: getattr(config, one.name) for one in fields(ReuseLimits) if hasattr(config, one.name)}
    return ReuseLimits(kind=kind, **given)


def _reached_something(scored: ScoredRollout) -> bool:
    rollout = rollout_of(scored)
    if rollout.posted is None or not rollout.posted.reached or rollout.status is not RolloutStatus.completed:
        return False
    return len(rollout.segments) == 1 and rollout.segments[0].loss_mask.num_ones > 0 and not rollout.segments[0].images


def makes_demonstrations(reusing: Collection[ReuseLimits]) -> bool:
    """Return whether any of these limits is for demonstrations."""
    return any(limits.kind is ReuseKind.hindsight for limits in reusing)


def check_demonstrating(config: RunConfig, reusing: Collection[ReuseLimits]) -> None:
    """Raise ConfigError unless the run can learn from the operators' offers."""
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
