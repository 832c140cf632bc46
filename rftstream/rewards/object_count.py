"""A number of objects, in digits or number words, English or Chinese, also with the objects' name ("three dogs")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rftstream.errors import RewardError
from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.answers.maths.words import number_in_words
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.rewards.version import config_version

MAX_CHARS = 1000
"""Longest answer that is read."""

_DIGITS = re.compile(r"(?<![A-Za-z\d.,])(-?)(\d{1,3}(?:,\d{3})+|\d{1,9})(?![A-Za-z\d%]|[.,:/]\d)")
_FRACTIONS = re.compile(r"\d[.,:/]\d|\d\s*%")
_GROUPED = re.compile(r"\d,(?=\d{3}(?!\d))")
_ENGLISH = (
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|dozen"
)
_WORDS = re.compile(rf"\b(?:{_ENGLISH})(?:(?:[ -]| and )(?:{_ENGLISH}))*\b", re.I)
_CHINESE_DIGITS = "零〇一二两兩三四五六七八九十百千"
_CHINESE = re.compile(rf"[{_CHINESE_DIGITS}]+")
_NOT_NUMBERS = re.compile(r"一共|总共|一些|一起|一样|一般|统一|唯一|第[一二三四五六七八九十]+")
_NONE = re.compile(r"\b(?:none|nothing|no\s+(?!idea|clue|way|answer|doubt|one\b)\w+|not\s+any)\b|没有|无(?!法)", re.I)


class CountReward:
    """1 if the number is right, else 0; with `closeness`, less the further off it is.

    Metrics: `parsed` (the answer has one number that can be a count) and then `off`: its distance from the right
    number.
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.object_count]`."""

        give: Literal["exact", "closeness"] = "exact"
        """`exact`: 1 for the right number. `closeness`: 1 minus the relative error, at least 0."""
        boxed_only: bool = False
        r"""Take the answer only from \boxed{}."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = config_version("2", config)

    def __call__(self, item: RewardInput) -> Score:
        gold, found = self._gold(item), None
        with evaluating_answer():
            for answer in find_answers(item.conclusion, boxed_only=self._config.boxed_only):
                if (found := read_count(answer.text)) is not None:
                    break
        if found is None:
            return Score(reward=0.0, metrics={"parsed": 0.0})
        off = abs(found - gold)
        near = max(0.0, 1.0 - off / max(gold, 1))
        reward = near if self._config.give == "closeness" else float(off == 0)
        return Score(reward=reward, metrics={"parsed": 1.0, "off": float(off)})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem's answer is no count."""
        self._gold(item)

    def _gold(self, item: RewardInput) -> int:
        text = needed_answer(item, "object_count")
        count = read_count(re.sub(r"^\s*(\d+)\.0+\s*$", r"\1", text))  # a column of floats
        if count is None:
            raise RewardError(
                f"object_count: the problem's answer {text[:200]!r} is no count, expected a number such as 3"
            )
        return count


def read_count(text: str) -> int | None:
    """Return the single count in a text. None if there is none, if several differ, or if one is no whole number.

    "No dogs" and "none" are 0 if there is no number beside them."""
    text = text[: MAX_CHARS + 1]
    if len(text) > MAX_CHARS or _FRACTIONS.search(_GROUPED.sub("", text)):
        return None
    found: set[int] = set()
    for sign, digits in _DIGITS.findall(text):
        if sign:
            return None
        found.add(int(digits.replace(",", "")))
    words = _WORDS.findall(text) + _CHINESE.findall(_NOT_NUMBERS.sub(" ", text))
    for phrase in words:
        number = number_in_words(re.sub("^(?=hundred|thousand)", "a ", phrase.lower()))
        if number is None or number.denominator != 1:
            return None
        found.add(int(number))
    if not found and _NONE.search(text):
        return 0
    return found.pop() if len(found) == 1 else None
