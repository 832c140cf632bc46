"""Rewards that compare siblings without a judge: majority vote, best of n, relative length, diversity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.base import RewardGroup, RewardInput, Score
from rftstream.rewards.math import MathReward
from rftstream.rewards.version import config_version


class MajorityVote:
    """1 if the answer is the one that most siblings gave, else 0: a label without a reference.

    Of several answers with equally many votes, the one that was given first is the label. Metrics: `majority_share`
    (share of the siblings that gave the label), and for problems with an answer `maj@k` (whether the label is right, k
    siblings were sampled). With `weight = 0` it is the metric alone.

    Sources: Wang et al., self-consistency (arXiv 2203.11171); Zuo et al., TTRL (arXiv 2504.16084)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.majority_vote]`."""

        extract: str | None = None
        r"""A regular expression: its last match in a completion (the first group, if it has one) is the answer.
        Default: the answer that the reward `math` would read, or else the last line."""
        equal: Literal["math", "text"] = "math"
        """When two answers are the same: if the reward `math` says so, or if their texts are equal but for case and
        white space."""
        min_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
        """Share of the siblings that must agree. If fewer do, there is no label, and all rewards are 0."""

    def __init__(self, config: Config) -> None:
        self._config = config
        try:
            self._pattern = None if config.extract is None else re.compile(config.extract)
        except re.error as error:
            raise ConfigError(
                f"rewards.majority_vote.extract: {config.extract!r} is no regular expression: {error}"
            ) from None
        self._math = MathReward(MathReward.Config(second_share=0.0)) if config.equal == "math" else None
        math = () if self._math is None else (self._math.version,)
        self.version = "+".join([config_version("1", config), *math])

    def score_group(self, group: RewardGroup) -> list[Score]:
        """Return the score of each sibling."""
        labels: list[str] = []
        votes = [self._vote(item, labels) for item in group.siblings]
        counts = Counter(vote for vote in votes if vote is not None)
        most, count = counts.most_common(1)[0] if counts else (None, 0)
        metrics = {"majority_share": count / len(votes)}
        item = group.siblings[0]
        if item.answer is not None:
            right = most is not None and self._same(item.answer, labels[most], item)
            metrics[f"maj@{group.size}"] = float(right)
        has_label = count > 0 and count >= self._config.min_share * len(votes)
        return [Score(reward=float(has_label and vote == most), metrics=metrics) for vote in votes]

    def _vote(self, item: RewardInput, labels: list[str]) -> int | None:
        """Return the number of the sibling's answer in `labels`, to which a new one is added. None for no answer."""
        text = self._answer(item)
        if text is None:
            return None
        for number, label in enumerate(labels):
            if self._same(label, text, item):
                return number
        labels.append(text)
        return len(labels) - 1

    def _answer(self, item: RewardInput) -> str | None:
        text = item.conclusion
        if self._pattern is not None:
            matches = list(self._pattern.finditer(text))
            return (matches[-1].group(1) if self._pattern.groups else matches[-1].group()) if matches else None
        if found := find_answers(text):
            return found[0].text
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None

    def _same(self, label: str, text: str, item: RewardInput) -> bool:
        if _plain(label) == _plain(text):
            return True
        if self._math is None:
            return False
        boxed = f"\\boxed{{{text}}}"
        try:
            return self._math(replace(item, completion=boxed, reasoning="", answer=label)).reward == 1.0
        except RewardError:  # it is nothing that can be compared as mathematics
            return False


class BestOfN:
    """1 for the siblings with the highest reward so far, 0 for the others.

    The reward so far is that of the rewards that compare no siblings, which may have the weight 0, and of those that
    do and come before it:

        reward = [{ name = "reward_model", weight = 0 }, { name = "best_of_n", by = "reward_model" }]

    Siblings with equal rewards are equally good."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.best_of_n]`."""

        by: str = ""
        """The part of the reward that is compared, without its weight. Default: the reward so far as a whole."""
        top: Annotated[int, Meta(ge=1)] = 1
        """Number of siblings that count as the best."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = config_version("1", config)

    def score_group(self, group: RewardGroup) -> list[float | RewardError]:
        """Return the score of each sibling. A sibling without a reward so far has none here."""
        rewards = earlier_rewards(group, "best_of_n", self._config.by)
        known = sorted((one for one in rewards if one is not None), reverse=True)
        least = known[min(self._config.top, len(known)) - 1] if known else 0.0
        missing = RewardError("best_of_n: the sibling has no reward so far")
        return [missing if one is None else float(one >= least) for one in rewards]


class RelativeLength:
    """0.5 for the shortest of the siblings, -0.5 for the longest, and evenly in between; at most 0 for a wrong answer.

    An answer is wrong if the reward so far is less than `right_at`. If there are no other rewards, no answer counts as
    wrong. If all are equally long, all have 0.

        reward = [{ name = "math" }, { name = "relative_length", weight = 0.2 }]

    Source: Kimi k1.5 (arXiv 2501.12599), length penalty."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.relative_length]`."""

        right_at: float = 1.0
        """Reward so far from which on an answer is right."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = config_version("1", config)

    def score_group(self, group: RewardGroup) -> list[float]:
        """Return the score of each sibling."""
        lengths = [item.num_tokens for item in group.siblings]
        least, span = min(lengths), max(lengths) - min(lengths)
        shares = [0.5 - (length - least) / span if span else 0.0 for length in lengths]
        rewards = group.rewards or (None,) * len(lengths)
        wrong = [reward is not None and reward < self._config.right_at for reward in rewards]
        return [min(0.0, share) if bad else share for share, bad in zip(shares, wrong, strict=True)]


class Diversity:
    """How much a completion differs from its siblings, from 0 (they say the same) to 1 (they share nothing).

    It is the mean distance to the siblings: 1 minus the share of token n-grams that both have among those that either
    has (Jaccard). A completion without siblings has 0. Use it beside a reward for the content.

    Source: the n-gram overlap between samples of self-BLEU (Zhu et al., arXiv 1802.01886), as sets."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.diversity]`."""

        n: Annotated[int, Meta(ge=1)] = 3
        """Tokens of an n-gram. A shorter completion is one n-gram."""

    def __init__(self, config: Config) -> None:
        self._n = config.n
        self.version = config_version("1", config)

    def score_group(self, group: RewardGroup) -> list[float]:
        """Return the score of each sibling."""
        grams = [self._grams(item) for item in group.siblings]
        apart = [0.0] * len(grams)
        for (own, one), (place, other) in combinations(enumerate(grams), 2):
            distance = _distance(one, other)
            apart[own] += distance
            apart[place] += distance
        return [total / max(1, len(grams) - 1) for total in apart]

    def _grams(self, item: RewardInput) -> set[tuple[Any, ...]]:
        units: Sequence[Any] = item.completion_ids or item.completion.split()
        return {tuple(units[start : start + self._n]) for start in range(max(1, len(units) - self._n + 1))}


def earlier_rewards(group: RewardGroup, reward: str, by: str = "") -> Sequence[float | None]:
    """Return the reward so far of each sibling, or that of the part `by`. RewardError, which names `reward`, if there
    is none."""
    rewards = [parts.get(by) for parts in group.parts] if by else list(group.rewards)
    if not any(one is not None for one in rewards):
        found = ", ".join(sorted({name for parts in group.parts for name in parts})) or "none"
        wanted = f"the part {by!r}" if by else "a reward"
        raise RewardError(f"{reward}: found {found} beside it in the list of rewards, expected {wanted}")
    return rewards


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def _distance(one: set[Any], other: set[Any]) -> float:
    return 1.0 - len(one & other) / len(one | other)
