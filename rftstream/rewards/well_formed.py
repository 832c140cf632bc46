"""Whether a completion has the form that was asked for, such as `<think> ... </think> <answer> ... </answer>`.

It is most useful as a gate, so that an answer in the wrong form has no reward, whatever it says:

    reward = [{ name = "well_formed", use = "gate" }, { name = "math" }]

Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2, format rewards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rftstream.errors import ConfigError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.version import config_version


class WellFormedReward:
    """1 if the whole completion has the form, else 0."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.well_formed]`."""

        tags: tuple[str, ...] = ("think", "answer")
        """These blocks, in this order, each once and with nothing but white space between them."""
        pattern: str | None = None
        """A regular expression that the whole completion has to match, instead of the blocks; `.` is any character,
        also the end of a line."""
        begun: str = ""
        """What the chat template has written of the answer already, such as `<think>`: it is put before the completion.
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
