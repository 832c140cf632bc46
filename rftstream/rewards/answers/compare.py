"""Compares two answers: equal, different, or unknown, which a second checker then decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]

from rftstream.rewards.answers.clean import compact, is_formula
from rftstream.rewards.answers.maths.nodes import (
    AnswerGroup,
    Based,
    Form,
    Interval,
    Matrix,
    Ratio,
    Reading,
    RealSet,
    Relation,
    Tree,
    Value,
    Words,
    is_rounded,
    number,
    symbols_of,
)
from rftstream.rewards.answers.maths.realsets import from_inequality, interval_of, points_of, without_points
from rftstream.rewards.answers.maths.units import equal_quantities, same_kind
from rftstream.rewards.answers.maths.values import are_near, constant, equal_trees
from rftstream.rewards.answers.reading import assigned_name

MAX_MATCHED = 60
"""Largest number of items in two lists that are all compared with each other."""

_BARE_LOG = re.compile(r"(?<![a-zA-Z])log(?!\s*_|[a-z])")


class Equality(StrEnum):
    """The result of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    """Compares answers with fixed settings. `math` and `k12` make one and call `readings`."""

    places: int = 6
    """Decimal places to which decimal numbers are compared."""
    strict: bool = True
    """Whether a set never equals a tuple."""
    tolerance: float = 0.0
    """Relative error that a number may have."""

    def readings(self, gold: Reading, found: Reading) -> Equality:
        """Return whether any form of one answer equals any form of the other."""
        if gold.text and compact(gold.text) == compact(found.text):
            return Equality.EQUAL
        verdicts = set()
        for left in gold.forms:
            for right in found.forms:
                verdict = self.forms(left, right)
                if verdict == Equality.EQUAL:
                    return verdict
                verdicts.add(verdict)
        if not verdicts or Equality.UNKNOWN in verdicts:
            return Equality.UNKNOWN
        return Equality.UNKNOWN if _is_unread(gold) or _is_unread(found) else Equality.DIFFERENT

    def forms(self, gold: Form, found: Form) -> Equality:
        """Return whether two forms are equal."""
        if gold == found and not isinstance(gold, AnswerGroup):
            return Equality.EQUAL
        match gold, found:
            case Relation(), Relation():
                return self._relations(gold, found)
            case Relation(), _:
                return self._relation_and_value(gold, found, lenient=False)
            case _, Relation():
                return self._relation_and_value(found, gold, lenient=True)
            case Value(), Value():
                return self._values(gold, found)
            case AnswerGroup(), AnswerGroup():
                return self._groups(gold, found)
            case RealSet(), RealSet():
                return self._real_sets(gold, found)
            case (RealSet(), AnswerGroup()) | (AnswerGroup(), RealSet()):
                return self._set_and_group(gold, found)
            case Matrix(), Matrix():
                if [len(row) for row in gold.rows] != [len(row) for row in found.rows]:
                    return Equality.DIFFERENT
                return _all([self._in_order(one, two) for one, two in zip(gold.rows, found.rows, strict=True)])
            case Based(), Based():
                return _decided(gold.number == found.number)
            case Ratio(), Ratio():
                return self._ratios(gold, found)
            case (Ratio(), Value()) | (Value(), Ratio()):
                return self._ratio_and_value(gold, found)
            case (AnswerGroup(items=(single,)), Value()) if not gold.open_ended:
                return self.forms(single, found)
            case (Value(), AnswerGroup(items=(single,))) if not found.open_ended:
                return self.forms(gold, single)
            case Matrix(), AnswerGroup():
                return self._vector(gold, found)
            case AnswerGroup(), Matrix():
                return self._vector(found, gold)
            case Words(), Words():
                return _decided(gold.text == found.text)
        return Equality.DIFFERENT

    # ------------------------------------------------------------------------------------------ values

    def _values(self, gold: Value, found: Value) -> Equality:
        if gold.unit and found.unit and gold.unit != found.unit:
            return self._quantities(gold, found)
        if gold.percent == found.percent:
            return self._trees(gold.node, found.node)
        share, bare = (gold.node, found.node) if gold.percent else (found.node, gold.node)
        verdict = self._trees(Tree("div", (share, number(100))), bare)
        if verdict == Equality.EQUAL:
            return verdict
        size = constant(share)
        small = size is not None and (isinstance(size, mpmath.mpc) or abs(size) < 1)
        exact = gold.percent or isinstance(size, Fraction)
        return self._trees(share, bare) if exact and not small else verdict

    def _quantities(self, gold: Value, found: Value) -> Equality:
        if gold.unit.startswith("?") or found.unit.startswith("?"):
            return self._trees(gold.node, found.node)
        values = constant(gold.node), constant(found.node)
        if values[0] is None or values[1] is None:
            return Equality.UNKNOWN
        if {gold.unit, found.unit} <= {"degree", "degC", "degF"} and "degree" in (gold.unit, found.unit):
            return self._trees(gold.node, found.node)
        if {gold.unit, found.unit} == {"pound_sterling", "lb"}:  # `pounds` may be weight or money
            return self._trees(gold.node, found.node)
        rounded = is_rounded(gold.node) or is_rounded(found.node)
        try:
            if not same_kind(gold.unit, found.unit):
                return Equality.DIFFERENT
            equal = equal_quantities(
                _fraction(values[0]),
                gold.unit,
                _fraction(values[1]),
                found.unit,
                tolerance=self.tolerance or (1e-6 if rounded else 1e-12),
            )
        except (ValueError, TypeError, OverflowError, AttributeError):
            return Equality.UNKNOWN
        return _decided(equal)

    def _trees(self, gold: Tree, found: Tree) -> Equality:
        if gold.op == "infinity" or found.op == "infinity":
            return _decided(gold == found)
        rounded = is_rounded(gold) or is_rounded(found)
        equal = equal_trees(gold, found, places=self.places, rounded=rounded)
        if not equal and self.tolerance and are_near(gold, found, self.tolerance):
            return Equality.EQUAL
        return Equality.UNKNOWN if equal is None else _decided(equal)

    def _ratios(self, gold: Ratio, found: Ratio) -> Equality:
        if gold.clock and found.clock:
            if gold.half_day and found.half_day and gold.half_day != found.half_day:
                return Equality.DIFFERENT
            return _decided(_without_seconds(gold.parts) == _without_seconds(found.parts))
        if len(gold.parts) != len(found.parts):
            return Equality.DIFFERENT
        products = [
            self._trees(Tree("mul", (one, found.parts[0])), Tree("mul", (other, gold.parts[0])))
            for one, other in zip(gold.parts[1:], found.parts[1:], strict=True)
        ]
        return _all(products)

    def _ratio_and_value(self, gold: Form, found: Form) -> Equality:
        ratio, value = (gold, found) if isinstance(gold, Ratio) else (found, gold)
        assert isinstance(ratio, Ratio)
        assert isinstance(value, Value)
        if len(ratio.parts) != 2 or ratio.half_day or value.percent:
            return Equality.DIFFERENT
        return self._trees(Tree("div", ratio.parts), value.node)

    # ------------------------------------------------------------------------------------------ groups and sets

    def _groups(self, gold: AnswerGroup, found: AnswerGroup) -> Equality:
        if gold.open_ended != found.open_ended or len(gold.items) != len(found.items):
            return self._without_repeats(gold, found)
        kinds = {gold.kind, found.kind}
        if kinds == {"tuple"}:
            if (gold.left == "[") != (found.left == "[") and len(gold.items) == 2 and gold.left and found.left:
                return Equality.DIFFERENT  # perhaps an open and a closed interval
            return self._in_order(gold.items, found.items)
        if (kinds == {"set", "tuple"} and self.strict) or ("tuple" in kinds and "," in (gold.left, found.left)):
            return Equality.DIFFERENT
        if "tuple" in kinds:
            closed = any(group.left == "[" for group in (gold, found) if group.kind == "tuple")
            return Equality.DIFFERENT if closed and len(gold.items) == 2 else self._in_order(gold.items, found.items)
        return self._in_any_order(gold.items, found.items)

    def _without_repeats(self, gold: AnswerGroup, found: AnswerGroup) -> Equality:
        """Compare sets in which an element may be repeated."""
        if gold.open_ended or found.open_ended or "tuple" in (gold.kind, found.kind):
            return Equality.DIFFERENT
        if len(gold.items) > MAX_MATCHED or len(found.items) > MAX_MATCHED or "set" not in (gold.kind, found.kind):
            return Equality.DIFFERENT
        left, right = self._distinct(gold.items), self._distinct(found.items)
        return self._in_any_order(left, right) if len(left) == len(right) else Equality.DIFFERENT

    def _distinct(self, items: tuple[Form, ...]) -> tuple[Form, ...]:
        kept: list[Form] = []
        for item in items:
            if not any(self.forms(item, other) == Equality.EQUAL for other in kept):
                kept.append(item)
        return tuple(kept)

    def _in_order(self, gold: tuple[Form, ...], found: tuple[Form, ...]) -> Equality:
        return _all([self._items(left, right) for left, right in zip(gold, found, strict=True)])

    def _items(self, gold: Form, found: Form) -> Equality:
        """Compare items of groups. Inside a group an equation does not equal its value."""
        if isinstance(gold, Relation) != isinstance(found, Relation):
            relation, other = (gold, found) if isinstance(gold, Relation) else (found, gold)
            assert isinstance(relation, Relation)
            return self.forms(relation.sides[-1], other) if assigned_name(relation) else Equality.DIFFERENT
        return self.forms(gold, found)

    def _in_any_order(self, gold: tuple[Form, ...], found: tuple[Form, ...]) -> Equality:
        """Match each item of one list with an equal item of the other."""
        if len(gold) > MAX_MATCHED:
            return self._in_order(gold, found)
        left = list(found)
        unknown = False
        for item in gold:
            verdicts = [self._items(item, other) for other in left]
            if Equality.EQUAL in verdicts:
                del left[verdicts.index(Equality.EQUAL)]
            elif Equality.UNKNOWN in verdicts:
                unknown = True
            else:
                return Equality.DIFFERENT
        return Equality.UNKNOWN if unknown else Equality.EQUAL

    def _real_sets(self, gold: RealSet, found: RealSet) -> Equality:
        if self.strict and gold.variable and found.variable and gold.variable != found.variable:
            return Equality.DIFFERENT
        left, right = without_points(gold), without_points(found)
        if len(left.intervals) != len(right.intervals):
            return Equality.DIFFERENT
        pairs = zip(left.intervals, right.intervals, strict=True)
        return _all([self._intervals(one, other) for one, other in pairs])

    def _intervals(self, gold: Interval, found: Interval) -> Equality:
        if (gold.low_open, gold.high_open) != (found.low_open, found.high_open):
            return Equality.DIFFERENT
        ends = ((gold.low, found.low), (gold.high, found.high))
        return _all(
            [_decided(one is two) if one is None or two is None else self._trees(one, two) for one, two in ends]
        )

    def _set_and_group(self, gold: Form, found: Form) -> Equality:
        sets = []
        for form in (gold, found):
            if isinstance(form, RealSet):
                sets.append(form)
                continue
            assert isinstance(form, AnswerGroup)
            real = interval_of(form) if form.kind == "tuple" else points_of(form) if form.kind == "set" else None
            if real is None:
                return Equality.DIFFERENT
            sets.append(real)
        return self._real_sets(*sets)

    def _vector(self, matrix: Matrix, group: AnswerGroup) -> Equality:
        """Compare a column or row matrix with a tuple, as vectors."""
        if group.kind != "tuple" or group.left == "[":
            return Equality.UNKNOWN
        flat = tuple(cell for row in matrix.rows for cell in row)
        if (len(matrix.rows) != 1 and any(len(row) != 1 for row in matrix.rows)) or len(flat) != len(group.items):
            return Equality.DIFFERENT
        return Equality.UNKNOWN if self._in_order(flat, group.items) == Equality.EQUAL else Equality.DIFFERENT

    # ------------------------------------------------------------------------------------------ relations

    def _relation_and_value(self, relation: Relation, other: Form, *, lenient: bool) -> Equality:
        """Compare `x = 5` with `5`. An equation such as `2x + 1 = 0` has no value; with `lenient`, `x + y = 5` has
        one."""
        if isinstance(other, Words):
            return Equality.DIFFERENT
        if (real := from_inequality(relation)) is not None:
            return self.forms(real, other) if isinstance(other, RealSet | AnswerGroup) else Equality.DIFFERENT
        if set(relation.operators) != {"="}:
            return Equality.DIFFERENT
        left, last = relation.sides[0], relation.sides[-1]
        if assigned_name(relation) or _is_names(left) or all(_is_constant(side) for side in relation.sides):
            return self.forms(last, other)
        if assigned_name(Relation(sides=relation.sides[::-1], operators=relation.operators)):
            return self.forms(left, other)  # 3 = x
        if lenient and isinstance(left, Value) and _is_plain_sum(left.node):
            zero = isinstance(last, Value) and last.node == number(0)
            return Equality.DIFFERENT if zero else self.forms(last, other)
        return Equality.DIFFERENT

    def _relations(self, gold: Relation, found: Relation) -> Equality:
        first, second = from_inequality(gold), from_inequality(found)
        if first is not None and second is not None:
            return self._real_sets(first, second)
        names = assigned_name(gold), assigned_name(found)
        if all(names):
            if names[0] != names[1] and self.strict and not _is_same_name(gold.sides[0], found.sides[0]):
                return self._equations(gold, found)
            return self.forms(gold.sides[-1], found.sides[-1])
        if gold.operators == found.operators and len(gold.sides) == len(found.sides):
            verdict = self._in_order(gold.sides, found.sides)
            if verdict == Equality.EQUAL:
                return verdict
        if gold.operators == ("=",) and found.operators == ("=",):
            return self._equations(gold, found)
        return Equality.UNKNOWN

    def _equations(self, gold: Relation, found: Relation) -> Equality:
        """Compare two equations. They are equal if the differences of their sides are the same up to a constant
        factor."""
        differences = [_difference(gold), _difference(found)]
        if differences[0] is None or differences[1] is None:
            return Equality.UNKNOWN
        left, right = differences[0], differences[1]
        names = sorted(symbols_of(left) | symbols_of(right))
        if symbols_of(left) != symbols_of(right):
            return Equality.DIFFERENT if not self.strict else Equality.UNKNOWN
        quotient = Tree("div", (left, right))
        if not names:
            return Equality.UNKNOWN
        other = Tree("div", (_renamed(left, names), _renamed(right, names)))
        equal = equal_trees(quotient, other, places=self.places, rounded=is_rounded(quotient))
        return Equality.EQUAL if equal else Equality.UNKNOWN


def _is_unread(reading: Reading) -> bool:
    """Return whether a text is a formula that could not be read, or has a logarithm without a base, which may be 10 or
    e. The empty set counts as read, although it is a word."""
    if _BARE_LOG.search(reading.text):
        return True
    is_word = bool(reading.forms) and re.search(r"[\\{}^_]", reading.text) is not None
    return not reading.whole and not is_word and is_formula(reading.text)


def _difference(relation: Relation) -> Tree | None:
    left, right = relation.sides[0], relation.sides[-1]
    if not isinstance(left, Value) or not isinstance(right, Value) or left.percent or right.percent:
        return None
    return Tree("add", (left.node, Tree("neg", (right.node,))))


def _renamed(node: Tree, names: list[str]) -> Tree:
    """Return a tree with other values for its variables. A constant factor stays the same under this change."""
    if node.op == "symbol":
        place = names.index(node.name) + 2
        shifted = Tree("mul", (node, number(Fraction(place * place + 1, place))))
        return Tree("add", (shifted, number(Fraction(place, 7))))
    parts = tuple(_renamed(part, names) for part in node.parts)
    return Tree(node.op, parts, node.name, node.number, node.rounded)


def _decided(equal: bool) -> Equality:
    return Equality.EQUAL if equal else Equality.DIFFERENT


def _all(verdicts: list[Equality]) -> Equality:
    if Equality.DIFFERENT in verdicts:
        return Equality.DIFFERENT
    return Equality.UNKNOWN if Equality.UNKNOWN in verdicts else Equality.EQUAL


def _fraction(value: object) -> Fraction:
    return value if isinstance(value, Fraction) else Fraction(str(value))


def _without_seconds(parts: tuple[Tree, ...]) -> tuple[Tree, ...]:
    return parts[:2] if len(parts) == 3 and parts[2] == number(0) else parts


def _is_constant(form: Form) -> bool:
    return isinstance(form, Value) and not symbols_of(form.node)


def _is_names(form: Form) -> bool:
    """Return whether a form is a tuple of variables, as in `(x, y) = (1, 2)`."""
    return (
        isinstance(form, AnswerGroup)
        and form.kind in ("tuple", "list")
        and all(isinstance(item, Value) and item.node.op == "symbol" for item in form.items)
    )


def _is_plain_sum(node: Tree) -> bool:
    """Return whether a tree is a sum, difference or product of only variables."""
    if node.op == "symbol":
        return True
    return node.op in ("add", "neg", "mul", "div", "abs", "pow") and all(
        _is_plain_sum(part) or (node.op == "pow" and part.op == "number") for part in node.parts
    )


def _is_same_name(gold: Form, found: Form) -> bool:
    return isinstance(gold, Words) or isinstance(found, Words) or gold == found
