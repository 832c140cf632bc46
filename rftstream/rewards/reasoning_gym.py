"""The scorer that a reasoning-gym task brings along."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rftstream.data.tasksets.reasoning_gym import import_reasoning_gym, unpack_value
from rftstream.errors import MissingChecker, RewardError, importing
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.version import config_version


class ReasoningGymReward:
    """What the task's own `score_answer` says of the completion's answer, usually between 0 and 1."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.reasoning_gym]`."""

        tag: str | None = "answer"
        """The answer is what the last <tag>...</tag> holds, or the whole text when it has none."""
        require_tag: bool = False
        """A completion without the tag gets 0."""

    def __init__(self, config: Config) -> None:
        with importing("rewards.reasoning_gym", "reasoning-gym", install="reasoning-gym", error_type=MissingChecker):
            reasoning_gym = import_reasoning_gym()
        self._config = config
        self._create = reasoning_gym.create_dataset
        self._datasets: dict[str, Any] = {}
        self.version = config_version("1", config, "reasoning-gym")

    def __call__(self, item: RewardInput) -> Score:
        self.check(item)
        name, settings, entry = item.info["dataset"], item.info["config"], unpack_value(item.info["entry"])
        answer = self._extract(item.completion)
        reward = 0.0 if answer is None else self._dataset(name, settings).score_answer(answer, entry)
        return Score(reward=reward, metrics={"answered": float(answer is not None)})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem does not come from reasoning-gym."""
        for name in ("dataset", "config", "entry"):
            if name not in item.info:
                raise RewardError(f"reasoning_gym: the problem has no {name!r}; its taskset must be reasoning_gym")

    def _extract(self, completion: str) -> str | None:
        tag = self._config.tag
        if tag is None:
            return completion.strip()
        found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, re.DOTALL)
        if found:
            return str(found[-1]).strip()
        return None if self._config.require_tag else completion.strip()

    def _dataset(self, name: str, settings: Any) -> Any:
        key = f"{name} {settings!r}"
        if key not in self._datasets:
            self._datasets[key] = self._create(name, **unpack_value(settings))
        return self._datasets[key]
