r"""A judge: a served model reads problem and completion and says a score; any server with OpenAI's
`/v1/chat/completions`.

What it said without a score in it is no score of 0: the rollout then has no reward. What the policy wrote is put into
the prompt as it is; a policy may learn to talk a judge round, so look at what it scores high.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.served import UNSEEN, AskedModel, Concurrent, ServedConfig
from rftstream.rewards.version import config_version

PROMPT = """\
Judge how well the answer solves the problem.

<problem>
{prompt}
</problem>
<answer>
{completion}
</answer>

Think it over in a few sentences. Then end with one line, `Score: N`, with N from 0 (useless) to 10 (faultless)."""


class JudgeReward(Concurrent):
    """The judge's score, moved from its range to 0 to 1. Metric `score`: as it said it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ServedConfig):
        """The settings in `[rewards.judge]`."""

        prompt: str | None = None
        """What it is asked; {prompt}, {completion} and {answer} are filled in. Default: how well the completion solves
        the problem, as `Score: N` from 0 to 10."""
        system: str | None = None
        """Its system prompt."""
        pattern: str = r"(?i)score:\W*(-?\d+(?:\.\d+)?)"
        """A regular expression: the first group of its last match in what the judge said is the score."""
        low: float = 0.0
        """The score that becomes a reward of 0; below it there is none."""
        high: float = 10.0
        """The score that becomes a reward of 1; above it there is none."""
        max_tokens: Annotated[int, Meta(ge=1)] = 1024
        """Of its answer."""

    def __init__(self, config: Config) -> None:
        self._config = config
        try:
            self._pattern = re.compile(config.pattern)
        except re.error as error:
            raise ConfigError(f"rewards.judge.pattern: {config.pattern!r} is no regular expression: {error}") from None
        if self._pattern.groups < 1:
            raise ConfigError(f"rewards.judge.pattern: {config.pattern!r} has no group, expected one round the number")
        if not config.low < config.high:
            raise ConfigError(f"rewards.judge.low: got {config.low}, expected less than high = {config.high}")
        self._model = AskedModel("judge", config, "chat/completions")
        self.version = config_version("1", replace(config, **UNSEEN))  # type: ignore[arg-type]
        super().__init__(config.max_concurrent)

    def __call__(self, item: RewardInput) -> Score:
        said = self._said(item)
        found = list(self._pattern.finditer(said))
        try:
            score = float(found[-1][1])
        except (IndexError, TypeError, ValueError):
            raise RewardError(
                f"judge: no score in {said[-300:]!r}, expected a match of {self._pattern.pattern}"
            ) from None
        low, high = self._config.low, self._config.high
        if not math.isfinite(score) or not low <= score <= high:
            raise RewardError(f"judge: the score is {score:g}, expected one from {low:g} to {high:g}")
        return Score(reward=(score - low) / (high - low), metrics={"score": score})

    def _said(self, item: RewardInput) -> str:
        filled = {"prompt": item.prompt, "completion": item.completion, "answer": item.answer or ""}
        # in one go: what is filled in is not looked at again
        text = re.sub(r"\{(prompt|completion|answer)\}", lambda match: filled[match[1]], self._config.prompt or PROMPT)
        system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
        messages = [*system, {"role": "user", "content": text}]
        answer = self._model.ask({"messages": messages, "max_tokens": self._config.max_tokens})
        try:
            content = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            content = None
        if not isinstance(content, str):
            raise RewardError("judge: the server gave no message, expected choices[0].message.content")
        return content
