"""Exact match: the completion, or what a pattern finds in it, is the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rftstream.errors import ConfigError
from rftstream.rewards.base import RewardInput, needed_answer
from rftstream.rewards.version import config_version


class ExactMatch:
    """1 if they are equal, else 0."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.exact]`."""

        strip: bool = True
        """White space around both is ignored."""
        casefold: bool = False
        """Upper and lower case are the same."""
        extract: str | None = None
        r"""A regular expression: its last match in the completion (its first group, if it has one) is compared, and
        no match is 0. For example `####\s*(.+)`."""

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
