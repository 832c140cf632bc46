"""Rewards of a few lines each: the environment's reward, an exact match, a form, and two penalties."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.verdicts import BY_ENVIRONMENT
from rftstream.errors import ConfigError, NoReward, RewardError
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.version import config_version


class EnvironmentReward:
    """The reward that the environment or agent gave, unchanged.

    It is the sum of the turns' rewards, with their named parts; of roles with rewards of their own, their mean, if an
    agent gave no other. Used alone, it trains on the environment's reward. In a
    list of rewards it is one part among others:

        reward = [{ name = "environment" }, { name = "my_pkg.rewards:is_short", weight = 0.1 }]

    A rollout without any such reward is unscorable for the reason `no_reward`: it never counts as a reward of 0. A
    reward that is not finite makes it unscorable, too."""

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.environment]`."""

    def __init__(self, config: Config) -> None:
        self.version = "1"

    def __call__(self, item: RewardInput) -> Score:
        if item.environment_error is not None:
            raise RewardError(f"{BY_ENVIRONMENT}{item.environment_error}")
        reward, roles = item.environment_reward, item.environment_roles
        if reward is None and (given := [one for one in roles.values() if one is not None]):
            reward = sum(given) / len(given)
        if reward is None:
            raise NoReward(
                f"{BY_ENVIRONMENT}the rollout was cut off at its limit of tokens before environment or agent gave a "
                "reward; raise sampling.max_tokens, or let it give one in each turn"
                if item.truncated
                else f"{BY_ENVIRONMENT}neither environment nor agent gave a reward, expected one in at least one turn; "
                "let it give one, or use another reward"
            )
        return Score(reward=reward, parts=item.environment_parts, roles=roles)


class ExactMatch:
    """Exact match: 1 if the completion, or the match of a pattern in it, equals the answer, else 0."""

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.exact]`."""

        strip: bool = True
        """Ignore white space around both."""
        casefold: bool = False
        """Treat upper and lower case as the same."""
        extract: str | None = None
        r"""A regular expression: its last match in the completion (the first group, if it has one) is compared; no
        match gives 0. For example `####\s*(.+)`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        try:
            self._pattern = re.compile(config.extract) if config.extract is not None else None
        except re.error as error:
            raise ConfigError(f"rewards.exact.extract: {config.extract!r} is no regular expression: {error}") from None
        self.version = config_version("2", config)

    def __call__(self, item: RewardInput) -> float:
        answer, found = needed_answer(item, "exact"), self._extract(item.conclusion)
        return float(found is not None and self._normalize(found) == self._normalize(answer))

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer."""
        needed_answer(item, "exact")

    def _extract(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion
        matches = list(self._pattern.finditer(completion))
        if not matches:
            return None
        return matches[-1].group(1) if self._pattern.groups else matches[-1].group()

    def _normalize(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.casefold else text


class WellFormedReward:
    """1 or 0 for whether a completion has the required form, such as `<think> ... </think> <answer> ... </answer>`.

    The whole completion must have the form. The reward is most useful as a gate, so that an answer in the wrong form
    gets no reward:

        reward = [{ name = "well_formed", use = "gate" }, { name = "math" }]

    Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2, format rewards."""

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.well_formed]`."""

        tags: tuple[str, ...] = ("think", "answer")
        """These blocks, in this order, each once and with nothing but white space between them."""
        pattern: str | None = None
        """A regular expression that the whole completion has to match, instead of the blocks; `.` matches any
        character, including line breaks."""
        begun: str = ""
        """Beginning of the answer that the chat template has already written, such as `<think>`. It is put before the
        completion.
        """

    def __init__(self, config: Config) -> None:
        self._config = config
        pattern = config.pattern
        if pattern is None:
            if not config.tags or not all(re.fullmatch(r"[\w.-]+", tag) for tag in config.tags):
                raise ConfigError(f"rewards.well_formed.tags: got {list(config.tags)}, expected names such as 'think'")
            pattern = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in map(re.escape, config.tags))
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"rewards.well_formed.pattern: {pattern!r} is no regular expression: {error}") from None
        self.version = config_version("1", config)

    def __call__(self, item: RewardInput) -> float:
        return float(self._pattern.fullmatch((self._config.begun + item.completion).strip()) is not None)


class LengthPenalty:
    """A penalty for long completions.

    0 up to `soft` sampled tokens, then falling evenly to -1 at `hard`, and -1 from there on. Use it beside a reward for
    the content:

        reward = [{ name = "math" }, { name = "length_penalty", soft = 800, hard = 1000, weight = 0.5 }]

    Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment. The algorithms also have such a setting
    (`overlong_share`), relative to `max_tokens`; it does not change the recorded reward."""

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.length_penalty]`."""

        soft: Annotated[int, Meta(ge=0)]
        """Number of tokens, over all turns, without a penalty."""
        hard: Annotated[int, Meta(ge=1)]
        """Number of tokens from which on the penalty is -1."""

    def __init__(self, config: Config) -> None:
        if not config.soft < config.hard:
            raise ConfigError(
                f"rewards.length_penalty.soft: got {config.soft}, expected less than hard = {config.hard}"
            )
        self._config = config
        self.version = config_version("1", config)

    def __call__(self, item: RewardInput) -> float:
        soft, hard = self._config.soft, self._config.hard
        return -min(max((item.num_tokens - soft) / (hard - soft), 0.0), 1.0)


class NgramPenalty:
    """A penalty for repetitive completions.

    The reward is minus the share of the completion's token n-grams that occurred before in it: 0 for none, near -1 for
    a loop. Use it beside a reward for the content:

        reward = [{ name = "math" }, { name = "ngram_penalty", weight = 0.5 }]

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373), its n-gram repetition
    penalty."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.ngram_penalty]`."""

        n: Annotated[int, Meta(ge=1)] = 8
        """Tokens of an n-gram. With fewer, short phrases count as well, which honest texts also repeat."""

    def __init__(self, config: Config) -> None:
        self._n = config.n
        self.version = config_version("1", config)

    def __call__(self, item: RewardInput) -> float:
        ids, n = item.completion_ids, self._n
        total = len(ids) - n + 1
        if total <= 0:
            return 0.0
        return len({tuple(ids[start : start + n]) for start in range(total)}) / total - 1.0
