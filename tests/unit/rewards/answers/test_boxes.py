"""Answers of a million characters are read in linear time: with anything worse these tests would take hours."""

from __future__ import annotations

import pytest

from rftstream.rewards.answers.boxes import find_answers

SIZE = 1 << 20


def test_the_last_of_many_boxes_is_the_answer() -> None:
    boxes = " and ".join(f"\\boxed{{{number}}}" for number in range(20_000))
    assert [answer.text for answer in find_answers(boxes)] == ["19999"]


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece", "last"),
    [
        ("\\boxed{", None),
        ("\\boxed{\n", None),
        ("\\boxed{1} and ", "1"),
        ("\\boxed{1}, ", "1"),
        ("<think>", None),
        ("</think>\n", None),
        ("<answer>", None),
        ("答え", None),
        ("\n", None),
        ("\\fbox{{", None),
        ("$$ ", None),
        ("$a ", "a"),
        ("\\$", None),
        ("\\[", None),
        ("\\( ", None),
        ("\\[ \\( $$x", None),
        ("answer is: ! ", None),
        ("the answer is 5. I hope ", "5"),
        ("is ", None),
        (". ", None),
        (" ", None),
    ],
)
def test_a_million_characters(piece: str, last: str | None) -> None:
    found = find_answers(piece * (SIZE // len(piece)))
    if last is not None:
        assert any(last in answer.text for answer in found)
