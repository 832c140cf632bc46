"""Keeps rare successes from being drowned: where few siblings are right, part of the wrong ones is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.config.ranges import Positive
from rftstream.contracts.ids import derive_seed
from rftstream.data.operators.base import KEEP, ExperienceDecision, Reject, ScoredGroup, Seed
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.shape import is_right


class Amplify:
    """Rejects wrong siblings, chosen by the seed, until the share of right ones is large enough. Groups without a right
    sibling, and groups with enough of them, stay as they are.

    Advantages are then made of the siblings that are left. With rewards of 0 and 1 and the group's mean as baseline,
    one success among 8 has the advantage 7/8 and is 1/8 of the group, a product of 0.11. With 3 failures left it has
    3/4 and is 1/4 of the group, a product of 0.19. (Max-variance down-sampling, arXiv:2504.13818, drops siblings for a
    like reason.)"""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "amplify"`."""

        min_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
        """Wrong siblings are left out until at least this share is right, or until `min_wrong` are left."""
        min_wrong: Positive = 2
        """So many wrong siblings stay, since a group without any teaches nothing. With `buffer.min_siblings` above
        this number and the right ones together, the group would be filtered."""
        on: str = ""
        """Named part of the verdict that says whether a rollout is right; default: the reward, before it is shaped."""
        right_from: float = 0.5
        """A rollout is right from this value on."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return which of the wrong siblings are left out."""
        config = self._config
        wrong = [one.sibling for one in group.rollouts if not is_right(one, config.on, config.right_from)]
        num_right = len(group.rollouts) - len(wrong)
        if not num_right:
            return KEEP
        num_kept = max(config.min_wrong, int(num_right / config.min_share + 1e-9) - num_right)
        if len(wrong) <= num_kept:
            return KEEP
        by_luck = sorted(wrong, key=lambda sibling: derive_seed(seed, sibling))
        return Reject("one failure of many", tuple(sorted(by_luck[num_kept:])))
