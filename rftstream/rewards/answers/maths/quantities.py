"""Reads answers that are one value: an expression with currency, unit or percent sign, or a number in words."""

from __future__ import annotations

import re

from rftstream.rewards.answers.clean import bare_words
from rftstream.rewards.answers.maths.expressions import read_expression
from rftstream.rewards.answers.maths.nodes import Based, Form, Ratio, Tree, Value, number, symbols_of
from rftstream.rewards.answers.maths.tokens import Unreadable
from rftstream.rewards.answers.maths.units import COUNTERS, unit_name
from rftstream.rewards.answers.maths.values import expand_plus_minus
from rftstream.rewards.answers.maths.words import number_in_words

_ABOUT = re.compile(
    r"^(?:\\text\{\s*)?(?:about|approximately|approx\.?|around|roughly|exactly|a total of|约|大约|共|一共|是|为"
    r"|等于|\\approx|=)"
    r"(?:\s*\})?\s*(?=\S)",
    re.IGNORECASE,
)
_CURRENCY_SIGN = re.compile(r"^(-?)\s*(?:\\dollar|€|£|¥|₹|(?:Rs|USD|RMB|US)\b\.?)\s*|^(-)\s*\\dollar\s*", re.IGNORECASE)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
           "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}  # fmt: skip
_PERCENT = re.compile(
    r"\s*(?:\\?%|(?:\\text\{\s*|(?<![a-zA-Z]))(?:percent(?:age)?(?: points?)?|per cent|pct\.?)(?:\s*\})?)\s*$",
    re.IGNORECASE,
)
_WORD_UNIT = re.compile(
    r"(?<![a-zA-Z\\_^{])((?:[a-zA-Z]+\.?)(?:(?:\s*[/*·]\s*|\s*\\cdot\s*|\s+)(?:[a-zA-Z]+\.?))*)\s*((?:\^\s*\{?\s*-?\d\s*\}?)|(?<=[cdk]m)[23])?\s*$"
)
_CHINESE_UNIT = re.compile(r"([\u4e00-\u9fffℎ]+(?:\s*[/每]\s*[\u4e00-\u9fff]+)?)\s*$")
_DEGREE_UNIT = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?\s*$")
_ORDINAL = re.compile(r"^(\d+)\s*(?:\^\s*\{?\s*)?(?:\\text\{\s*)?(?:st|nd|rd|th)(?:\s*\})?(?:\s*\})?$")
_MODULO = re.compile(r"\s*(?:\(\s*)?\\pmod\s*(?:\{[^{}]*\}|\d+)(?:\s*\))?\s*$|\s*\(\s*(?:\\text\{)?\s*mod[^()]*\)\s*$")
_OHM = re.compile(r"(?<=[\d\s])(?:Ω|\\Omega)\s*$")
_MINUS = re.compile(r"^(?:minus|negative)\s+(?=[\d.])", re.IGNORECASE)
_ASIDE = re.compile(r"(?<=\d)\s*\([a-z][a-z \-]{2,}\)$")
_WORDS_OF_NO_UNIT = """
or more less than mod if for where when not over plus minus and to least most about times is are with as of by no
none true false yes fewer each
"""
_FORBIDDEN = frozenset(_WORDS_OF_NO_UNIT.split())
_BASE = re.compile(
    r"^(?:\\text\{\s*)?([0-9A-Z]+)(?:\s*\})?\s*_\s*(?:\{\s*)?(?:\\text\{\s*)?(\d{1,2}|[a-z]{2,8})(?:\s*\})?(?:\s*\})?$"
)
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12,
    "sixteen": 16, "bin": 2, "oct": 8, "dec": 10, "hex": 16,
}  # fmt: skip
_RATIO = re.compile(r"^([^:]+(?::[^:]+)+)$")
_CLOCK = re.compile(
    r"^(\d{1,2})\s*:\s*(\d{2})(?::(\d{2}))?\s*(?:(?:\\text\{\s*)?\s*([ap])\.?\s*m\.?\s*\}?)?$", re.IGNORECASE
)
_HOUR = re.compile(r"^(\d{1,2})\s*(?:\\text\{\s*)?\s*([ap])\.?\s*m\.?\s*\}?$", re.IGNORECASE)


def read_value(text: str) -> list[Form]:
    """Return the possible meanings of one value: a plain expression, one with a unit, a number in words. Empty if it
    cannot be read."""
    text = _ASIDE.sub("", text)
    while (match := _ABOUT.match(text)) and len(text) > match.end():
        text = text[match.end() :].strip()
    if (match := _ORDINAL.match(text)) is not None:
        return [Value(node=number(int(match.group(1))))]
    text = _MINUS.sub("-", _MODULO.sub("", text)).strip()
    if not text:
        return []
    if (value := number_in_words(bare_words(text))) is not None:
        return [Value(node=number(value))]
    currency = ""
    if match := _CURRENCY_SIGN.match(text):
        sign = match.group(1) or match.group(2) or ""
        currency = _currency_name(match.group())
        text = (sign + text[match.end() :]).strip()
    elif text.endswith("\\dollar") or text[-1:] in "€£¥₹":
        currency, text = _currency_name(text[-7:]), text.removesuffix("\\dollar").rstrip("€£¥₹").strip()
    percent = _PERCENT.search(text)
    if percent and percent.start() > 0:
        return [Value(node=node, percent=True) for node in _trees(text[: percent.start()])]
    found: list[Form] = [*_with_unit(text, currency)]
    for node in _trees(text):
        found.append(Value(node=node, unit=currency))
    if not found and (value := number_in_words(bare_words(text))) is not None:
        found.append(Value(node=number(value), unit=currency))
    return found


def _currency_name(sign: str) -> str:
    for mark, name in (("€", "euro"), ("£", "pound_sterling"), ("¥", "yuan"), ("₹", "rupee"), ("rmb", "yuan")):
        if mark in sign.lower():
            return name
    return "rupee" if "rs" in sign.lower() else "dollar"


def _trees(text: str) -> list[Tree]:
    text = text.strip()
    try:
        node = read_expression(text)
    except Unreadable:
        return []
    return expand_plus_minus(node) if "pm" in text or "mp" in text else [node]


def _number_tree(text: str) -> Tree | None:
    """Return the tree of an expression without variables, or of a number in words."""
    text = text.strip().rstrip("~-").strip()
    if text.startswith(r"\text{") and text.endswith("}"):
        text = text[6:-1].strip()
    trees = _trees(text)
    if trees:
        return trees[0] if len(trees) == 1 and not symbols_of(trees[0]) else None
    value = number_in_words(bare_words(text))
    return None if value is None else number(value)


def _with_unit(text: str, currency: str) -> list[Value]:
    """Return the readings of a number followed by a unit or a counted thing."""
    if match := _DEGREE_UNIT.search(text):
        node = _number_tree(text[: match.start()])
        letter = match.group(1) or match.group(2) or ""
        return [Value(node=node, unit=f"deg{letter}" if letter else "degree")] if node is not None else []
    for rest, unit, marked in _splits(_OHM.sub("ohm", text)):
        node = _number_tree(rest)
        if node is None:
            continue
        scale = _SCALES.get(unit.strip().casefold())
        if scale is not None:
            node = Tree("mul", (node, number(scale)))
            return [Value(node=node, unit=currency)]
        first = unit.split()[0].casefold() if unit.split() else ""
        if first in _SCALES and len(unit.split()) > 1:
            node, unit = Tree("mul", (node, number(_SCALES[first]))), unit.split(None, 1)[1]
        name = unit_name(unit, marked=marked or rest.endswith(" "))
        return [Value(node=node, unit=name or (f"? {_counted(unit)}" if _counted(unit) else currency))]
    return []


def _counted(unit: str) -> str:
    """Return the name of a counted thing; empty for words without meaning here."""
    text = unit.strip().casefold()
    return "" if text in ("", "unit", "units") or text in COUNTERS else text


def _splits(text: str) -> list[tuple[str, str, bool]]:
    """Return possible splits of a text into a number and its unit: rest, unit, and whether the unit is in \\text{}."""
    ways = []
    rest, unit = text, ""
    while match := re.search(r"\\text\{([^{}]*)\}\s*(\^\s*\{?\s*-?\d\s*\}?)?\s*(?:/\s*)?$", rest):
        slash = "/" if rest.rstrip().endswith("/") else " "
        unit = f"{match.group(1)}{match.group(2) or ''}{slash if unit else ''}{unit}"
        rest = rest[: match.start()]
        if rest.rstrip().endswith(("/", r"\cdot")):
            unit = ("/" if rest.rstrip().endswith("/") else "*") + unit
            rest = rest.rstrip().removesuffix("/").removesuffix(r"\cdot")
    unit = re.sub(r"^\s*-?\s*", "", unit)
    if unit and _allowed(unit):
        ways.append((rest, unit, True))
    if match := _CHINESE_UNIT.search(text):
        ways += [(text[:place], text[place:], True) for place in range(match.start(), match.end())]
        ways.sort(key=lambda way: unit_name(way[1], marked=True) is None and way[1] not in COUNTERS)
    if match := _WORD_UNIT.search(text):
        words = match.group(1) + (match.group(2) or "")
        if _allowed(words) and text[: match.start()].strip():
            known = unit_name(words, marked=False) is not None
            spaced = text[match.start() - 1 : match.start()] == " "
            if known or (spaced and (len(words) > 3 or unit_name(words, marked=True) is not None)):
                ways.append((text[: match.start()], words, False))
    return ways


def _allowed(unit: str) -> bool:
    words = re.findall(r"[a-z]+", unit.casefold())
    return len(words) <= 6 and not _FORBIDDEN & set(words)


def read_based(text: str) -> list[Form]:
    """Return a whole number with its base, such as `1010_2`."""
    match = _BASE.match(text.replace(" ", ""))
    if match is None:
        return []
    base = int(match.group(2)) if match.group(2).isdigit() else _BASE_WORDS.get(match.group(2), 0)
    if not 2 <= base <= 36 or (not any(character.isdigit() for character in match.group(1)) and base <= 10):
        return []
    try:
        return [Based(number=int(match.group(1), base), base=base)]
    except ValueError:
        return []


def read_ratio(text: str) -> list[Form]:
    """Return numbers separated by colons: a ratio, a time of day, or both readings."""
    if match := _HOUR.match(text):
        return [Ratio(parts=(number(int(match.group(1))), number(0)), clock=True, half_day=_half(match.group(2)))]
    if match := _CLOCK.match(text):
        parts = tuple(number(int(part)) for part in match.groups()[:3] if part is not None)
        return [Ratio(parts=parts, clock=True, half_day=_half(match.group(4)))]
    if not _RATIO.match(text):
        return []
    try:
        return [Ratio(parts=tuple(read_expression(part.strip()) for part in text.split(":")))]
    except Unreadable:
        return []


def _half(letter: str | None) -> str:
    return f"{letter.lower()}m" if letter else ""
