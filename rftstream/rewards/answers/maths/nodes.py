"""Trees of expressions, and the forms that an answer may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Tree:
    """A part of an expression.

    `op` is its kind: number, symbol, add, mul, div, neg, pow, pm, factorial, abs, floor, ceil, binom, log (of the first
    part, to the base of the second), root (of the first, with the second as index), or the name of a function.
    """

    op: str
    parts: tuple[Tree, ...] = ()
    name: str = ""
    """Name of a symbol; for `pm`, `+` if the plus is the upper sign."""
    number: Fraction = Fraction(0)
    rounded: bool = False
    """Whether a number was written with a decimal point, so that it may be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An answer that is one expression, possibly a percentage or with a unit."""

    node: Tree
    unit: str = ""
    """The unit as it was written, cleaned. Empty if there is none."""
    percent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGroup:
    """Several answers: a list without brackets (any order), a set, or a tuple (in order).

    A pair in round or square brackets is a tuple that may also be an interval; `left` and `right` are its brackets.
    """

    kind: str
    """`list`, `set` or `tuple`. A list whose `left` is a comma may also be a number with thousands separators."""
    items: tuple[Form, ...]
    left: str = ""
    right: str = ""
    open_ended: bool = False
    """Whether the list ends with dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval of real numbers. A point is an interval from itself to itself. None stands for infinity."""

    low: Tree | None
    high: Tree | None
    low_open: bool
    high_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSet:
    """A union of intervals. With `excluded`, all real numbers except these points."""

    intervals: tuple[Interval, ...]
    excluded: tuple[Tree, ...] = ()
    variable: str = ""
    """The variable, if the set was written as an inequality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A chain of comparisons, such as `a < b = c`. There is one operator less than there are sides."""

    sides: tuple[Form, ...]
    operators: tuple[str, ...]
    """`=`, `<`, `>`, `<=`, `>=`, `!=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix, row by row."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """An answer in words, in lower case and without decoration."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Based:
    """A whole number with the base in which it is written."""

    number: int
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Numbers separated by colons: a ratio, or a time of day."""

    parts: tuple[Tree, ...]
    clock: bool = False
    """Whether it looks like a time, such as 12:00."""
    half_day: str = ""
    """`am`, `pm` or empty."""


Form = Value | AnswerGroup | RealSet | Relation | Matrix | Words | Based | Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The reading of one answer: its cleaned text, and all possible forms of the text."""

    text: str
    forms: tuple[Form, ...] = field(default=())

    @property
    def whole(self) -> bool:
        """Return whether the text was read completely, as more than words."""
        return any(not isinstance(form, Words) for form in self.forms)


def number(value: int | Fraction, *, rounded: bool = False) -> Tree:
    """Return a number as a tree."""
    return Tree("number", number=Fraction(value), rounded=rounded)


def symbol(name: str) -> Tree:
    """Return a symbol as a tree."""
    return Tree("symbol", name=name)


def symbols_of(node: Tree) -> frozenset[str]:
    """Return the names of all variables in a tree."""
    if node.op == "symbol":
        return frozenset({node.name})
    return frozenset().union(*(symbols_of(part) for part in node.parts))


def has(node: Tree, op: str) -> bool:
    """Return whether a tree contains a part of this kind."""
    return node.op == op or any(has(part, op) for part in node.parts)


def is_rounded(node: Tree) -> bool:
    """Return whether a tree contains a number with a decimal point."""
    return node.rounded or any(is_rounded(part) for part in node.parts)
