"""The scorer of a reasoning-gym task."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.data.gym_entries import KEYS, EntryScorer, find_answer
from rftstream.errors import MissingChecker, RewardError, importing
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.version import config_version


class ReasoningGymReward:
    """The score that the task's own `score_answer` gives to the completion's answer, usually between 0 and 1."""

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.reasoning_gym]`."""

        tag: str | None = "answer"
        """The answer is the content of the last <tag>...</tag>, or the whole text if there is none."""
        require_tag: bool = False
        """A completion without the tag gets 0."""

    def __init__(self, config: Config) -> None:
        with importing("rewards.reasoning_gym", "reasoning-gym", install="reasoning-gym", error_type=MissingChecker):
            self._score = EntryScorer()
        self._config = config
        self.version = config_version("2", config, "reasoning-gym")

    def __call__(self, item: RewardInput) -> Score:
        self.check(item)
        answer, is_tagged = find_answer(item.conclusion, self._config.tag)
        answered = is_tagged or not self._config.require_tag
        reward = self._score(answer, item.info) if answered else 0.0
        return Score(reward=reward, metrics={"answered": float(answered)})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem does not come from reasoning-gym."""
        for name in KEYS:
            if name not in item.info:
                raise RewardError(f"reasoning_gym: the problem has no {name!r}; its taskset must be reasoning_gym")
