"""Evaluates trees: exactly while they are rational, otherwise as floats with many digits. Nothing takes long: see
guards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]

from rftstream.rewards.answers.maths.expressions import INVERSES
from rftstream.rewards.answers.maths.guards import (
    MAX_EXACT_BITS,
    MAX_EXACT_FACTORIAL,
    MAX_FACTORIAL,
    MAX_LOG2,
    TooCostly,
)
from rftstream.rewards.answers.maths.nodes import Tree, has, symbols_of

DIGITS, MORE_DIGITS = 40, 80
_CLOSE = mpmath.mpf(10) ** -25
_TINY = mpmath.mpf(10) ** -30
_POSITIVE = tuple(Fraction(top, 97) for top in (83, 131, 59, 211, 173, 37, 151, 109, 67, 239, 191, 47))
_POINTS = 3


class Undefined(Exception):
    """The tree has no value at this point."""


Number = Any
"""A Fraction, or mpmath's mpf or mpc."""


def evaluate(node: Tree, point: Mapping[str, Fraction] | None = None) -> Number:
    """Return the value of a tree, with the given values of its variables. Undefined if there is no value, TooCostly if
    the evaluation would take long."""
    try:
        value = _evaluate(node, point or {})
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise Undefined(str(error)) from None
    if not isinstance(value, Fraction) and not mpmath.isfinite(value):
        raise Undefined("not finite")
    return value


def equal_trees(left: Tree, right: Tree, *, places: int, rounded: bool) -> bool | None:
    """Return whether two trees have the same value for all values of their variables. None: unknown.

    They are compared at fixed points, exactly or to 25 digits. With `rounded`, both are first rounded to `places`
    decimal places, and small numbers must agree to four digits."""
    if left == right:
        return True
    names = sorted(symbols_of(left) | symbols_of(right))
    if not names:
        return _equal_constants(left, right, places if rounded else None)
    positive = _agree(left, right, _points(names, signs=(1,)), places if rounded else None)
    if positive is None:
        return None
    if positive is False:
        return None if _is_periodic(left) or _is_periodic(right) else False
    mixed = _agree(left, right, _points(names, signs=(-1, 1)), places if rounded else None)
    return True if mixed is not False else None


def expand_plus_minus(node: Tree) -> list[Tree]:
    """Return the trees that a tree with plus-minus signs stands for: one with all upper signs, and one with all lower
    signs."""
    if not has(node, "pm"):
        return [node]
    return [_with_signs(node, upper=True), _with_signs(node, upper=False)]


def constant(node: Tree) -> Number | None:
    """Return the value of a tree without variables; None if it has variables or no value."""
    if symbols_of(node):
        return None
    try:
        with mpmath.workdps(DIGITS):
            return evaluate(node)
    except Undefined:
        return None


def are_near(left: Tree, right: Tree, tolerance: float) -> bool:
    """Return whether two trees without variables have values whose difference is at most `tolerance` times the
    first."""
    values = constant(left), constant(right)
    if values[0] is None or values[1] is None:
        return False
    one, other = _float(values[0]), _float(values[1])
    return bool(abs(one - other) <= tolerance * abs(one))


def _with_signs(node: Tree, *, upper: bool) -> Tree:
    parts = tuple(_with_signs(part, upper=upper) for part in node.parts)
    if node.op != "pm":
        return Tree(node.op, parts, node.name, node.number, node.rounded)
    plus = (node.name == "+") == upper
    return Tree("add", (parts[0], parts[1] if plus else Tree("neg", (parts[1],))))


def _points(names: Sequence[str], *, signs: Sequence[int]) -> Iterator[dict[str, Fraction]]:
    for number in range(_POINTS):
        values = itertools.islice(itertools.cycle(_POSITIVE), number * 5, None)
        turns = itertools.cycle(signs)
        pairs = enumerate(zip(names, values, strict=False))
        yield {name: value * next(turns) + (place // len(_POSITIVE)) for place, (name, value) in pairs}


def _agree(left: Tree, right: Tree, points: Iterator[dict[str, Fraction]], places: int | None) -> bool | None:
    """Return whether two trees agree at all points where both are defined; None if there is no such point."""
    defined = 0
    for point in points:
        with mpmath.workdps(DIGITS):
            try:
                values = evaluate(left, point), evaluate(right, point)
            except Undefined:
                continue
            if not _close(*values, places) and not _both_vanish(left, right, point, values, places):
                return False
        defined += 1
    return True if defined else None


def _equal_constants(left: Tree, right: Tree, places: int | None) -> bool | None:
    with mpmath.workdps(DIGITS):
        try:
            values = evaluate(left), evaluate(right)
        except Undefined:
            return None
        if _close(*values, places):
            return True
        return _both_vanish(left, right, {}, values, places)


def _both_vanish(
    left: Tree, right: Tree, point: Mapping[str, Fraction], values: tuple[Number, Number], places: int | None
) -> bool:
    """Return whether a difference close to zero shrinks with more digits, which means that it is zero."""
    if places is not None or all(isinstance(value, Fraction) for value in values):
        return False
    if abs(_float(values[0]) - _float(values[1])) > _TINY:
        return False
    with mpmath.workdps(MORE_DIGITS):
        more = abs(_float(evaluate(left, point)) - _float(evaluate(right, point)))
        return bool(more <= mpmath.mpf(10) ** -65)


def _close(left: Number, right: Number, places: int | None) -> bool:
    if places is not None:
        return _close_decimals(left, right, places)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _float(left), _float(right)
    return bool(abs(left - right) <= _CLOSE * max(abs(left), abs(right)))


def _close_decimals(left: Number, right: Number, places: int) -> bool:
    """Return whether two numbers, at least one of them written as a decimal, are equal when rounded."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        if left == right:
            return True
        equal = round(left, places) == round(right, places)
        return equal and abs(left - right) <= Fraction(1, 10**4) * max(abs(left), abs(right))
    left, right = _float(left), _float(right)
    difference, size = abs(left - right), max(abs(left), abs(right))
    if difference <= _CLOSE * size:
        return True
    if isinstance(left, mpmath.mpc) or isinstance(right, mpmath.mpc):
        return bool(difference < mpmath.mpf(10) ** -places / 2 and difference <= size / 10**4)
    scale = mpmath.mpf(10) ** places
    equal = mpmath.nint(left * scale) == mpmath.nint(right * scale)
    return bool(equal and difference <= size / 10**4)


def _is_periodic(node: Tree) -> bool:
    """Return whether a tree has a power of a negative number with a variable exponent, or a trigonometric function of a
    variable. Two such trees may be equal only for whole numbers."""
    if node.op == "pow" and symbols_of(node.parts[1]):
        return _may_be_negative(node.parts[0])
    if node.op in ("sin", "cos", "floor", "ceil", "factorial", "binom") and symbols_of(node):
        return True
    return any(_is_periodic(part) for part in node.parts)


def _may_be_negative(node: Tree) -> bool:
    value = constant(node)
    return value is None or not isinstance(value, Fraction) or value < 0


def _float(value: Number) -> Number:
    if not isinstance(value, Fraction):
        return value
    return mpmath.mpf(value.numerator) / value.denominator


def _evaluate(node: Tree, point: Mapping[str, Fraction]) -> Number:
    if node.op == "number":
        return node.number
    if node.op == "symbol":
        return point[node.name]
    if node.op in ("infinity", "pm"):
        raise Undefined(node.op)
    if node.op in _CONSTANTS:
        return _CONSTANTS[node.op]()
    values = [_evaluate(part, point) for part in node.parts]
    operation = _OPERATIONS.get(node.op)
    return _function(node.op, values[0]) if operation is None else operation(*values)


def _add(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left + right
    return _float(left) + _float(right)


def _multiply(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        _check_bits(_bits(left) + _bits(right))
        return left * right
    return _float(left) * _float(right)


def _divide(left: Number, right: Number) -> Number:
    if right == 0:
        raise Undefined("division by zero")
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        _check_bits(_bits(left) + _bits(right))
        return left / right
    return _float(left) / _float(right)


def _power(base: Number, exponent: Number) -> Number:
    if base == 0:
        if mpmath.re(_float(exponent)) < 0:
            raise Undefined("division by zero")
        return Fraction(1) if exponent == 0 else Fraction(0)
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction) and abs(exponent.numerator) * _bits(base) <= MAX_EXACT_BITS:
            return base**exponent.numerator
        _check_magnitude(base, exponent)
        return mpmath.power(_float(base), exponent.numerator)
    _check_magnitude(base, exponent)
    if isinstance(base, Fraction) and base < 0 and isinstance(exponent, Fraction) and exponent.denominator % 2:
        return _power(-base, exponent) * (-1) ** exponent.numerator  # the real one, as in (-8)^{1/3}
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base > 0 and exponent.denominator <= 12:
        exact = _exact_root(base, exponent.denominator)
        if exact is not None and abs(exponent.numerator) * _bits(exact) <= MAX_EXACT_BITS:
            return exact**exponent.numerator
    return mpmath.power(_float(base), _float(exponent))


def _root(value: Number, index: Number) -> Number:
    if not isinstance(index, Fraction) or index == 0:
        return _power(value, _divide(Fraction(1), index))
    if isinstance(value, Fraction) and index.denominator == 1 and 0 < index.numerator <= 1000:
        if value < 0 and index.numerator % 2:
            return -_root(-value, index)  # the real root, as in \sqrt[3]{-8}
        exact = _exact_root(value, index.numerator) if value >= 0 else None
        return exact if exact is not None else mpmath.root(_float(value), index.numerator)
    return _power(value, 1 / index)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """Return the root of a fraction if the root is a fraction, else None."""
    parts = []
    for part in (value.numerator, value.denominator):
        if part.bit_length() > 4000:
            return None
        root = math.isqrt(part) if index == 2 else _integer_root(part, index)
        if root**index != part:
            return None
        parts.append(root)
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, index: int) -> int:
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value.numerator <= MAX_EXACT_FACTORIAL:
        return Fraction(math.factorial(value.numerator))
    if abs(_float(value)) > MAX_FACTORIAL:
        raise TooCostly("the factorial of a large number")
    if isinstance(value, Fraction) and value.denominator == 1 and value < 0:
        raise Undefined("the factorial of a negative number")
    return mpmath.factorial(_float(value))


def _binomial(top: Number, bottom: Number) -> Number:
    whole = isinstance(top, Fraction) and isinstance(bottom, Fraction) and top.denominator == bottom.denominator == 1
    if whole and 0 <= top <= MAX_EXACT_FACTORIAL and bottom >= 0:
        return Fraction(math.comb(top.numerator, bottom.numerator))
    if max(abs(_float(top)), abs(_float(bottom))) > MAX_FACTORIAL:
        raise TooCostly("a binomial coefficient of large numbers")
    return mpmath.binomial(_float(top), _float(bottom))


def _function(name: str, value: Number) -> Number:
    argument = _float(value)
    if abs(argument) > 1e6 and name not in ("ln", "arcsin", "arccos", "arctan"):
        if name in ("exp", "sinh", "cosh") and abs(argument) > MAX_LOG2:
            raise TooCostly(f"{name} of a large number")
        if abs(argument) > mpmath.mpf(10) ** 30:
            raise TooCostly(f"{name} of a large number")
    if name == "ln" and argument == 0:
        raise Undefined("ln(0)")
    found = getattr(mpmath, _OF_MPMATH.get(name, name), None)
    if found is None:
        raise Undefined(name)
    return found(argument)


def _real(value: Number) -> Number:
    if isinstance(value, mpmath.mpc):
        raise Undefined("a complex number has no order")
    if not isinstance(value, Fraction) and abs(value) > mpmath.mpf(10) ** 35:
        raise TooCostly("rounding a large number")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_bits(bits: int) -> None:
    if bits > 4 * MAX_EXACT_BITS:
        raise TooCostly("a number of more than 200,000 digits")


def _check_magnitude(base: Number, exponent: Number) -> None:
    size = abs(_float(exponent))
    logarithm = abs(mpmath.log(abs(_float(base)))) if base != 0 else mpmath.mpf(0)
    if size * logarithm > MAX_LOG2:
        raise TooCostly("a power that is too large")


_CONSTANTS: Mapping[str, Callable[[], Number]] = {
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
}
_OPERATIONS: Mapping[str, Callable[..., Number]] = {
    "add": _add,
    "neg": lambda value: -value,
    "mul": _multiply,
    "div": _divide,
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(_real(value))),
    "ceil": lambda value: Fraction(math.ceil(_real(value))),
    "log": lambda value, base: mpmath.log(_float(value)) / mpmath.log(_float(base)),
    "re": lambda value: mpmath.re(_float(value)),
    "im": lambda value: mpmath.im(_float(value)),
}
_OF_MPMATH = {"ln": "log"} | {inverse: f"a{name}" for name, inverse in INVERSES.items()}
"""Function -> its name in mpmath, if that differs."""
