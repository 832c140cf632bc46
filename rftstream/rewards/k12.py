"""School problems: choice, true or false, numbers with units, blanks, orders and matching, in English and Chinese.

The kind of a problem is in a column, or is recognised from its answer (and its options):

    choice  letters: `C`, `A, C`; with options also their texts      truth   true, false, 对, 错
    number  `9.8 m/s^2`, `三分之二`, `twenty-one`                     blank   words; `;` between blanks, `|` or
    order   `B, A, C`, `③①②`, `x→y→z`                               match   `1-B, 2-A`, or a JSON map
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.answers.choices import choice_text, same_words
from rftstream.rewards.answers.clean import bare_words
from rftstream.rewards.answers.compare import AnswerComparison, Equality
from rftstream.rewards.answers.maths.guards import TooCostly, check_size
from rftstream.rewards.answers.maths.nodes import AnswerGroup, Form, Ratio, Reading, Value, Words
from rftstream.rewards.answers.reading import read_answer
from rftstream.rewards.answers.school import (
    blanks_of,
    codes_in_order,
    enumerated,
    is_order,
    letters_of,
    lone_number,
    options_of,
    order_of,
    pairs_of,
    plain,
    same_pairs,
    same_symbols,
)
from rftstream.rewards.answers.verdicts import truth_of
from rftstream.rewards.base import RewardInput, Score, needed_answer
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.rewards.version import config_version

KINDS = ("choice", "truth", "number", "blank", "order", "match")
_IN_SENTENCES = ("blank", "number")
"""Kinds whose answers may be in a sentence: if the whole answer is not right, the part from its verb on is checked
again."""
_ALSO_CALLED = {
    "choice": "multiple_choice, multiple choice, mcq, single_choice, 选择题, 单选题, 多选题",
    "truth": "true_false, true/false, boolean, 判断题",
    "blank": "fill_in, fill_in_the_blank, 填空题, short_answer",
    "number": "numeric, numerical, 计算题",
    "order": "ordering, sequence, 排序题",
    "match": "matching, 匹配题, 连线题",
}
_KNOWN_AS = {word: kind for kind, words in _ALSO_CALLED.items() for word in words.split(", ")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchoolProblem:
    """A problem in the form for scoring: its kind, its answer, and its options by letter."""

    kind: str
    answer: str
    options: dict[str, str]


class SchoolReward:
    """1 if the answer is right, else 0; with `partial`, the share of a problem's blanks, places or pairs.

    Metrics: `parsed` (an answer of the problem's kind was found) and `over_limit` (its evaluation would take too long).
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.k12]`."""

        kind: str = ""
        """Kind of all problems: choice, truth, number, blank, order or match. Empty: by column, or recognised."""
        kind_column: str = "kind"
        """Column with the kind of each problem. Without it, the kind is recognised."""
        options_column: str = "options"
        """Column with the options of a choice: a list, or a map from letters. Otherwise the options are read from the
        prompt."""
        partial: bool = False
        """Give the share of right blanks, places or pairs. Choices with a wrong letter are always 0."""
        need_unit: bool = False
        """Reject a number without a unit if the problem's answer has one."""
        tolerance: float = 0.0
        """Relative error that a number may have, such as 0.01. 0: decimals are compared to six places."""
        boxed_only: bool = False
        r"""Take the answer only from \boxed{}."""

    def __init__(self, config: Config) -> None:
        if config.kind and _kind_name(config.kind) is None:
            raise ConfigError(f"rewards.k12.kind: unknown {config.kind!r}; known: {', '.join(KINDS)}")
        if not 0 <= config.tolerance < 1:
            raise ConfigError(f"rewards.k12.tolerance: got {config.tolerance}, expected at least 0 and less than 1")
        self._config = config
        self._comparison = AnswerComparison(places=6, tolerance=config.tolerance)
        self._read = functools.lru_cache(maxsize=512)(read_answer)
        self.version = config_version("4", config, "mpmath")

    def __call__(self, item: RewardInput) -> Score:
        problem = self._problem(item)
        share: float | None = None
        too_costly = False
        with evaluating_answer():
            try:
                for answer in find_answers(item.conclusion, boxed_only=self._config.boxed_only):
                    found = self._share(problem, answer.text)
                    share = found if share is None else max(share, found or 0.0)
                    if share is not None and not (problem.kind in _IN_SENTENCES and answer.how in ("stated", "whole")):
                        break
            except (TooCostly, MemoryError, RecursionError):
                too_costly = True
        reward = (share or 0.0) if self._config.partial else float(share == 1.0)
        return Score(reward=reward, metrics={"parsed": float(share is not None), "over_limit": float(too_costly)})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no answer, no answer of its kind, or a choice that is not among its
        options."""
        self._problem(item)

    # ------------------------------------------------------------------------------------------ the problem

    def _problem(self, item: RewardInput) -> _SchoolProblem:
        answer = needed_answer(item, "k12").strip()
        if not answer:
            raise RewardError("k12: the problem's answer is empty, expected one; correct it")
        options = options_of(item.info.get(self._config.options_column), item.prompt)
        named = self._config.kind or str(item.info.get(self._config.kind_column) or "")
        kind = _kind_name(named) if named else self._recognised(answer, options)
        if kind is None:
            raise RewardError(f"k12: the problem's kind {named!r} is unknown; known: {', '.join(KINDS)}")
        if kind == "choice" and (found := self._gold_letters(answer, options)) is not None:
            answer = ", ".join(sorted(found))
        elif not self._is_answer(kind, answer):
            raise RewardError(
                f"k12: the problem's answer {answer[:200]!r} is no answer of the kind {kind!r}; "
                "correct it, or name another kind in its column"
            )
        return _SchoolProblem(kind=kind, answer=answer, options=options)

    def _recognised(self, answer: str, options: dict[str, str]) -> str:
        if pairs_of(answer) is not None:
            return "match"
        if is_order(answer):
            return "order"
        if self._gold_letters(answer, options) is not None:
            return "choice"
        if truth_of(answer) is not None and len(answer) < 12:
            return "truth"
        return "number" if self._is_answer("number", answer) and not re.search(r"[;；|]", answer) else "blank"

    def _gold_letters(self, answer: str, options: dict[str, str]) -> frozenset[str] | None:
        """Return the letters of the right options: the answer gives them, or the text of an option. None: neither."""
        letters = letters_of(answer)
        if letters is not None and (not options or letters <= options.keys()):
            return letters
        same = frozenset(letter for letter, text in options.items() if self._same(text, answer))
        if len(same) == 1:
            return same
        return None

    def _is_answer(self, kind: str, answer: str) -> bool:
        match kind:
            case "choice":
                return False
            case "truth":
                return truth_of(answer) is not None
            case "order":
                return order_of(answer) is not None
            case "match":
                return pairs_of(answer) is not None
            case "number":
                return _has_value(self._safe_reading(answer))
        return any(
            bare_words(one) or _has_value(self._safe_reading(one)) for blank in blanks_of(answer) for one in blank
        )

    def _safe_reading(self, text: str) -> Reading:
        try:
            return self._read(text)
        except TooCostly as error:
            raise RewardError(f"k12: the problem's answer {text[:200]!r} cannot be read: {error}") from None

    # ------------------------------------------------------------------------------------------ the policy's answer

    def _share(self, problem: _SchoolProblem, answer: str) -> float | None:
        """Return the share of an answer that is right, or None if it is no answer of that kind."""
        check_size(answer)
        match problem.kind:
            case "choice":
                return self._choice_share(problem, answer)
            case "truth":
                said = truth_of(answer)
                return None if said is None else float(said == truth_of(problem.answer))
            case "order":
                return _order_share(order_of(problem.answer) or [], answer)
            case "match":
                gold, found = pairs_of(problem.answer) or {}, pairs_of(answer, loose=True)
                return None if found is None else same_pairs(gold, found)
            case "number":
                return self._number_share(problem.answer, answer)
        return self._blank_share(blanks_of(problem.answer), answer)

    def _choice_share(self, problem: _SchoolProblem, answer: str) -> float | None:
        gold = letters_of(problem.answer) or frozenset()
        named = [
            letter for letter, text in problem.options.items() if len(text.strip()) > 1 and same_words(text, answer)
        ]
        letters = frozenset(named) if len(named) == 1 else letters_of(answer)
        if letters is None:
            letters = frozenset(
                letter for letter, text in problem.options.items() if text.strip() and self._same(text, answer)
            )
            if len(letters) != 1:
                return None
        elif len(letters) == 1 and (text := choice_text(answer)):
            others = [letter for letter, option in problem.options.items() if self._same(option, text)]
            if others and not letters & set(others):
                return 0.0  # the letter and the text name different options
        if not letters <= gold:
            return 0.0
        return len(letters) / len(gold)

    def _number_share(self, gold_text: str, answer: str) -> float | None:
        if same_symbols(gold_text, answer):
            return 1.0
        gold = self._read(gold_text)
        if any(isinstance(form, Ratio) for form in gold.forms):
            answer = re.sub(r"(?<=\d)\s+to\s+(?=\d)", ":", answer)
        found = read_answer(answer)
        if not _has_value(found):
            lone = lone_number(answer)
            found = found if lone is None else read_answer(lone)
        if not _has_value(found):
            return None
        if self._config.need_unit and _units(gold) and not _units(found):
            return 0.0
        return float(self._comparison.readings(gold, found) == Equality.EQUAL)

    def _blank_share(self, blanks: Sequence[Sequence[str]], answer: str) -> float | None:
        parts = [answer] if len(blanks) == 1 else _parts(answer, len(blanks))
        if len(parts) != len(blanks):
            return None
        right = [any(self._same(one, part) for one in blank) for blank, part in zip(blanks, parts, strict=True)]
        return sum(right) / len(blanks) if bare_words(answer) else None

    def _same(self, gold: str, answer: str) -> bool:
        if same_words(gold, answer) or same_words(gold, _ASIDE.sub("", answer)) or same_symbols(gold, answer):
            return True
        return self._comparison.readings(self._read(gold), read_answer(answer)) == Equality.EQUAL


def _kind_name(name: str) -> str | None:
    name = name.strip().casefold()
    return name if name in KINDS else _KNOWN_AS.get(name)


_ASIDE = re.compile(r"(?<=\w)\s*[(（][^()（）]*[^\W\d_][^()（）]*[)）]\s*\.?$")


def _has_value(reading: Reading) -> bool:
    """Return whether more than words was read; a list of words does not count."""
    return any(not _is_words(form) for form in reading.forms)


def _is_words(form: Form) -> bool:
    return isinstance(form, Words) or (isinstance(form, AnswerGroup) and all(map(_is_words, form.items)))


def _units(reading: Reading) -> bool:
    return any(isinstance(form, Value) and form.unit for form in reading.forms)


def _order_share(gold: Sequence[str], answer: str) -> float | None:
    found = order_of(answer)
    if found is None or set(found) != set(gold):
        found = codes_in_order(answer, gold) or found
    if found is None:
        return None
    if len(found) != len(gold):
        return 0.0
    return sum(left == right for left, right in zip(gold, found, strict=True)) / len(gold)


def _parts(answer: str, count: int) -> list[str]:
    """Return the parts of an answer to several blanks, split at the first separator that gives the right number."""
    if (numbered := enumerated(answer.strip())) is not None and len(numbered) == count:
        return numbered
    answer = plain(answer)
    for separator in (r"\s*[;；\n]\s*", r"\s+/\s+|\s*\|\s*", r"\s*[,，、]\s*", r"\s*(?:[,，、]|\band\b|和)\s*", r"\s+"):
        parts = [part for part in re.split(separator, answer.strip().strip("$")) if part.strip()]
        if len(parts) == count:
            return parts
    return []
