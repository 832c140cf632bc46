"""Limits on what is evaluated, so that a process rarely has to be killed to stop an evaluation."""

from __future__ import annotations

import re

MAX_CHARS = 3000
MAX_DEPTH = 40
MAX_EXACT_BITS = 200_000
"""Largest size, in bits, of an integer that is computed exactly."""
MAX_LOG2 = 1e12
"""Largest logarithm of a number that is computed as a float."""
MAX_EXACT_FACTORIAL = 5000
MAX_FACTORIAL = 1e15
MAX_TERMS = 4000
"""Largest number of terms of a sum or product that a computer algebra system may expand."""

_TOWER = re.compile(r"\^\s*\{?\s*\(?\s*[\d.]+\s*\^\s*\{?\s*\(?\s*[\d.]+\s*\^")
_BIG_TOWER = re.compile(r"\d\s*\^\s*\{?\s*\(?\s*\d+\s*\^\s*\{?\s*\(?\s*(\d+)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\s*\(?\s*-?\s*(\d{5,})")
_FACTORIAL = re.compile(r"(\d{4,})\s*\)*\s*!|!\s*\)*\s*!|\)\s*!")
_LONG_NUMBER = re.compile(r"\d{600,}")
_BOUND = re.compile(r"\\(?:sum|prod)[^\\]{0,40}?\^\s*\{?\s*(?:\d{5,}|\d+\s*\^|\d+\s*!)")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d{5,})")


class TooCostly(Exception):
    """An expression is too large to evaluate."""


def check_size(text: str) -> None:
    """Raise TooCostly if the text is too long or too deeply nested to be read."""
    if len(text) > MAX_CHARS:
        raise TooCostly(f"the answer has {len(text)} characters, at most {MAX_CHARS} are read")
    depth = deepest = 0
    for character in text:
        if character in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise TooCostly(f"brackets are nested {deepest} deep, at most {MAX_DEPTH} are read")


def check_text(text: str) -> None:
    """Raise TooCostly if a text contains something that a computer algebra system would evaluate very slowly."""
    check_size(text)
    if _TOWER.search(text):
        raise TooCostly("a tower of powers")
    if (tower := _BIG_TOWER.search(text)) and len(tower.group(1)) > 1 and int(tower.group(1)[:6]) > 12:
        raise TooCostly("a power of a power")
    if power := _EXPONENT.search(text):
        raise TooCostly(f"the exponent {power.group(1)[:20]}")
    for factorial in _FACTORIAL.finditer(text):
        if factorial.group(1) is None:
            if factorial.group().rstrip().endswith(("!!", "! !")) or re.search(r"\d{3,}", text):
                raise TooCostly("a factorial of an expression")
        elif len(factorial.group(1)) > 6 or int(factorial.group(1)) > MAX_EXACT_FACTORIAL:
            raise TooCostly(f"the factorial of {factorial.group(1)[:20]}")
    if _LONG_NUMBER.search(text):
        raise TooCostly("a number of more than 600 digits")
    if _BOUND.search(text):
        raise TooCostly(f"a sum or product of more than {MAX_TERMS} terms")
    if _BINOMIAL.search(text):
        raise TooCostly("a binomial coefficient of large numbers")
