"""Operators that change the effect of a group's rewards: terms, fewer failures beside a success, a priority."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.config.ranges import AboveZero, NotNegative, Positive
from rftstream.contracts.ids import derive_seed
from rftstream.core.samples import plain_sum
from rftstream.data.operators.base import (
    KEEP,
    ExperienceDecision,
    Prioritise,
    Reject,
    ScoredGroup,
    Seed,
    Shape,
)
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import hash_ngrams, is_right, sampled_tokens


class ShapeReward:
    """Adds a term for quality or diversity to rewards. The log keeps the verdict's reward beside the term.

    The term is named after its kind. For several terms, put the operator into the pipeline several times. Both terms
    compare siblings, so groups of one are left unchanged.

    `length`: for right siblings, from 0.5 for the shortest down to -0.5 for the longest; for wrong siblings the same,
    but never above 0 (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    `diversity`: how much a right rollout differs from its siblings, 0 to 1: the mean over siblings of 1 minus the
    Jaccard similarity of their sets of n-grams of sampled tokens. Wrong rollouts get nothing, since being wrong in
    many ways is easy."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "shape"`."""

        term: Literal["length", "diversity"]
        """Quantity that the term measures."""
        weight: Annotated[float, Meta(ge=-100, le=100)] = 0.1
        """Factor of the term. Keep it small compared with the difference between right and wrong."""
        on: str = ""
        """Named part of the verdict that decides whether a rollout is right; default: the reward, before it is
        shaped."""
        right_from: float = 0.5
        """Smallest value of a right rollout."""
        ngram: Positive = 4
        """Number of tokens in an n-gram for `diversity`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the term of each sibling that gets one."""
        if len(group.rollouts) < 2:
            return KEEP
        config = self._config
        right = {rollout.sibling for rollout in group.rollouts if is_right(rollout, config.on, config.right_from)}
        values = _length_terms(group, right) if config.term == "length" else _diversity(group, right, config.ngram)
        terms = {number: config.weight * value for number, value in values.items() if value}
        return Shape(terms, config.term) if terms else KEEP


def _length_terms(group: ScoredGroup, right: set[int]) -> dict[int, float]:
    shortest = min(rollout.num_tokens for rollout in group.rollouts)
    longest = max(rollout.num_tokens for rollout in group.rollouts)
    if shortest == longest:
        return {}
    values = {
        rollout.sibling: 0.5 - (rollout.num_tokens - shortest) / (longest - shortest) for rollout in group.rollouts
    }
    return {number: value if number in right else min(0.0, value) for number, value in values.items()}


def _diversity(group: ScoredGroup, right: set[int], size: int) -> dict[int, float]:
    if not right:
        return {}
    sets = {rollout.sibling: frozenset(hash_ngrams(sampled_tokens(rollout), size)) for rollout in group.rollouts}
    return {
        number: plain_sum(_distance(sets[number], other) for sibling, other in sets.items() if sibling != number)
        / (len(sets) - 1)
        for number in sorted(right)
    }


def _distance(some: frozenset[int], others: frozenset[int]) -> float:
    """Return 1 minus the Jaccard similarity; 0 for two empty sets."""
    union = len(some | others)
    return 1.0 - len(some & others) / union if union else 0.0


class Amplify:
    """Strengthens rare successes: if few siblings are right, some of the wrong ones are left out.

    The seed chooses wrong siblings to reject, until the share of right ones is large enough. Groups without a right
    sibling, or with enough of them, stay unchanged.

    Advantages are then computed from the remaining siblings. With rewards of 0 and 1 and the group's mean as baseline,
    one success among 8 has the advantage 7/8 and is 1/8 of the group, a product of 0.11. With 3 failures left it has
    3/4 and is 1/4 of the group, a product of 0.19. (Max-variance down-sampling, arXiv:2504.13818, drops siblings for a
    like reason.)"""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "amplify"`."""

        min_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
        """Share of right siblings up to which wrong ones are left out, unless only `min_wrong` wrong ones remain."""
        min_wrong: Positive = 2
        """Smallest number of wrong siblings that stay, since a group without any teaches nothing. The group is filtered
        if `buffer.min_siblings` is above the sum of this number and the right siblings."""
        on: str = ""
        """Named part of the verdict that decides whether a rollout is right; default: the reward, before it is
        shaped."""
        right_from: float = 0.5
        """Smallest value of a right rollout."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the wrong siblings to leave out."""
        config = self._config
        wrong = [rollout.sibling for rollout in group.rollouts if not is_right(rollout, config.on, config.right_from)]
        num_right = len(group.rollouts) - len(wrong)
        if not num_right:
            return KEEP
        num_kept = max(config.min_wrong, int(num_right / config.min_share + 1e-9) - num_right)
        if len(wrong) <= num_kept:
            return KEEP
        by_luck = sorted(wrong, key=lambda sibling: derive_seed(seed, sibling))
        return Reject("one failure of many", tuple(sorted(by_luck[num_kept:])))


class Priority:
    """Sets the priority of a group: by its difficulty, the spread of its scores, or its advantages (prioritised
    experience replay, arXiv:1511.05952).

    `replay` chooses the groups to train on again with probabilities that grow with their priorities. With
    `feeder.on_stale = "drop"`, batches first take ready groups with a higher priority, except that groups that only the
    next batch can still take come first.

    `difficulty`: highest if the mean score is `target`, and lower with the distance from it, like a normal distribution
    with standard deviation `width` (ExGRPO, arXiv:2510.02245, replays groups of medium difficulty). `spread`: the
    standard deviation of the scores. `advantage`: their mean distance from the group's mean."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "priority"`."""

        by: Literal["difficulty", "spread", "advantage"] = "difficulty"
        """Measure of a group's importance."""
        on: str = ""
        """Named part of the verdict that is the score; default: the reward, before it is shaped. Rollouts that lack the
        part are ignored; a group without any score stays unchanged."""
        target: float = 0.5
        """Mean score with the highest priority, for `difficulty`."""
        width: AboveZero = 0.2
        """Width of the preference around `target`, for `difficulty`."""
        floor: NotNegative = 0.01
        """Amount that is added to every priority. If it is not 0, no group is excluded for good."""
        power: NotNegative = 1.0
        """Exponent of the sum: 0 makes all priorities equal, more than 1 prefers high ones even more."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the group's priority."""
        config = self._config
        scores = [score for rollout in group.rollouts if (score := rollout.score(config.on)) is not None]
        if not scores:
            return KEEP
        mean = sum(scores) / len(scores)
        if config.by == "difficulty":
            value = math.exp(-(((mean - config.target) / config.width) ** 2) / 2)
        elif config.by == "spread":
            value = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
        else:
            value = sum(abs(score - mean) for score in scores) / len(scores)
        return Prioritise((config.floor + value) ** config.power, config.by)
