"""The calculator against fractions, and what it refuses."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.environments.toolset.base import ToolError
from rftstream.environments.toolset.calculator import MAX_CHARACTERS, Expression, calculator, write
from tests.suite.each import each

NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.decimals(0, 1000, places=3, allow_nan=False).map(str),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        st.tuples(st.sampled_from(["-", "+", "- "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, st.sampled_from(["2", "3", "-2"])).map(lambda pair: f"({pair[0]})**{pair[1]}"),
        st.tuples(st.integers(0, 9).map(str), st.sampled_from(["**", " ** "]), st.integers(0, 3).map(str)).map("".join),
    ),
    max_leaves=8,
)
BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: Fraction(left ** int(right)),
}


def by_python(text: str) -> Fraction:
    """What Python's own grammar makes of an expression, with fractions."""

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.BinOp():
                return BINARY[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
            case ast.Constant():
                return Fraction(ast.get_source_segment(text, node) or "")
        raise AssertionError(node)

    return value(ast.parse(text, mode="eval").body)


@pytest.mark.slow
@given(EXPRESSIONS)
def test_it_computes_what_python_computes_with_fractions(text: str) -> None:
    try:
        wanted = by_python(text)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculator(text)
        return
    try:
        assert Expression(text).value() == wanted
    except ToolError as error:
        assert "too large" in str(error)


@given(st.fractions())
def test_what_it_writes_is_the_number(value: Fraction) -> None:
    text, _, rest = write(value).partition(" (")
    if rest:
        assert Fraction(rest.rstrip(")")) == value
    assert abs(Fraction(text) - value) <= abs(value) * Fraction(1, 10**14)


@given(st.integers(-(10**30), 10**30), st.integers(0, 12))
def test_short_decimals_are_written_exactly(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    assert Fraction(write(value)) == value


@pytest.mark.slow
@given(st.text(max_size=60) | st.text(alphabet="0123456789.e+-*/%^(), sqrtmaxinfactorial", max_size=80))
def test_any_text_is_computed_or_refused(text: str) -> None:
    try:
        assert calculator(text)
    except ToolError as error:
        assert 0 < len(str(error)) < 400


@each(
    ("text", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("-2 ** 2", "-4"),
        ("2^3^2", "512"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("1/3", "0.333333333333333 (1/3)"),
        ("200 / 3 * 3", "200"),
        ("sqrt(144)", "12"),
        ("sqrt(2)", "1.4142135623731"),
        ("2 ** 0.5 * 2 ** 0.5", "2"),
        ("max(1, 2.5, -3)", "2.5"),
        ("round(2.567, 2)", "2.57"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("factorial(20)", "2432902008176640000"),
        ("7 × 6 ÷ 2 − 1", "20"),
        ("√(16) + π", "7.14159265358979"),
        ("100 * 1e-2", "1"),
        ("(-1) ** 99999999999999999999", "-1"),
        ("0 ** 99999999999999999999", "0"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
    ],
)
def test_by_hand(text: str, result: str) -> None:
    assert calculator(text) == result


@each(
    ("text", "why"),
    [
        ("9**9**9", "too large"),
        ("9**9999**9999", "too large"),
        ("factorial(100000000)", "too large"),
        ("1e999999999", "too large"),
        ("1e-999999999", "too large"),
        ("round(1, 10**9)", "too large"),
        ("9" * 990 + "*10**20", "too large"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("sqrt(-1)", "square root of a negative"),
        ("2 ** 0.3", "fraction as exponent"),
        ("factorial(1.5)", "not whole"),
        ("factorial(-1)", "negative"),
        ("min()", "expected a number"),
        ("sqrt(1, 2)", "got 2 arguments, expected 1"),
        ("round(1, 2, 3)", "expected 1 or 2"),
        ("", "expected a number, found the end"),
        ("1 +", "found the end"),
        ("1 2", "should end"),
        ("(1", "expected '\\)', found the end"),
        ("__import__('os')", "cannot read"),
        ("os(1)", "unknown name 'os'"),
        ("lambda", "unknown name 'lambda'"),
        ("1 if 2 else 3", "should end"),
        ("٣ + 1", "cannot read"),
        ("1\x002", "cannot read"),
        ("(" * 400 + "1" + ")" * 400, "nested more than"),
        ("-" * 900 + "1", "nested more than"),
        ("2**" * 300 + "1", "nested more than"),
        ("1" * (MAX_CHARACTERS + 1), "an expression of 1,001 characters"),
    ],
)
def test_what_it_refuses(text: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        calculator(text)
