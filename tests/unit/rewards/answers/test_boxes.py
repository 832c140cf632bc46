"""Answers of a million characters are read in linear time: with anything worse these tests would take hours."""

from __future__ import annotations

import pytest

from rftstream.rewards.answers.boxes import find_answers

SIZE = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece", "last"),
    [
        ("\\boxed{", None),
        ("\\boxed{\n", None),
        ("\\boxed{1} and ", "1"),
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
