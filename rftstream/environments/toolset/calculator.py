"""A calculator: exact arithmetic with numbers of bounded size. It parses expressions itself and runs no Python code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from rftstream.environments.toolset.arguments import shown
from rftstream.environments.toolset.base import ToolError

MAX_CHARACTERS = 1000
MAX_DIGITS = 1000
"""Largest number of decimal digits of a result and of each intermediate result, above and below the fraction bar."""
MAX_NESTING = 50
MAX_FACTORIAL = 449
"""450! has 1001 digits."""
PLACES = 15
"""Significant digits of a number that has no short decimal form."""

_BITS = math.ceil(MAX_DIGITS * math.log2(10))
_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z]\w*)|(\*\*|//|[-+*/%^(),]))", re.A
)
_OTHER_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "√": " sqrt ", "π": " pi "})
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}
_ROOTS = Context(prec=60)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** and parentheses; sqrt, abs, round, floor, ceil, min, max, gcd, lcm,
            factorial, pi, e. For example (12.5 + 7) * 3 ** 2.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"an expression of {len(expression):,} characters, expected at most {MAX_CHARACTERS:,}")
    return write(Expression(expression).value())


calculator.runs_inline = True  # type: ignore[attr-defined]  # the sizes are bounded


def write(value: Fraction) -> str:
    """Return a number as text: a whole number or a short decimal exactly, another one with its fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest == 1 and places <= 2 * PLACES:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    rounded = _decimal(value, Context(prec=PLACES)).normalize()
    digits = f"{rounded:f}" if abs(rounded.adjusted()) < 2 * PLACES else str(rounded)  # not 1E+2 for 100
    if max(len(str(value.numerator)), len(str(value.denominator))) > PLACES:
        return digits
    return f"{digits} ({value.numerator}/{value.denominator})"


class Expression:
    """An arithmetic expression, read from left to right by precedence climbing. Signs and powers bind as in Python; ^
    is also a power."""

    def __init__(self, text: str) -> None:
        """ToolError if a character belongs to no number, name or operator."""
        self._tokens: list[str] = []
        text = text.translate(_OTHER_SIGNS)
        place, end = 0, len(text.rstrip())
        while place < end:
            found = _TOKEN.match(text, place)
            if found is None:
                raise ToolError(f"cannot read {shown(text[place:].strip())} in the expression")
            self._tokens.append(found[0].strip())
            place = found.end()
        self._tokens.append("")
        self._place = 0
        self._depth = 0

    def value(self) -> Fraction:
        """Return its value. ToolError if it is not an expression, or its value is too large."""
        value = self._sum(1)
        if self._next:
            raise ToolError(f"found {shown(self._next)} where the expression should end or have an operator")
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._place]

    def _take(self) -> str:
        token = self._next
        self._place += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next != token:
            raise ToolError(f"expected {token!r}, found {shown(self._next) if self._next else 'the end'}")
        self._place += 1

    def _sum(self, lowest: int) -> Fraction:
        left = self._signed()
        while (rank := _PRECEDENCE.get(self._next, 0)) >= lowest:
            operator = self._take()
            left = _bounded(_operate(operator, left, self._sum(rank + 1)))
        return left

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ToolError(f"an expression nested more than {MAX_NESTING} deep")
        try:
            if self._next in ("+", "-"):
                return self._signed() if self._take() == "+" else -self._signed()
            base = self._atom()
            if self._next in ("**", "^"):
                self._take()
                return _power(base, self._signed())
            return base
        finally:
            self._depth -= 1

    def _atom(self) -> Fraction:
        token = self._take() if self._next else ""
        if token == "(":
            value = self._sum(1)
            self._expect(")")
            return value
        if token[:1].isdecimal() or token[:1] == ".":
            return _number(token)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _FUNCTIONS:
            self._expect("(")
            arguments = [self._sum(1)]
            while self._next == ",":
                self._take()
                arguments.append(self._sum(1))
            self._expect(")")
            return _bounded(_apply(token, arguments))
        if token[:1].isalpha():
            raise ToolError(f"unknown name {shown(token)}; known: {', '.join((*_FUNCTIONS, *_CONSTANTS))}")
        raise ToolError(f"expected a number, found {shown(token) if token else 'the end of the expression'}")


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(exponent.lstrip("+-0")) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise _too_large()
    return _bounded(Fraction(f"{mantissa}e{int(exponent or 0)}"))


def _operate(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if not right:
        raise ToolError("division by zero")
    if operator == "/":
        return left / right
    quotient = Fraction(left // right)
    return quotient if operator == "//" else left - quotient * right


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator == 2 and base >= 0 and abs(exponent.numerator) < 2 * MAX_DIGITS:
            return _power(_root(base), Fraction(exponent.numerator))
        raise ToolError("a power with a fraction as exponent; only halves are known, as in 2 ** 0.5")
    if not base and exponent < 0:
        raise ToolError("division by zero")
    if not base:
        return Fraction(0 if exponent else 1)
    if abs(base) == 1:  # independent of the size of the exponent
        return base if exponent % 2 else Fraction(1)
    if (max(abs(base.numerator), base.denominator).bit_length() - 1) * abs(exponent) > _BITS:
        raise _too_large()
    return _bounded(base ** int(exponent))


def _root(value: Fraction) -> Fraction:
    """Return the square root: exactly if it is a fraction, else to 60 digits."""
    if value < 0:
        raise ToolError("the square root of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    return Fraction(_ROOTS.sqrt(_decimal(value, _ROOTS)))


def _decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _apply(name: str, arguments: list[Fraction]) -> Fraction:
    least, most, function = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        expected = f"{least}" if least == most else f"{least} or more" if most > 2 else f"{least} or {most}"
        raise ToolError(f"{name} got {len(arguments)} arguments, expected {expected}")
    return function(*arguments)


def _whole(value: Fraction, name: str) -> int:
    if value.denominator != 1:
        raise ToolError(f"{name} of a number that is not whole")
    return value.numerator


def _factorial(value: Fraction) -> Fraction:
    number = _whole(value, "factorial")
    if number < 0:
        raise ToolError("factorial of a negative number")
    if number > MAX_FACTORIAL:
        raise _too_large()
    return Fraction(math.factorial(number))


def _round(value: Fraction, places: Fraction = Fraction(0)) -> Fraction:
    number = _whole(places, "the places of round")
    if abs(number) > MAX_DIGITS:
        raise _too_large()
    return Fraction(round(value, number))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > _BITS:
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError(f"the numbers are too large: more than {MAX_DIGITS:,} digits")


_MANY = 1000
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Fraction]]] = {
    "sqrt": (1, 1, _root),
    "abs": (1, 1, abs),
    "round": (1, 2, _round),
    "floor": (1, 1, lambda value: Fraction(math.floor(value))),
    "ceil": (1, 1, lambda value: Fraction(math.ceil(value))),
    "min": (1, _MANY, lambda *values: min(values)),
    "max": (1, _MANY, lambda *values: max(values)),
    "gcd": (1, _MANY, lambda *values: Fraction(math.gcd(*(_whole(value, "gcd") for value in values)))),
    "lcm": (1, _MANY, lambda *values: Fraction(math.lcm(*(_whole(value, "lcm") for value in values)))),
    "factorial": (1, 1, _factorial),
}
_CONSTANTS = {
    "pi": Fraction("3.14159265358979323846264338327950288419716939937510582097494459"),
    "e": Fraction("2.71828182845904523536028747135266249775724709369995957496696763"),
}
