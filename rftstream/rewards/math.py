"""Mathematical equality of answers: our own readers decide first, and math-verify if they cannot tell (see answers/).

The problem's answer is read as a whole. The completion's answer is its last box, else the text after "the answer is",
else the whole of a short completion. If the evaluation of an answer exceeds the limits, the policy's answer is wrong,
but the problem's answer makes the rollout unscorable.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rftstream.errors import RewardError
from rftstream.rewards.answers.boxes import FoundAnswer, find_answers, last_boxes
from rftstream.rewards.answers.choices import chosen_letters, listed_letters, lone_letter
from rftstream.rewards.answers.clean import bare_words, is_formula
from rftstream.rewards.answers.compare import AnswerComparison, Equality
from rftstream.rewards.answers.maths.guards import TooCostly, check_size, check_text
from rftstream.rewards.answers.maths.nodes import AnswerGroup, Form, Reading, Value, symbols_of
from rftstream.rewards.answers.maths.values import constant
from rftstream.rewards.answers.reading import read_answer
from rftstream.rewards.answers.second import SecondChecker
from rftstream.rewards.answers.thoughts import final_part
from rftstream.rewards.answers.verdicts import verdict_word
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.evaluating import apart_from_answer, evaluating_answer
from rftstream.rewards.version import config_version

MAX_PLAIN_GOLD = 300
"""Number of characters above which a problem's answer counts as a solution that contains the answer somewhere."""
MAX_VERDICT = 20
"""Largest number of characters of a problem's answer that may be just yes, no, true or false."""
MAX_SECOND_CHARS = 400
"""Greatest length, in characters, of an answer that math-verify also gets after our readers decided."""


_PROSE = re.compile(
    r"(?<![\\a-zA-Z{])(?:so|then|thus|hence|therefore|we|the)\s|(?<![\\a-zA-Z{])[a-zA-Z]{2,}\s+(?:[^\s]+\s+)?[a-zA-Z]{2,}"
)


_WORD = re.compile(
    r"(?<![\\a-zA-Z{])(?!(?:sin|cos|tan|cot|sec|csc|log|ln|lg|exp|arc\w+|sqrt|and|or|pi)\b)(?:[a-zA-Z]{2,}|I(?=[ ']))"
    r"|[\u4e00-\u9fff]{2}"
)
"""A word. A short completion with such a word is a sentence; as an expression it would be a product of letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gold:
    """The problem's answer, as far as it could be read."""

    text: str
    reading: Reading
    letter: str | None
    letters: frozenset[str] | None
    """The letters of a multiple choice."""
    verdict: str | None
    """yes, no, true or false."""
    second: Callable[[], list[Any]]
    """Returns math-verify's reading of the answer. It is called only if needed, since it takes long."""
    too_costly: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    equal: bool
    parsed: bool
    by_second: bool = False
    too_costly: bool = False
    disagree: bool | None = None


class MathReward:
    """1 if the completion's answer equals the problem's, else 0.

    Metrics: `parsed` (an answer was found and read), `second` (math-verify decided), `over_limit` (evaluating the
    answer would take too long), and if both decided, `disagree` (our readers and math-verify differ).
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.math]`."""

        float_rounding: int = 6
        """Decimal places to which decimals are compared."""
        strict: bool = True
        """Variables must have the same names, and sets do not equal tuples."""
        boxed_only: bool = False
        r"""Take the completion's answer only from \boxed{}."""
        gold_marker: str = "####"
        """If the problem's answer contains this text, the answer is the part after its last occurrence (GSM8K)."""
        second_share: float = 0.05
        """Share of the answers decided by our readers for which math-verify is also asked: metric `disagree`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._second = SecondChecker(places=config.float_rounding, strict=config.strict, boxed_only=config.boxed_only)
        self._comparison = AnswerComparison(places=config.float_rounding, strict=config.strict)
        self._gold = functools.lru_cache(maxsize=256)(self._read_gold)  # siblings share a problem
        self.version = config_version("4", config, "math-verify", "sympy", "latex2sympy2_extended", "mpmath")

    def __call__(self, item: RewardInput) -> Score:
        gold = self._readable_gold(item)
        with evaluating_answer():
            try:
                judgement = self._judge(gold, item.conclusion)
            except (TooCostly, MemoryError, RecursionError):
                judgement = _Judgement(equal=False, parsed=False, too_costly=True)
        if gold.too_costly and not judgement.equal:
            raise RewardError(f"math: the problem's answer {gold.text[:200]!r} cannot be evaluated: {gold.too_costly}")
        metrics = {
            "parsed": float(judgement.parsed),
            "second": float(judgement.by_second),
            "over_limit": float(judgement.too_costly),
        }
        if judgement.disagree is not None:
            metrics["disagree"] = float(judgement.disagree)
        return Score(reward=float(judgement.equal), metrics=metrics)

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer, or one that cannot be read or evaluated."""
        gold = self._readable_gold(item)
        if gold.too_costly:
            raise RewardError(f"math: the problem's answer {gold.text[:200]!r} cannot be evaluated: {gold.too_costly}")

    def _readable_gold(self, item: RewardInput) -> _Gold:
        text = needed_answer(item, "math").rpartition(self._config.gold_marker)[2].strip()
        gold = self._gold(text)
        if gold is None:
            raise RewardError(
                f"math: the problem's answer {text[:200]!r} is nothing that can be read whole; "
                "correct it, or use the reward 'exact'"
            )
        return gold

    def _read_gold(self, text: str) -> _Gold | None:
        if (boxed := last_boxes(text)) is not None:
            text = boxed.strip()
        elif len(text) > MAX_PLAIN_GOLD or "\n" in text or "answer is" in text.lower():
            text = next((answer.text for answer in find_answers(text) if answer.how == "mark"), text)
        too_costly = ""
        try:
            reading = read_answer(text)
            for node in (form.node for form in reading.forms for form in _values_in(form)):
                constant(node)
        except TooCostly as error:
            too_costly, reading = str(error), Reading(text=text)
        second: Callable[[], list[Any]] = list
        if not too_costly:
            try:
                check_text(reading.text)
                second = functools.cache(lambda: self._read_second(text))
            except TooCostly as error:
                too_costly = "" if reading.whole else str(error)
        if not bare_words(text) and not reading.forms:
            return None
        unread = not reading.whole and is_formula(reading.text) and not too_costly
        if unread and all(isinstance(one, str) for one in second()):
            return None
        verdict = verdict_word(text) if len(text) < MAX_VERDICT else None
        return _Gold(
            text=text, reading=reading, letter=lone_letter(text), letters=listed_letters(text), verdict=verdict,
            second=second, too_costly=too_costly,
        )  # fmt: skip

    def _read_second(self, text: str) -> list[Any]:
        """Return math-verify's reading of a problem's answer. If it exceeds a limit, that is not the policy's fault."""
        with apart_from_answer():
            try:
                return self._second.read_gold(text)
            except (TooCostly, MemoryError, RecursionError) as error:
                raise RewardError(
                    f"math: math-verify cannot read the problem's answer {text[:200]!r}: {type(error).__name__}"
                ) from None

    def _judge(self, gold: _Gold, completion: str) -> _Judgement:
        answers = find_answers(completion, boxed_only=self._config.boxed_only)
        for answer in answers:
            judgement = self._judge_answer(gold, answer)
            if judgement is not None:
                return judgement
        text = final_part(completion)
        if not answers and ("\\boxed" in text or self._config.boxed_only or not text):
            return _Judgement(equal=False, parsed=False)
        boxed = bool(answers) and answers[-1].how == "box"
        return self._ask_second(gold, answers[-1].text if boxed else text, boxed=boxed)

    def _judge_answer(self, gold: _Gold, answer: FoundAnswer) -> _Judgement | None:
        """Return our own readers' judgement of an answer, or None if they cannot tell."""
        if answer.text.strip() == gold.text:
            return _Judgement(equal=True, parsed=True)
        if gold.letter is not None and (letters := chosen_letters(answer.text)) is not None:
            return _Judgement(equal=letters == {gold.letter}, parsed=True)
        if gold.letters is not None and chosen_letters(answer.text) == gold.letters:
            return _Judgement(equal=True, parsed=True)
        if gold.verdict is not None and (said := verdict_word(answer.text)) is not None:
            return _Judgement(equal=said == gold.verdict, parsed=True)
        check_size(answer.text)
        found = read_answer(answer.text)
        verdict = self._comparison.readings(gold.reading, found)
        if verdict == Equality.UNKNOWN or (verdict == Equality.DIFFERENT and not self._config.strict):
            return None
        if verdict == Equality.DIFFERENT and answer.how != "box" and not self._is_decisive(gold, answer, found):
            return None
        return _Judgement(
            equal=verdict == Equality.EQUAL,
            parsed=True,
            disagree=self._disagreement(gold, answer, equal=verdict == Equality.EQUAL),
        )

    def _is_decisive(self, gold: _Gold, answer: FoundAnswer, found: Reading) -> bool:
        """Return whether a wrong answer outside a box is the completion's answer. The right one may be elsewhere."""
        if answer.how == "stated":
            return False  # the box decides
        if answer.how in ("tail", "formula"):
            return _has_variables(found) or (_has_unit(gold.reading) and _has_unit(found))
        if answer.how == "whole" and _WORD.search(answer.text):
            return False
        return _PROSE.search(answer.text) is None and (found.whole or not gold.reading.whole)

    def _ask_second(self, gold: _Gold, text: str, *, boxed: bool) -> _Judgement:
        if not gold.second():
            return _Judgement(equal=False, parsed=False)
        check_text(text if boxed else text[-200:])
        found = self._second.read_found(text, boxed=boxed)
        equal = self._second.equal(gold.second(), found)
        return _Judgement(equal=equal, parsed=bool(found), by_second=True)

    def _disagreement(self, gold: _Gold, answer: FoundAnswer, *, equal: bool) -> bool | None:
        """Return whether math-verify disagrees, for a share of the answers; None for the others."""
        chance = zlib.crc32(f"{gold.text}\n{answer.text}".encode()) / 2**32
        if chance >= self._config.second_share or not gold.second() or len(answer.text) > MAX_SECOND_CHARS:
            return None
        try:
            check_text(answer.text)
        except TooCostly:
            return None
        return self._second.equal(gold.second(), self._second.read_found(answer.text, boxed=True)) != equal


def _has_unit(reading: Reading) -> bool:
    return any(isinstance(form, Value) and form.unit for form in reading.forms)


def _has_variables(reading: Reading) -> bool:
    """Return whether an answer is one expression with variables, of which math-verify might read only a part."""
    return bool(reading.forms) and all(isinstance(form, Value) and symbols_of(form.node) for form in reading.forms)


def _values_in(form: Form) -> Iterator[Value]:
    if isinstance(form, Value):
        yield form
    elif isinstance(form, AnswerGroup):
        for item in form.items:
            yield from _values_in(item)
