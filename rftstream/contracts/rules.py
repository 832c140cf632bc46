"""Rules: what a message or a part of one promises beyond the types and ranges of its fields.

A rule is a function that stands under its class:

    @rule(Feedback)
    def _check_feedback(feedback: Feedback) -> Violation | None:
        if feedback.reward is None and feedback.comment is None:
            return ".comment", "got none beside no reward, expected at least one of them"
        return None

It returns what is wrong, or None when all is well. `checks` puts it together with what follows from the types, and
every encode and decode asks it. What JSON Schema can say of a rule stands beside it, and goes into the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Violation = tuple[str, str]
"""Path below the checked part (`.segments[0].versions`), and the fault there."""

Check = Callable[[Any], Violation | None]
"""Returns the first fault of a value, or None."""

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule of a class, and the rule's part that goes into the JSON Schema of the class."""

    check: Check
    json_schema: dict[str, Any]


RULES: dict[type, Rule] = {}
"""Type of a message or of a part -> its rule. `rule` fills it. Parts of a message have their own rules."""


def rule(
    cls: type[Part], *, json_schema: dict[str, Any] | None = None
) -> Callable[[Callable[[Part], Violation | None]], Callable[[Part], Violation | None]]:
    """Declare the function below as the rule of `cls`. `json_schema` is merged into the schema of the class."""

    def declare(check: Callable[[Part], Violation | None]) -> Callable[[Part], Violation | None]:
        if cls in RULES:
            raise ValueError(f"{cls.__module__}: {cls.__name__} has a rule already; write both into one function")
        RULES[cls] = Rule(check=check, json_schema=json_schema or {})
        return check

    return declare


def presence(value: object) -> str:
    """Return the word by which an error text tells whether an optional value is present: `no` or `a`."""
    return "no" if value is None else "a"


def show(value: object) -> str:
    """Return a foreign value as text for errors: readable and of bounded length."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 90 else text[:87] + "..."
