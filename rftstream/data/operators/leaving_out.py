"""Operators that leave out groups, or rollouts of a group: those that teach nothing, and spoilt ones.

Shapes: N sampled tokens of all segments, in order.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Fraction, NotNegative, Positive
from rftstream.data.operators.base import (
    KEEP,
    ExperienceDecision,
    Mask,
    Reject,
    ScoredGroup,
    ScoredRollout,
    Seed,
    TokenSpan,
)
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import hash_ngrams, rollout_of, sampled_logprobs, sampled_tokens
from rftstream.errors import ConfigError


def all_tokens(scored: ScoredRollout) -> tuple[TokenSpan, ...]:
    """Return the spans that cover all tokens of a rollout."""
    segments = rollout_of(scored).segments
    return tuple(TokenSpan(number, 0, segment.token_ids.shape[0]) for number, segment in enumerate(segments))


def leave_out(
    group: ScoredGroup,
    found: Mapping[int, str],
    action: Literal["reject", "mask"],
    masked: Callable[[ScoredRollout], tuple[TokenSpan, ...]] = all_tokens,
) -> ExperienceDecision:
    """Return the decision about the siblings in `found`, which maps a sibling to the reason. `masked`: returns the
    tokens of a sibling that are not trained on, if the action is `mask`."""
    if not found:
        return KEEP
    reason = ", ".join(sorted(set(found.values())))
    if action == "mask":
        return Mask(
            {rollout.sibling: masked(rollout) for rollout in group.rollouts if rollout.sibling in found}, reason
        )
    return Reject(reason, tuple(found))


class Truncated:
    """Rejects or masks rollouts that a limit cut off (overlong filtering, as in DAPO, arXiv:2503.14476, section 3.4).
    Their reward says little about the full attempt."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "truncated"`."""

        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for comparing rewards but train on none of their tokens."""
        max_share: Fraction = 1.0
        """Largest share of truncated rollouts; a group with more is rejected as a whole."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about truncated siblings."""
        cut = [rollout for rollout in group.rollouts if rollout.truncated]
        if len(cut) > self._config.max_share * len(group.rollouts):
            return Reject("too many were cut off")
        return leave_out(group, {one.sibling: "a limit ended it" for one in cut}, self._config.action)


class Repetition:
    """Rejects or masks repetitive rollouts, even if their answer is right: too many of their n-grams of sampled tokens
    occurred before in the rollout."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "repetition"`."""

        ngram: Positive = 8
        """Number of tokens in an n-gram."""
        max_share: Fraction = 0.3
        """Largest share of repeated n-grams; rollouts with more are left out."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for comparing rewards but train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about repetitive siblings."""
        config = self._config
        found = [
            rollout.sibling for rollout in group.rollouts if _repeated_share(rollout, config.ngram) > config.max_share
        ]
        return leave_out(group, dict.fromkeys(found, "too repetitive"), config.action)


def _repeated_share(scored: ScoredRollout, size: int) -> float:
    """Return the share of n-grams of sampled tokens that occurred before; 0 for rollouts of fewer than 2 n-grams."""
    if scored.num_tokens <= size:
        return 0.0
    ngrams = hash_ngrams(sampled_tokens(scored), size)
    return 1.0 - len(set(ngrams)) / len(ngrams) if len(ngrams) > 1 else 0.0


_IMPOSSIBLE = -1e4
"""Replaces a logprob that is minus infinity or NaN. Such a token was sampled anyway, so something is wrong."""
_LAYOUT = frozenset("\n\r\t\f")
_REPLACEMENT = "\ufffd"
"""The character that a decoder writes for bytes that encode no character."""


class Gibberish:
    """Rejects or masks rollouts that are not text: they contain characters that no text has, or tokens that the policy
    itself considered unlikely, by their behavior logprobs."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "gibberish"`."""

        max_strange_share: Fraction = 0.02
        """Largest share of characters that no text has; rollouts with more are left out. These are replacement
        characters, control characters other than line breaks and tabs, and code points without a meaning."""
        min_mean_logprob: Annotated[float, Meta(lt=0)] | None = None
        """Smallest mean behavior logprob, in nats per token; rollouts below it are left out. Default: not checked. It
        depends on the temperature: a healthy policy has about minus its entropy, which `status` shows for a run."""
        window: Count = 0
        """Number of consecutive tokens over which the mean is taken. The worst window counts, since a text may turn
        into gibberish after a good beginning. 0: all tokens."""
        spike_logprob: Annotated[float, Meta(lt=0)] = -10.0
        """Behavior logprob, in nats, below which a sampled token is a spike."""
        max_spike_share: Fraction = 1.0
        """Largest share of spikes; rollouts with more are left out. 1: spikes are not checked."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for comparing rewards but train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about siblings that are gibberish."""
        found = {rollout.sibling: reason for rollout in group.rollouts if (reason := self._reason(rollout))}
        return leave_out(group, found, self._config.action)

    def _reason(self, scored: ScoredRollout) -> str:
        """Return the reason why a rollout is gibberish; empty if it is not."""
        config = self._config
        text = "".join(turn.content for turn in rollout_of(scored).turns if turn.role == "assistant")
        if strange_share(text) > config.max_strange_share:
            return "strange characters"
        if config.min_mean_logprob is None and config.max_spike_share == 1:
            return ""
        logprobs_N = np.nan_to_num(sampled_logprobs(scored), nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE)
        if not len(logprobs_N):
            return ""
        if config.min_mean_logprob is not None and worst_mean(logprobs_N, config.window) < config.min_mean_logprob:
            return "unlikely tokens"
        if float(np.mean(logprobs_N < config.spike_logprob)) > config.max_spike_share:
            return "spikes of entropy"
        return ""


def strange_share(text: str) -> float:
    """Return the share of characters that no text has; 0 for an empty text."""
    counts = Counter(text)  # each distinct character is looked up once, since texts are long and alphabets are not
    return sum(count for character, count in counts.items() if _is_strange(character)) / len(text) if text else 0.0


def _is_strange(character: str) -> bool:
    if character == _REPLACEMENT:
        return True
    # Cc control, Cn unassigned, Co private use, Cs surrogate
    return unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in _LAYOUT


def worst_mean(values_N: np.ndarray, window: int) -> float:
    """Return the smallest mean of `window` consecutive values; the mean of all if there are fewer or `window` is 0."""
    if not window or len(values_N) <= window:
        return float(np.mean(values_N))
    sums = np.cumsum(np.concatenate([np.zeros(1), values_N]))
    return float(np.min(sums[window:] - sums[:-window]) / window)


_SCALE = 0.6745
"""Median absolute deviation of the normal distribution with standard deviation 1."""


class Outliers:
    """Rejects or masks rollouts whose reward or length is far from the others', for example after a scorer's failure.

    The distance is the modified z-score, 0.6745 (x - median) / MAD (Iglewicz and Hoaglin, How to Detect and Handle
    Outliers, 1993). MAD is the median of the distances to the median.

    If more than half of the values are the same, MAD is 0 and nothing is an outlier. So a rare success among rewards of
    0 and 1 is kept."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "outliers"`."""

        of: Literal["reward", "length"] = "length"
        """Compared value: the reward, before operators shape it, or the number of sampled tokens."""
        on: str = ""
        """Named part of the verdict that is compared instead of the reward. Only within groups."""
        within: Literal["group", "taskset"] = "group"
        """Rollouts to compare with: the siblings, or the rollouts in the newest 64 groups of the taskset that have an
        outcome."""
        max_score: AboveZero = 3.5
        """Largest modified z-score; rollouts with a greater one are left out."""
        side: Literal["both", "high", "low"] = "both"
        """Leave out rollouts far above the median, far below, or both."""
        min_values: Positive = 5
        """Smallest number of values to compare with; with fewer, nothing is an outlier."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for comparing rewards but train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.on and (config.of != "reward" or config.within != "group"):
            raise ConfigError(
                f'on: got {config.on!r} with of = "{config.of}" and within = "{config.within}", expected '
                'of = "reward" and within = "group"; outcomes do not say parts of single rollouts'
            )

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about outliers. A rollout that lacks the part is no outlier."""
        config = self._config
        values = {rollout.sibling: value for rollout in group.rollouts if (value := self._value(rollout)) is not None}
        if config.within == "group":
            others: Sequence[float] = list(values.values())
        else:
            past = facts.taskset(group.taskset)
            others = past.recent_rewards() if config.of == "reward" else past.recent_lengths()
        if len(others) < config.min_values:
            return KEEP
        middle = median(others)
        deviation = median(abs(value - middle) for value in others)
        found = [number for number, value in values.items() if self._is_far(value - middle, deviation)]
        return leave_out(group, dict.fromkeys(found, f"{config.on or config.of} far from the others"), config.action)

    def _value(self, scored: ScoredRollout) -> float | None:
        return float(scored.num_tokens) if self._config.of == "length" else scored.score(self._config.on)

    def _is_far(self, distance: float, deviation: float) -> bool:
        if (self._config.side == "high" and distance < 0) or (self._config.side == "low" and distance > 0):
            return False
        return deviation > 0 and _SCALE * abs(distance) / deviation > self._config.max_score


class Stale:
    """Rejects rollouts with too old tokens, or masks these tokens. The age of a token is the trainer's version when the
    group would be trained, minus the version that sampled the token.

    `feeder.max_staleness` applies to groups: one too old sibling costs all of them. Rejected here, it costs only
    itself."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "stale"`."""

        max_age: Count = 1
        """Greatest age of a token, in versions."""
        action: Literal["reject", "mask"] = "reject"
        """Leave the rollouts out of the group, or keep them and do not train on their old tokens.
        `feeder.max_staleness` counts every token, masked or not, so masking needs a smaller number here than there."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return the decision about old rollouts or tokens."""
        if group.version is None:
            return KEEP
        oldest = group.version - self._config.max_age
        old = [
            rollout
            for rollout in group.rollouts
            if rollout.oldest_version is not None and rollout.oldest_version < oldest
        ]
        found = {one.sibling: "too old" for one in old}
        return leave_out(group, found, self._config.action, lambda scored: _tokens_before(scored, oldest))


def _tokens_before(scored: ScoredRollout, version: int) -> tuple[TokenSpan, ...]:
    """Return the spans of tokens that older versions sampled."""
    return tuple(
        TokenSpan(number, span.start, span.start + span.count)
        for number, segment in enumerate(rollout_of(scored).segments)
        for span in segment.versions
        if span.version < version
    )


class ZeroVariance:
    """Rejects groups in which all rewards are equal: the policy learns nothing from comparing them (dynamic sampling of
    DAPO, arXiv:2503.14476, section 3.2).

    `buffer.zero_variance = "replace"` puts this operator before all others, with its defaults."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "zero_variance"`."""

        on: str = ""
        """Named part of the verdict that has to differ; default: the reward, or that of some role, before operators
        shape it. If a reward has
        several parts, name the one for correctness: a term for length or style nearly always differs, and lets groups
        pass in which all attempts failed."""
        min_spread: NotNegative = 0.0
        """Difference between the largest and the smallest value that has to be exceeded."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return Reject for a group without a spread. A rollout that lacks the part counts as different from rollouts
        that have it."""
        scores = [rollout.score(self._config.on) for rollout in group.rollouts]
        found = [score for score in scores if score is not None]
        if 0 < len(found) < len(scores):
            return KEEP
        roles = set() if self._config.on else {role for rollout in group.rollouts for role in rollout.roles}
        for column in (scores, *([one.roles.get(role) for one in group.rollouts] for role in sorted(roles))):
            numbers = [score for score in column if score is not None]
            if numbers and max(numbers) - min(numbers) > self._config.min_spread:
                return KEEP
        return Reject(f"no spread of {self._config.on}" if self._config.on else "")
