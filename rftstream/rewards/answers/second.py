"""math-verify as the second checker: used if our own readers cannot tell, and on a sample of their decisions.

math-verify limits its own time with SIGALRM and then returns "not equal". That would turn a failed computation into a
reward of 0, so its limits are switched off here.
"""

from __future__ import annotations

import logging
from typing import Any

from rftstream.errors import MissingChecker, importing


class SecondChecker:
    """math-verify with fixed settings. The reward `math` makes it."""

    def __init__(self, *, places: int, strict: bool, boxed_only: bool) -> None:
        with importing("rewards.math", "math-verify", install="math-verify", error_type=MissingChecker):
            import math_verify  # type: ignore[import-untyped]
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time limits that are switched off
        logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
        self._places, self._strict = places, strict
        self._verify = math_verify.verify
        self._parse = math_verify.parse
        boxed = math_verify.LatexExtractionConfig(boxed_match_priority=0)
        self._targets = [boxed] if boxed_only else [boxed, math_verify.ExprExtractionConfig()]
        self._gold_targets = [boxed, math_verify.ExprExtractionConfig()]

    def read_gold(self, text: str) -> list[Any]:
        """Return math-verify's reading of the problem's answer, which it gets in a box. Empty: it reads nothing."""
        return self._expressions(self._read(rf"\boxed{{{text}}}", self._gold_targets))

    def read_found(self, text: str, *, boxed: bool) -> list[Any]:
        """Return math-verify's reading of a completion, or of the answer that was found in it (`boxed`)."""
        return self._read(rf"\boxed{{{text}}}" if boxed else text, self._targets)

    def equal(self, gold: list[Any], found: list[Any]) -> bool:
        """Return whether math-verify says that the answers are equal. If neither is an equation, either order of the
        two counts."""
        if not gold or not found:
            return False
        if self._compare(gold, found):
            return True
        plain = not any(_is_relation(one) for one in (*gold, *found))
        return plain and self._compare(found, gold)

    def _compare(self, gold: list[Any], found: list[Any]) -> bool:
        return bool(self._verify(gold, found, float_rounding=self._places, strict=self._strict, timeout_seconds=None))

    def _expressions(self, found: list[Any]) -> list[Any]:
        """Return the expressions without the text, unless there is only the text."""
        return [one for one in found if not isinstance(one, str)] or found

    def _read(self, text: str, targets: list[Any]) -> list[Any]:
        return self._parse(text, extraction_config=targets, parsing_timeout=None)  # type: ignore[no-any-return]


def _is_relation(expression: Any) -> bool:
    return bool(getattr(expression, "is_Relational", False)) or type(expression).__name__ in ("And", "Or", "Not")
