"""How far annotators agree, against numbers from the literature and by hand."""

from __future__ import annotations

import random

import pytest

from rftstream.data.feedback.agreement import Answer, Share, agreement_of_all, agreement_with_others
from tests.suite.each import each

# The examples of Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), with the alphas that stand there.
MEG, OWEN = "0100000010", "1110010000"
BEN, GERRY = "aabbdcccedda", "babbbcccedd" + "d"
FOUR = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
SCALE = (1.0, 5.0)


def units(*observers: str, is_number: bool = False) -> list[list[Answer]]:
    """The answers to each question. An observer is a text of answers; a point is none."""
    return [
        [float(answer) if is_number else answer for answer in answers if answer != "."]
        for answers in zip(*observers, strict=True)
    ]


@each(
    ("observers", "is_number", "alpha"),
    [((MEG, OWEN), False, 0.095), ((BEN, GERRY), False, 0.692), (FOUR, False, 0.743), (FOUR, True, 0.849)],
)
def test_alpha_is_that_of_the_literature(observers: tuple[str, ...], is_number: bool, alpha: float) -> None:
    found = agreement_of_all(units(*observers, is_number=is_number), scale=SCALE if is_number else None)
    assert found.alpha == pytest.approx(alpha, abs=0.0005)


def test_shares_by_hand() -> None:
    found = agreement_of_all(units(MEG, OWEN), scale=None)
    assert (found.num_questions, found.similarity) == (10, pytest.approx(0.6))
    three = agreement_of_all([["a", "a", "b"], ["a", "a", "a"], ["c"]], scale=None)
    assert (three.num_questions, three.similarity) == (2, pytest.approx((1 / 3 + 1) / 2))
    rated = agreement_of_all([[1.0, 5.0], [2.0, 3.0]], scale=SCALE)
    assert rated.similarity == pytest.approx((0.0 + 0.75) / 2)
    # Four pairs in both orders: 2 (1-5)² + 2 (2-3)² = 34 of 4 values; of 12 pairs of values 2 (16+1+4+9+4+1) = 70.
    assert rated.alpha == pytest.approx(1 - (34 / 4) / (70 / 12))


def test_with_one_other_it_is_the_alpha_of_the_two() -> None:
    for is_number in (False, True):
        both = units(*(FOUR[1:3]), is_number=is_number)
        scale = SCALE if is_number else None
        pairs = [(one[0], one[1:]) for one in both if len(one) == 2]
        assert agreement_with_others(pairs, scale=scale) == agreement_of_all(both, scale=scale)


def test_each_question_counts_the_same_however_many_answered() -> None:
    """By hand: on the first question one of two others agrees, on the second the only one."""
    found = agreement_with_others([("a", ["a", "b"]), ("b", ["b"])], scale=None)
    assert (found.num_questions, found.similarity) == (2, pytest.approx(0.75))
    # Values: a 1.5, b 2.5; 1 - (n - 1) * 1 / (n² - 1.5² - 2.5²) with n = 4.
    assert found.alpha == pytest.approx(1 - 3 * 1 / (16 - 2.25 - 6.25))


def test_nothing_to_compare() -> None:
    for given in ([], [["a"]], [["a", "a"], ["a", "a"]], [[3.0, 3.0]]):
        assert agreement_of_all(given, scale=None).alpha is None  # type: ignore[arg-type]
    assert agreement_of_all([[3.0, 3.0]], scale=SCALE).alpha is None
    assert agreement_with_others([("a", [])], scale=None).num_questions == 0


def test_chance_is_zero_and_the_opposite_is_less() -> None:
    draw = random.Random(7)
    by_chance = [[draw.choice("ab"), draw.choice("ab")] for _ in range(4000)]
    found = agreement_of_all(by_chance, scale=None).alpha
    assert found is not None and abs(found) < 0.05
    opposite = agreement_of_all([["a", "b"], ["b", "a"]], scale=None)
    assert opposite.alpha == pytest.approx(1 - 3 * 4 / 8)


def test_wilson() -> None:
    """Numbers of Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    for count, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        found = Share(count=count, total=total)
        assert found.share == count / total
        assert found.interval == pytest.approx((low, high), abs=5e-5)
    assert Share(count=0, total=0).share is Share(count=0, total=0).interval is None
    assert Share(count=5, total=5).interval == pytest.approx((0.5655, 1.0), abs=5e-5)
