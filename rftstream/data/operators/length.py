"""Skips problems whose text is too short or too long."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.config.ranges import Count, Positive
from rftstream.data.operators.base import KEEP, Draw, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class Length:
    """Skips problems by the characters of their prompt, all messages together."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "length"`."""

        min_characters: Count = 0
        """Shorter prompts are skipped."""
        max_characters: Positive | None = None
        """Longer prompts are skipped; default: none. The context of the model is looked after by `too_long` of the
        taskset."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.max_characters is not None and config.max_characters < config.min_characters:
            raise ConfigError(
                f"max_characters: got {config.max_characters}, expected at least min_characters = "
                f"{config.min_characters}"
            )

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a prompt out of range."""
        length = sum(len(message.content) for message in draw.problem.messages)
        if length < self._config.min_characters:
            return Skip("too short")
        if self._config.max_characters is not None and length > self._config.max_characters:
            return Skip("too long")
        return KEEP
