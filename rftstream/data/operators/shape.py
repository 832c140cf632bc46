"""Adds terms for quality and diversity to rewards. What the verdict said stays beside them on the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.config.ranges import Positive
from rftstream.data.operators.base import KEEP, ExperienceDecision, ScoredGroup, ScoredRollout, Seed, Shape
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import hash_ngrams, sampled_tokens


class ShapeReward:
    """Adds one term, named after its kind, to the rewards of a group. For several terms it stands several times in the
    pipeline. Both terms compare siblings, so groups of one are left as they are.

    `length`: of siblings that are right, 0.5 for the shortest down to -0.5 for the longest; of those that are wrong
    the same, but never above 0 (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    `diversity`: how much a right rollout differs from its siblings, 0 to 1: the mean over siblings of 1 minus the
    Jaccard similarity of their sets of n-grams of sampled tokens. Wrong rollouts get nothing, since being wrong in
    many ways is easy."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "shape"`."""

        term: Literal["length", "diversity"]
        """What is added."""
        weight: Annotated[float, Meta(ge=-100, le=100)] = 0.1
        """The term is multiplied by it. Keep it small beside what separates right from wrong."""
        on: str = ""
        """Named part of the verdict that says whether a rollout is right; default: the reward, before it is shaped."""
        right_from: float = 0.5
        """A rollout is right from this value on."""
        ngram: Positive = 4
        """Tokens that `diversity` compares at once."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the term of each sibling that gets one."""
        if len(group.rollouts) < 2:
            return KEEP
        config = self._config
        right = {one.sibling for one in group.rollouts if is_right(one, config.on, config.right_from)}
        values = _length_terms(group, right) if config.term == "length" else _diversity(group, right, config.ngram)
        terms = {number: config.weight * value for number, value in values.items() if value}
        return Shape(terms, config.term) if terms else KEEP


def is_right(scored: ScoredRollout, on: str, right_from: float) -> bool:
    """Return whether a rollout's reward or named part is large enough. One that lacks the part is wrong."""
    score = scored.score(on)
    return score is not None and score >= right_from


def _length_terms(group: ScoredGroup, right: set[int]) -> dict[int, float]:
    shortest = min(one.num_tokens for one in group.rollouts)
    longest = max(one.num_tokens for one in group.rollouts)
    if shortest == longest:
        return {}
    values = {one.sibling: 0.5 - (one.num_tokens - shortest) / (longest - shortest) for one in group.rollouts}
    return {number: value if number in right else min(0.0, value) for number, value in values.items()}


def _diversity(group: ScoredGroup, right: set[int], size: int) -> dict[int, float]:
    if not right:
        return {}
    sets = {one.sibling: frozenset(hash_ngrams(sampled_tokens(one), size)) for one in group.rollouts}
    return {
        number: sum(_distance(sets[number], other) for sibling, other in sets.items() if sibling != number)
        / (len(sets) - 1)
        for number in sorted(right)
    }


def _distance(some: frozenset[int], others: frozenset[int]) -> float:
    """Return 1 minus the Jaccard similarity; 0 for two empty sets."""
    union = len(some | others)
    return 1.0 - len(some & others) / union if union else 0.0
