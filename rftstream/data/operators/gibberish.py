"""Finds rollouts that are no text: characters that no text has, or tokens that the policy itself held for unlikely."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from rftstream.config.ranges import Count, Fraction
from rftstream.data.operators.base import KEEP, ExperienceDecision, Mask, Reject, ScoredGroup, ScoredRollout, Seed
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.sampled import rollout_of, sampled_logprobs
from rftstream.data.operators.truncated import all_tokens

_IMPOSSIBLE = -1e4
"""Stands for a logprob that is minus infinity or no number: sampled all the same, so something is wrong."""
_LAYOUT = frozenset("\n\r\t\f")
_REPLACEMENT = "\ufffd"
"""What a decoder writes in the place of bytes that are no character."""


class Gibberish:
    """Rejects or masks rollouts by the text that the policy wrote, and by the behavior logprobs of its tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "gibberish"`."""

        max_strange_share: Fraction = 0.02
        """Rollouts of whose characters a greater share is none of a text are left out: replacement characters, control
        characters other than line breaks and tabs, and code points without a meaning."""
        min_mean_logprob: Annotated[float, Meta(lt=0)] | None = None
        """Rollouts whose mean behavior logprob is smaller are left out, in nats per token; default: not looked at. It
        depends on the temperature: a healthy policy has about minus its entropy. `status` shows that of a run."""
        window: Count = 0
        """With a number of tokens, the mean is that of the worst stretch of so many tokens, since a text may become
        gibberish after a good beginning. 0: of all tokens."""
        spike_logprob: Annotated[float, Meta(lt=0)] = -10.0
        """A sampled token with a smaller behavior logprob is a spike, in nats."""
        max_spike_share: Fraction = 1.0
        """Rollouts with a greater share of spikes are left out; 1: spikes are not looked at."""
        action: Literal["reject", "mask"] = "reject"
        """Leave them out of the group, or keep them for the comparison of rewards and train on none of their tokens."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def decide(self, group: ScoredGroup, facts: Facts, seed: Seed) -> ExperienceDecision:
        """Return what becomes of the siblings that are gibberish, if there are some."""
        found = {one.sibling: reason for one in group.rollouts if (reason := self._reason(one))}
        if not found:
            return KEEP
        reason = ", ".join(sorted(set(found.values())))
        if self._config.action == "mask":
            return Mask({one.sibling: all_tokens(one) for one in group.rollouts if one.sibling in found}, reason)
        return Reject(reason, tuple(found))

    def _reason(self, scored: ScoredRollout) -> str:
        """Return why a rollout is gibberish; empty if it is not."""
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
    counts = Counter(text)  # each character is looked up once, since texts are long and alphabets are not
    return sum(count for character, count in counts.items() if _is_strange(character)) / len(text) if text else 0.0


def _is_strange(character: str) -> bool:
    if character == _REPLACEMENT:
        return True
    # Cc control, Cn unassigned, Co private use, Cs half a character
    return unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in _LAYOUT


def worst_mean(values_N: np.ndarray, window: int) -> float:
    """Return the smallest mean of `window` values in a row, or the mean of all if there are fewer or `window` is 0."""
    if not window or len(values_N) <= window:
        return float(np.mean(values_N))
    sums = np.cumsum(np.concatenate([np.zeros(1), values_N]))
    return float(np.min(sums[window:] - sums[:-window]) / window)
