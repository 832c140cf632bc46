r"""Cuts a cleaned expression into tokens: numbers, names, commands, brackets and operators.

A number token holds its exact value. `1{,}234` and `1 234` are numbers; `1,234` is a number if it cannot be a list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_TOKENS = 1500


class Unreadable(Exception):
    """This reader cannot read the text as an expression."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token: `kind` is number, name, command, or the operator or bracket itself."""

    kind: str
    text: str
    number: Fraction = Fraction(0)
    rounded: bool = False
    spaced: bool = False
    """Whether white space precedes it."""


_NUMBER = re.compile(
    r"(?P<grouped>\d{1,3}(?:\{,\}\d{3})+|\d{1,3}(?:,\d{3})+(?![\d,])|[1-9]\d{0,2}(?: \d{3})+(?!\s*\d))(?P<rest>\.\d+)?"
    r"|(?P<plain>\d+\.\d*|\.\d+|\d+)"
    r"(?P<repeat>\\(?:overline|bar|dot)\s*\{?\d+\}?(?:\\dot\s*\{?\d\}?)?|\d*\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?)?"
)
_POWER_OF_TEN = re.compile(r"[eE]([+-]?\d{1,6})(?![\d.a-zA-Z])")
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|[{}%|])")
_SKIP = re.compile(r"\s+")
_WORD = re.compile(r"[a-zA-Z]+")

_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln lg exp sqrt abs pi arccot arcsec
arccsc arcsinh arccosh arctanh arsinh arcosh artanh cbrt floor ceil
"""
NAMES = set(_NAMES.split())
_LETTERS = re.compile("|".join(sorted(NAMES, key=len, reverse=True)))
_SYMBOLS = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega Gamma
Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar vartheta varrho aleph
"""
SYMBOL_COMMANDS = set(_SYMBOLS.split())


def cut(text: str) -> list[Token]:
    """Return the tokens of a cleaned expression. Unreadable if the text contains something else."""
    tokens: list[Token] = []
    place = 0
    spaced = False
    while place < len(text):
        if skipped := _SKIP.match(text, place):
            place, spaced = skipped.end(), True
            continue
        if len(tokens) >= MAX_TOKENS:
            raise Unreadable("too many tokens")
        before = len(tokens)
        place = _next(text, place, tokens)
        if spaced and len(tokens) > before:
            first = tokens[before]
            tokens[before] = Token(first.kind, first.text, first.number, first.rounded, True)
        spaced = False
    return tokens


def _next(text: str, place: int, tokens: list[Token]) -> int:
    if match := _NUMBER.match(text, place):
        return _number(text, match, tokens)
    if match := _COMMAND.match(text, place):
        name = match.group()[1:]
        if name == "text":
            return _text(text, match.end(), tokens)
        tokens.append(Token("command", name))
        return match.end()
    if match := _WORD.match(text, place):
        _letters(match.group(), tokens)
        return match.end()
    character = text[place]
    if text.startswith("**", place):
        tokens.append(Token("^", "^"))
        return place + 2
    if character in "+-*/^_(){}[]|!'":
        tokens.append(Token(character, character))
        return place + 1
    raise Unreadable(f"{character!r} is part of no expression")


def _number(text: str, match: re.Match[str], tokens: list[Token]) -> int:
    end = match.end()
    if match["grouped"]:
        digits = re.sub(r"[{}, ]", "", match["grouped"]) + (match["rest"] or "")
    else:
        digits = match["plain"]
        if match["repeat"]:
            tokens.append(Token("number", match.group(), _repeating(digits, match["repeat"])))
            return end
    if len(digits) > 5000:
        raise Unreadable("a number of more than 5,000 digits")
    exponent = _POWER_OF_TEN.match(text, end)
    value = Fraction(digits if digits[-1] != "." else digits[:-1])
    rounded = "." in digits[:-1]
    if exponent:
        power = int(exponent.group(1))
        if abs(power) > 4000:
            raise Unreadable("an exponent of more than 4,000")
        value *= Fraction(10) ** power
        rounded, end = True, exponent.end()
    tokens.append(Token("number", text[match.start() : end], value, rounded))
    return end


def _repeating(digits: str, repeat: str) -> Fraction:
    """Return the value of a decimal whose last digits repeat: 0.1\\overline{6}, or dots over the first and the last."""
    if "." not in digits:
        raise Unreadable("a line above an integer")
    if "dot" in repeat:
        found = re.findall(r"\\dot\s*\{?(\d)\}?|(\d+)", repeat)
        period = "".join(one or other for one, other in found)
        lead = re.match(r"\d*", repeat)
        fixed = digits + (lead.group() if lead else "")
        period = period[len(lead.group()) :] if lead else period
    else:
        fixed, period = digits, re.sub(r"\D", "", repeat)
    decimals = len(fixed.partition(".")[2])
    start = Fraction(fixed if fixed[-1] != "." else fixed + "0")
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)


def _text(text: str, place: int, tokens: list[Token]) -> int:
    r"""Read `\text{i}` and `\text{sin}` as their content; other words are not part of an expression."""
    end = text.find("}", place)
    content = text[place + 1 : end].strip() if end > 0 else ""
    if content.isalpha() and (len(content) == 1 or content in NAMES):
        _letters(content, tokens)
    elif re.fullmatch(r"\d+(?:\.\d+)?", content):
        tokens.append(Token("number", content, Fraction(content), "." in content))
    else:
        raise Unreadable(f"words: {content[:40]}")
    return end + 1


def _letters(word: str, tokens: list[Token]) -> None:
    """Read letters as known names, or else each letter as a variable. Long words stay words."""
    if word in NAMES:
        tokens.append(Token("command", word))
        return
    place = 0
    loose = 0
    while place < len(word):
        if (match := _LETTERS.match(word, place)) and len(match.group()) > 1:
            tokens.append(Token("command", match.group()))
            place = match.end()
            continue
        tokens.append(Token("name", word[place]))
        loose += 1
        place += 1
    if loose > 3 and len(set(word)) > 1 and not word.isupper() and _looks_like_a_word(word.lower()):
        raise Unreadable(f"a word: {word[:40]}")
    if loose > 6:
        raise Unreadable(f"a word: {word[:40]}")


def _looks_like_a_word(word: str) -> bool:
    return sum(letter in "aeiou" for letter in word) >= 1 and "".join(sorted(word)) != word
