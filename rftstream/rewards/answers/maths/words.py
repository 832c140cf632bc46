"""Numbers in words: English, and Chinese with its own digits."""

from __future__ import annotations

import re
from fractions import Fraction

_SMALL_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen
"""
_UNITS = {word: value for value, word in enumerate(_SMALL_NUMBERS.split())}
_TENS = {
    word: 10 * value
    for value, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip

_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_FORMAL = str.maketrans("壹贰叁肆伍陆柒捌玖拾佰仟萬億點負", "一二三四五六七八九十百千万亿点负")
_SMALL = {"十": 10, "百": 100, "千": 1000}
_LARGE = {"万": 10**4, "亿": 10**8}
_CHINESE = re.compile(r"[零一二三四五六七八九〇两十百千万亿点]+")
_DIGITS_WITH_SCALE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([十百千万亿]+)")


def number_in_words(text: str) -> Fraction | None:
    """Return the number that a text expresses in words, or None if it expresses none."""
    text = text.strip()
    if not text or len(text) > 200:
        return None
    return _english(text.lower()) if text.isascii() else _chinese(text)


def _english(text: str) -> Fraction | None:
    sign = 1
    for word in ("minus ", "negative "):
        if text.startswith(word):
            sign, text = -1, text[len(word) :]
    words = re.sub(r"[-,]", " ", text).split()
    if not words:
        return None
    if "point" in words:
        place = words.index("point")
        whole, digits = _whole(words[:place]), [_UNITS.get(word, 10) for word in words[place + 1 :]]
        if whole is None or not digits or max(digits) > 9:
            return None
        return sign * Fraction(f"{whole}.{''.join(map(str, digits))}")
    value = _with_fraction(words)
    return None if value is None else sign * value


def _with_fraction(words: list[str]) -> Fraction | None:
    """Return the value of `two`, `two thirds`, `a half` or `two and a half`."""
    part = _PARTS.get(words[-1]) or (_PARTS.get(words[-1][:-1]) if words[-1].endswith("s") else None)
    if part is None:
        whole = _whole(words)
        return None if whole is None else Fraction(whole)
    above = words[:-1]
    if "and" in above:
        place = len(above) - 1 - above[::-1].index("and")
        whole, above = _whole(above[:place]), above[place + 1 :]
        if whole is None:
            return None
    else:
        whole = 0
    if above in ([], ["a"], ["an"]):
        if not above and words[-1] not in ("half", "quarter"):
            return None  # `third` alone is an ordinal
        return whole + Fraction(1, part)
    top = _whole(above)
    return None if top is None else whole + Fraction(top, part)


def _whole(words: list[str]) -> int | None:
    total = current = 0
    seen = False
    for place, word in enumerate(words):
        if word == "and" and 0 < place < len(words) - 1:
            continue
        if word in ("a", "an") and place + 1 < len(words) and words[place + 1] in _SCALES:
            current, seen = 1, True
        elif word in _UNITS:
            if seen and current % 10 and word != "zero":
                return None  # "one two" is no number
            current, seen = current + _UNITS[word], True
        elif word in _TENS:
            if current % 100:
                return None
            current, seen = current + _TENS[word], True
        elif word == "hundred" and seen and 0 < current < 100:
            current *= 100
        elif word in _SCALES and word != "hundred" and seen and current:
            total, current = total + current * _SCALES[word], 0
        elif word == "dozen":
            current, seen = max(current, 1) * 12, True
        else:
            return None
    return total + current if seen else None


def _chinese(text: str) -> Fraction | None:
    text = re.sub(r"\s+", "", text).translate(_FORMAL)
    sign = 1
    if text.startswith("负"):
        sign, text = -1, text[1:]
    if text.startswith("百分之"):
        value = _chinese_plain(text[3:])
        return None if value is None else sign * value / 100
    if "又" in text and "分之" in text:
        whole, _, part = text.partition("又")
        value, share = _chinese_plain(whole), _chinese_share(part)
        return None if value is None or share is None else sign * (value + share)
    if "分之" in text:
        share = _chinese_share(text)
        return None if share is None else sign * share
    if text in ("半", "一半"):
        return sign * Fraction(1, 2)
    value = _chinese_plain(text)
    return None if value is None else sign * value


def _chinese_share(text: str) -> Fraction | None:
    below, _, above = text.partition("分之")
    bottom, top = _chinese_plain(below), _chinese_plain(above)
    return None if not bottom or top is None else top / bottom


def _chinese_plain(text: str) -> Fraction | None:
    if re.fullmatch(r"-?\d+(?:\.\d+)?", text):
        return Fraction(text)
    if match := _DIGITS_WITH_SCALE.fullmatch(text):
        value = Fraction(match.group(1))
        for scale in match.group(2):
            value *= _SMALL.get(scale) or _LARGE[scale]
        return value
    if not _CHINESE.fullmatch(text):
        return None
    if "点" in text:
        whole, _, rest = text.partition("点")
        before = _chinese_plain(whole)
        if before is None or not rest or any(digit not in _DIGITS for digit in rest):
            return None
        return before + Fraction("0." + "".join(str(_DIGITS[digit]) for digit in rest))
    if all(character in _DIGITS for character in text):
        if len(text) > 1 and "两" in text:
            return None
        return Fraction(int("".join(str(_DIGITS[character]) for character in text)))
    return _chinese_scaled(text)


def _chinese_scaled(text: str) -> Fraction | None:
    total = section = 0
    digit: int | None = None
    last_scale = 1
    for character in text:
        if character in _DIGITS:
            if digit:
                return None
            digit = _DIGITS[character]
            if digit == 0:
                last_scale = 1
        elif character in _SMALL:
            section += (1 if digit is None else digit) * _SMALL[character]
            digit, last_scale = None, _SMALL[character]
        else:
            total = (total + section + (digit or 0)) * _LARGE[character]
            section, digit, last_scale = 0, None, _LARGE[character]
    if digit:
        section += digit * (last_scale // 10 if last_scale > 10 else 1)  # 三百二 is 320
    return Fraction(total + section)
