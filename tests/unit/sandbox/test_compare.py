"""What counts as the expected output."""

from __future__ import annotations

from rftstream.sandbox.compare import same_text
from tests.suite.each import each


@each(
    ("found", "expected", "same"),
    [
        ("7", "7", True),
        ("7.0", "7", True),
        ("7e0 \n", "7", True),
        (".5", "0.50", True),
        ("-0.0", "0", True),
        ("+7", "7", True),
        ("007", "007", True),
        ("007", "7", False),
        ("7", "007", False),
        ("00", "0", False),
        ("0.5", "00.5", False),
        ("2024-01-02", "2024-1-2", False),
        ("1 2", "1  2", True),
        ("1\n2", "1 2", False),
        ("x" * 61, "x" * 61, True),
        ("1" * 61, "1" * 61 + ".0", False),
    ],
)
def test_words_and_numbers(found: str, expected: str, same: bool) -> None:
    assert same_text(found, expected) is same
