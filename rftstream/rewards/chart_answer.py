"""Answers about charts, as ChartQA scores them: numbers with a relative tolerance, words exactly.

Source: Masry et al., ChartQA, 2022 (relaxed accuracy, 5 %). If only one side has a percent sign, both readings count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from msgspec import Meta

from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.answers.choices import same_words
from rftstream.rewards.answers.golds import right_answers
from rftstream.rewards.answers.maths.words import number_in_words
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.rewards.version import config_version

YEARS = (1500, 2100)
"""Range of four-digit whole numbers that count as years."""
MAX_CHARS = 500

_SCALES = {
    "hundred": 100, "thousand": 1000, "k": 1000, "K": 1000, "million": 10**6, "millions": 10**6, "M": 10**6,
    "billion": 10**9, "billions": 10**9, "B": 10**9, "bn": 10**9, "trillion": 10**12, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_NUMBER = re.compile(
    r"(?:(?i:about|around|approximately|approx\.?|roughly|nearly)|≈|~|约|大约)?\s*"
    r"(?P<money>US\$|[$€£¥₹])?\s*(?P<sign>[-\u2212+])?\s*(?P<money2>[$€£¥₹])?\s*"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d{1,20})?|\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
    rf"(?:\s*(?P<scale>{'|'.join(sorted(_SCALES, key=len, reverse=True))})(?![A-Za-z]))?"
    r"(?:\s*(?P<percent>%|(?i:percent|per cent|percentage points?)))?"
    r"(?:\s+(?P<unit>[A-Za-z]+(?: [A-Za-z]+){0,2}))?\s*\.?"
)


@dataclass(frozen=True, slots=True)
class ChartNumber:
    """A number as it is written in a chart or an answer."""

    value: Fraction
    is_percent: bool = False
    is_year: bool = False
    unit: str = ""
    """Words that follow it, such as `dollars`."""


class ChartReward:
    """1 if the answer equals the problem's, numbers within the tolerance; else 0. If the problem has several right
    answers, one is enough.

    Metrics: `parsed` (the completion has an answer) and `numeric` (it can be read as a number).
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.chart_answer]`."""

        tolerance: Annotated[float, Meta(ge=0, lt=1)] = 0.05
        """Relative error that a number may have."""
        exact_years: bool = True
        """Compare exactly if the problem's answer is a whole number from 1500 to 2100, mostly a year. False: as
        published."""
        boxed_only: bool = False
        r"""Take the answer only from \boxed{}."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tolerance = Fraction(str(config.tolerance))
        self.version = config_version("2", config)

    def __call__(self, item: RewardInput) -> Score:
        golds = right_answers(item, "chart_answer")
        with evaluating_answer():
            answers = [answer.text for answer in find_answers(item.conclusion, boxed_only=self._config.boxed_only)]
            right = any(same_words(gold, answer) for gold in golds for answer in answers)
            number = next((found for answer in answers if (found := read_number(answer)) is not None), None)
            if number is not None and not right:
                right = any(self._is_near(gold, number) for gold in golds)
        return Score(
            reward=float(right), metrics={"parsed": float(bool(answers)), "numeric": float(number is not None)}
        )

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer."""
        right_answers(item, "chart_answer")

    def _is_near(self, gold_text: str, answer: ChartNumber) -> bool:
        gold = read_number(gold_text)
        if gold is None or gold.unit:
            return False
        if gold.is_year and self._config.exact_years:
            return answer.value == gold.value
        return any(abs(value - right) <= self._tolerance * abs(right) for value, right in _comparable(answer, gold))


def _comparable(answer: ChartNumber, gold: ChartNumber) -> list[tuple[Fraction, Fraction]]:
    """Return the pairs of values to compare. If only one side is a percentage, 28 % may be 28 or 0.28 on the other
    side."""
    pairs = [(answer.value, gold.value)]
    if answer.is_percent and not gold.is_percent:
        pairs.append((answer.value / 100, gold.value))
    elif gold.is_percent and not answer.is_percent:
        pairs.append((answer.value * 100, gold.value))
    return pairs


def read_number(text: str) -> ChartNumber | None:
    """Return the number if the whole text is one, such as `1,234`, `$1.2 million`, `28%`; else None."""
    text = text.strip().strip("*`").strip()
    if len(text) > MAX_CHARS:
        return None
    text = re.sub(r"\\([%$])", r"\1", text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        words = number_in_words(text)
        return None if words is None else ChartNumber(words)
    value = Fraction("0" + match["digits"].replace(",", "").rstrip("."))
    if match["sign"] in ("-", "\u2212"):
        value = -value
    value *= _SCALES.get(match["scale"] or "", 1)
    bare = not any(match[name] for name in ("money", "money2", "sign", "scale", "percent", "unit"))
    is_year = bare and re.fullmatch(r"\d{4}", match["digits"]) is not None and YEARS[0] <= value <= YEARS[1]
    return ChartNumber(value, is_percent=bool(match["percent"]), is_year=is_year, unit=match["unit"] or "")
