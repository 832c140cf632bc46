"""Skips problems by what is in their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rftstream.data.operators.base import KEEP, Draw, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class Regex:
    """Skips problems that a regular expression finds, or those that another one does not find."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        r"""The settings of `op = "regex"`, for example `skip = "https?://"` for problems that need a page."""

        field: Literal["prompt", "answer"] = "prompt"
        """Where to look: in each message of the prompt, or in the reference answer (empty if there is none)."""
        skip: str | None = None
        """Problems in which it is found are skipped."""
        need: str | None = None
        """Problems in which it is not found are skipped."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.skip is None and config.need is None:
            raise ConfigError("skip: found neither skip nor need, expected at least one regular expression")
        self._skip, self._need = _compiled("skip", config.skip), _compiled("need", config.need)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem that the expressions leave out."""
        if self._config.field == "answer":
            texts = [draw.problem.answer or ""]
        else:
            texts = [message.content for message in draw.problem.messages]
        if self._skip is not None and any(self._skip.search(text) for text in texts):
            return Skip(f"{self._config.field} has {self._skip.pattern}")
        if self._need is not None and not any(self._need.search(text) for text in texts):
            return Skip(f"{self._config.field} lacks {self._need.pattern}")
        return KEEP


def _compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is no regular expression: {error}") from None
