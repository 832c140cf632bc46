"""The forms of a judgement: a score in prose, a rubric in JSON, or a comparison in both orders.

A form defines the questions, reads the judge's answers, and makes a score from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from msgspec import Meta

from rftstream.core.samples import plain_sum
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.answers.json_values import json_objects
from rftstream.rewards.answers.thoughts import after_thoughts
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.judge_prompts import (
    PAIR,
    PAIR_FORMAT,
    RUBRIC,
    RUBRIC_WITH_ANSWER,
    SCORE,
    fill_prompt,
    texts_of,
)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_SHOWN = 300
"""Number of characters of a judge's answer that an error shows."""


class UnreadableJudgement(Exception):
    """The judge's answer has no judgement in the required form."""


class JudgeForm(Protocol):
    """A form of judgement. JudgeReward asks the judge each of `questions`, reads each answer with `read`, and gives the
    results to `score`."""

    schema: dict[str, Any] | None
    """JSON schema of an answer; None if the judge answers in prose."""
    wanted: str
    """Instruction to the judge after an unreadable answer."""

    def questions(self, item: RewardInput) -> list[str]:
        """Return the questions to the judge about a rollout. RewardError if the problem lacks something."""

    def read(self, said: str) -> Any:
        """Return the judgement in the judge's answer. UnreadableJudgement if there is none."""

    def score(self, found: Sequence[Any]) -> Score:
        """Return the score of the judgements, in the order of the questions."""


@dataclass(frozen=True, kw_only=True)
class JudgeCriterion:
    """A criterion of a rubric."""

    name: str
    """Name of the part of the verdict: letters, digits and `_`."""
    about: str = ""
    """The aspect that the judge looks at."""
    weight: Annotated[float, Meta(ge=0)] = 1.0
    """Weight of the criterion in the reward, relative to the others."""
    low: float = 0.0
    """The worst number that the judge may give."""
    high: float = 10.0
    """The best one."""


class ScoreForm:
    """A score in prose: the last match of a pattern."""

    schema: dict[str, Any] | None = None

    def __init__(self, prompt: str | None, pattern: str, low: float, high: float, *, fenced: bool) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"rewards.judge.pattern: {pattern!r} is no regular expression: {error}") from None
        if self._pattern.groups < 1:
            raise ConfigError(f"rewards.judge.pattern: {pattern!r} has no group, expected one round the number")
        if not low < high:
            raise ConfigError(f"rewards.judge.low: got {low}, expected less than high = {high}")
        self._prompt, self._fenced = prompt or SCORE, fenced or prompt is None
        self._low, self._high = low, high
        self.wanted = "End with the line that was asked for, with a number in range."

    def questions(self, item: RewardInput) -> list[str]:
        """Return the prompt with problem and completion."""
        return [fill_prompt(self._prompt, texts_of(item), {}, fenced=self._fenced)]

    def read(self, said: str) -> float:
        """Return the judge's score, on the judge's own scale."""
        found = list(self._pattern.finditer(after_thoughts(said)))
        try:
            score = float(found[-1][1])
        except (IndexError, TypeError, ValueError):
            raise UnreadableJudgement(
                f"no score in {said[-_SHOWN:]!r}, expected a match of {self._pattern.pattern}"
            ) from None
        if not math.isfinite(score) or not self._low <= score <= self._high:
            raise UnreadableJudgement(f"the score is {score:g}, expected one from {self._low:g} to {self._high:g}")
        return score

    def score(self, found: Sequence[float]) -> Score:
        """Return the score, rescaled to 0 to 1."""
        return Score(reward=(found[0] - self._low) / (self._high - self._low), metrics={"score": found[0]})


class RubricForm:
    """A number for each criterion, in a JSON object. Each becomes a part of the verdict, from 0 to 1."""

    def __init__(self, prompt: str | None, criteria: Sequence[JudgeCriterion], *, fenced: bool) -> None:
        names = [criterion.name for criterion in criteria]
        for criterion in criteria:
            if not _NAME.fullmatch(criterion.name) or criterion.name == "reasoning" or names.count(criterion.name) > 1:
                raise ConfigError(
                    f"rewards.judge.rubric: the name {criterion.name!r} cannot be used, expected names of letters, "
                    "digits and _, each once, and none 'reasoning'"
                )
            if not (math.isfinite(criterion.low) and math.isfinite(criterion.high) and criterion.low < criterion.high):
                raise ConfigError(
                    f"rewards.judge.rubric: {criterion.name} goes from {criterion.low} to {criterion.high}, expected "
                    "low less than high"
                )
        if not sum(criterion.weight for criterion in criteria) > 0:
            raise ConfigError("rewards.judge.rubric: every weight is 0, expected one above")
        self._criteria = tuple(criteria)
        self._prompt, self._fenced = prompt, fenced or prompt is None
        self.schema: dict[str, Any] | None = _schema(
            {one.name: {"type": "number", "minimum": one.low, "maximum": one.high} for one in criteria}
        )
        fields = ", ".join(f'"{name}": N' for name in names)
        self.wanted = f'Answer with one JSON object and nothing else: {{"reasoning": "...", {fields}}}.'

    def questions(self, item: RewardInput) -> list[str]:
        """Return the prompt with problem, completion, rubric, and the right answer if there is one."""
        lines = [
            f"- {one.name} (a number from {one.low:g} to {one.high:g}){': ' + one.about if one.about else ''}"
            for one in self._criteria
        ]
        rubric = "\n".join(["The rubric:", *lines, "", f"Think it over briefly. {self.wanted}"])
        prompt = self._prompt or (RUBRIC if item.answer is None else RUBRIC_WITH_ANSWER)
        if "{rubric}" not in prompt:
            prompt += "\n\n{rubric}"
        return [fill_prompt(prompt, texts_of(item), {"rubric": rubric}, fenced=self._fenced)]

    def read(self, said: str) -> dict[str, float]:
        """Return the numbers by criterion."""
        names = [one.name for one in self._criteria]
        numbers: dict[str, float] = _only([self._numbers(one) for one in _objects_with(said, names)], said)
        return numbers

    def score(self, found: Sequence[Mapping[str, float]]) -> Score:
        """Return the weighted mean of the parts."""
        parts = {one.name: (found[0][one.name] - one.low) / (one.high - one.low) for one in self._criteria}
        total = plain_sum(one.weight for one in self._criteria)
        return Score(reward=plain_sum(one.weight * parts[one.name] for one in self._criteria) / total, parts=parts)

    def _numbers(self, value: Mapping[str, Any]) -> dict[str, float]:
        return {one.name: _number(value[one.name], one) for one in self._criteria}


class PairForm:
    """A comparison of the policy's answer with a reference, in both orders."""

    def __init__(self, prompt: str | None, column: str, *, fenced: bool, name: str = "judge") -> None:
        if prompt is not None and not ("{first}" in prompt and "{second}" in prompt):
            raise ConfigError(
                f"rewards.{name}.prompt: expected {{first}} and {{second}}, the answers that are compared"
            )
        self._prompt, self._column = prompt or PAIR, column
        self._fenced = fenced or prompt is None
        if "{format}" not in self._prompt:
            self._prompt += "\n\n{format}"
        self.schema: dict[str, Any] | None = _schema({"better": {"type": "string", "enum": ["A", "B", "tie"]}})
        self.wanted = PAIR_FORMAT

    def questions(self, item: RewardInput) -> list[str]:
        """Return the prompt with the policy's answer first, and with the reference first."""
        return self.pair(item.prompt, item.completion, self.reference(item))

    def pair(self, prompt: str, one: str, other: str) -> list[str]:
        """Return the prompt with `one` first, and with `other` first."""
        return [
            fill_prompt(
                self._prompt,
                {"prompt": prompt, "first": first, "second": second},
                {"format": PAIR_FORMAT},
                fenced=self._fenced,
            )
            for first, second in ((one, other), (other, one))
        ]

    def reference(self, item: RewardInput) -> str:
        """Return the answer to compare with. RewardError if the problem has none."""
        if self._column == "answer":
            return needed_answer(item, "judge")
        value = item.info.get(self._column)
        if not isinstance(value, str):
            raise RewardError(
                f"judge: the problem's column {self._column!r} is {value!r:.100}, expected the text to compare with"
            )
        return value

    def read(self, said: str) -> str:
        """Return `a`, `b` or `tie`."""
        chosen: str = _only([_choice(one["better"]) for one in _objects_with(said, ["better"])], said)
        return chosen

    def score(self, found: Sequence[str]) -> Score:
        """Return 1 if the policy's answer won in both orders, 0 if it lost in both, else 0.5."""
        wins = [{"a": 1.0, "b": 0.0}.get(found[0], 0.5), {"a": 0.0, "b": 1.0}.get(found[1], 0.5)]
        agree = wins[0] == wins[1]
        first = sum({"a": 1.0, "b": -1.0}.get(one, 0.0) for one in found) / 2
        return Score(
            reward=wins[0] if agree else 0.5, metrics={"orders_disagree": float(not agree), "prefers_first": first}
        )


def _schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, **properties},
        "required": ["reasoning", *properties],
        "additionalProperties": False,
    }


def _objects_with(said: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON objects with all names in the judge's answer, after its reasoning."""
    text = after_thoughts(said)
    found = [one for one in json_objects(text) if all(name in one for name in names)]
    if not found:
        raise UnreadableJudgement(f"no JSON object with {', '.join(names)} in {said[-_SHOWN:]!r}")
    return found


def _only(found: list[Any], said: str) -> Any:
    """Return the value on which all objects agree. One of several objects might be a quotation from the policy's
    answer."""
    if any(one != found[0] for one in found):
        raise UnreadableJudgement(f"{len(found)} JSON objects that differ in {said[-_SHOWN:]!r}, expected one")
    return found[0]


def _number(value: Any, criterion: JudgeCriterion) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not criterion.low <= number <= criterion.high:
        raise UnreadableJudgement(
            f"{criterion.name} is {value!r:.100}, expected a number from {criterion.low:g} to {criterion.high:g}"
        )
    return number


def _choice(value: Any) -> str:
    chosen = value.strip().casefold() if isinstance(value, str) else ""
    if chosen not in ("a", "b", "tie"):
        raise UnreadableJudgement(f"better is {value!r:.100}, expected 'A', 'B' or 'tie'")
    return chosen
