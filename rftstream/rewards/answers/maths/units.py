"""Names of units, English and Chinese, and whether two quantities are equal, by pint.

pint takes seconds to import: it is imported when two answers have units that differ in spelling.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from rftstream.errors import MissingChecker, importing

_CHINESE = {
    "平方千米": "km^2", "平方公里": "km^2", "平方厘米": "cm^2", "平方分米": "dm^2", "平方毫米": "mm^2", "平方米": "m^2",
    "立方厘米": "cm^3", "立方分米": "dm^3", "立方毫米": "mm^3", "立方米": "m^3", "千米每小时": "km/h",
    "千米/小时": "km/h", "千米/时": "km/h", "公里每小时": "km/h", "米每秒": "m/s", "米/秒": "m/s",
    "千米": "km", "公里": "km", "厘米": "cm", "分米": "dm", "毫米": "mm", "微米": "um", "纳米": "nm", "米": "m",
    "千克": "kg", "公斤": "kg", "毫克": "mg", "克": "g", "吨": "t", "斤": "jin", "毫升": "mL", "升": "L",
    "小时": "h", "分钟": "min", "秒钟": "s", "秒": "s", "天": "day", "周": "week", "个月": "month", "月": "month",
    "年": "year", "公顷": "hectare", "亩": "mu", "摄氏度": "degC", "度": "degree", "牛顿": "N", "牛": "N", "焦耳": "J",
    "焦": "J", "千瓦时": "kWh", "千瓦": "kW", "瓦特": "W", "瓦": "W", "伏特": "V", "伏": "V", "安培": "A", "安": "A",
    "欧姆": "ohm", "欧": "ohm", "帕斯卡": "Pa", "帕": "Pa", "赫兹": "Hz", "赫": "Hz", "摩尔": "mol",
    "人民币": "yuan", "元": "yuan", "角": "jiao", "美元": "dollar", "英镑": "pound_sterling", "欧元": "euro",
}  # fmt: skip
COUNTERS = set(
    "个只人本张条头匹辆台件支枝根块棵朵颗粒把双对组次种名位间层页篇座艘架套杯瓶盒箱袋包筐排行列倍道题步岁时分点"
)
"""Chinese words that follow a count and say nothing about its size."""

_ENGLISH = {
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm",
    "kilometer": "km", "kilometre": "km",
    "decimeter": "dm",
    "inch": "inch", "inches": "inch", "in": "inch", "foot": "ft",
    "feet": "ft", "ft": "ft", "yard": "yd", "mile": "mi", "mi": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg",
    "tonne": "t", "ton": "ton", "pound": "lb", "lb": "lb", "ounce": "oz", "oz": "oz", "liter": "L", "litre": "L",
    "l": "L",
    "milliliter": "mL", "millilitre": "mL", "ml": "mL", "gallon": "gal", "quart": "qt", "pint": "pt", "cup": "cup",
    "second": "s", "sec": "s", "minute": "min", "min": "min", "hour": "h", "hr": "h", "day": "day", "week": "week",
    "month": "month", "year": "year", "yr": "year", "mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h",
    "degree": "degree", "deg": "degree", "radian": "rad", "dollar": "dollar", "usd": "dollar", "cent": "cent",
    "euro": "euro", "eur": "euro", "yuan": "yuan", "rmb": "yuan", "rupee": "rupee", "newton": "N", "joule": "J",
    "watt": "W", "kilowatt": "kW", "volt": "V", "ampere": "A", "amp": "A", "ohm": "ohm", "pascal": "Pa", "hertz": "Hz",
    "mole": "mol", "kelvin": "K", "celsius": "degC", "fahrenheit": "degF", "acre": "acre", "hectare": "hectare",
    "calorie": "cal", "atm": "atm", "atmosphere": "atm", "kilojoule": "kJ", "meters": "m",
    "km": "km", "cm": "cm", "mm": "mm", "dm": "dm", "nm": "nm", "kg": "kg", "mg": "mg", "yd": "yd", "kj": "kJ",
    "kw": "kW", "kwh": "kWh", "hz": "Hz", "mol": "mol", "pa": "Pa", "kpa": "kPa", "rad": "rad", "ev": "eV",
}  # fmt: skip
_SINGLE = {"m", "g", "s", "h", "L", "l", "t", "N", "J", "W", "V", "A", "K", "C", "F", "Ω"}
"""Symbols of one letter, which might also be variables."""
_CURRENCY = {"€": "euro", "£": "pound_sterling", "¥": "yuan", "₹": "rupee", "dollar": "dollar"}
_INCH = Fraction(254, 10000)
_OUNCE = Fraction("0.028349523125")
_SIMPLE = {
    "m": (Fraction(1), "length"), "km": (Fraction(1000), "length"), "cm": (Fraction(1, 100), "length"),
    "dm": (Fraction(1, 10), "length"), "mm": (Fraction(1, 1000), "length"), "inch": (_INCH, "length"),
    "ft": (12 * _INCH, "length"), "yd": (36 * _INCH, "length"), "mi": (63360 * _INCH, "length"),
    "s": (Fraction(1), "time"), "min": (Fraction(60), "time"), "h": (Fraction(3600), "time"),
    "day": (Fraction(86400), "time"), "week": (Fraction(604800), "time"), "kg": (Fraction(1), "mass"),
    "g": (Fraction(1, 1000), "mass"), "mg": (Fraction(1, 10**6), "mass"), "t": (Fraction(1000), "mass"),
    "dollar": (Fraction(100), "money"), "cent": (Fraction(1), "money"), "yuan": (Fraction(10), "renminbi"),
    "jiao": (Fraction(1), "renminbi"), "fen": (Fraction(1, 10), "renminbi"), "lb": (16 * _OUNCE, "mass"),
    "oz": (_OUNCE, "mass"), "euro": (Fraction(1), "euros"), "pound_sterling": (Fraction(1), "sterling"),
    "rupee": (Fraction(1), "rupees"),
}  # fmt: skip
"""Everyday units: size and dimension. They are converted without pint."""
_OWN = ("jin = 500 * gram",
        "mu = 2000 / 3 * meter ** 2", "dollar = [money]", "cent = dollar / 100", "yuan = [renminbi]",
        "jiao = yuan / 10", "fen = yuan / 100",
        "euro = [euros]", "pound_sterling = [sterling]", "rupee = [rupees]")  # fmt: skip


def unit_name(text: str, *, marked: bool) -> str | None:
    r"""Return the name that pint knows for a unit as it was written, or None if it is no known unit.

    `marked` says that it stood in \text{}, so that a single letter cannot be a variable."""
    text = text.strip().strip(".").strip()
    if not text or len(text) > 60:
        return None
    if text in _CURRENCY:
        return _CURRENCY[text]
    if text in _CHINESE:
        return _CHINESE[text]
    text = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    words = text.replace("·", "*").replace(r"\cdot", "*")
    words = re.sub(r"\bper\b", "/", words)
    words = re.sub(r"\b(?:square|sq\.?)\s+(\w+)", r"\1^2", words)
    words = re.sub(r"\b(?:cubic|cu\.?)\s+(\w+)", r"\1^3", words)
    words = re.sub(r"(\w+)\s+squared\b", r"\1^2", words)
    words = re.sub(r"(\w+)\s+cubed\b", r"\1^3", words)
    factors = re.split(r"\s*([*/])\s*", words)
    named = []
    for place, factor in enumerate(factors):
        if place % 2:
            named.append(factor)
            continue
        name = _factor_name(factor.strip(), marked=marked)
        if name is None:
            return None
        named.append(name)
    return "".join(named)


def _factor_name(text: str, *, marked: bool) -> str | None:
    match = re.fullmatch(r"([^\W\d]+)(\d|\^-?\d)?", text)
    if match is None:
        return None
    word, power = match.group(1), match.group(2) or ""
    if power and not power.startswith("^"):
        power = "^" + power
    if word in _CHINESE:
        return _CHINESE[word] + power
    if len(word) == 1:
        return ("ohm" if word == "Ω" else word) + power if marked and word in _SINGLE else None
    lower = word.lower()
    for form in (lower, lower[:-1] if lower.endswith("s") else lower, lower[:-2] if lower.endswith("es") else lower):
        if form in _ENGLISH:
            return _ENGLISH[form] + power
    return None


def equal_quantities(left: Fraction, left_unit: str, right: Fraction, right_unit: str, *, tolerance: float) -> bool:
    """Return whether two quantities are equal after conversion, up to a relative tolerance. Units are pint's names."""
    if (quick := _quick(left_unit)) is not None and (other_quick := _quick(right_unit)) is not None:
        if quick[1] != other_quick[1]:
            return False
        one, two = left * quick[0], right * other_quick[0]
        return abs(one - two) <= Fraction(max(tolerance, 1e-9)) * max(abs(one), abs(two))
    registry = _registry()
    first = registry.Quantity(float(left), left_unit)
    second = registry.Quantity(float(right), right_unit)
    if first.dimensionality != second.dimensionality:
        return False
    value, other = float(first.to_base_units().magnitude), float(second.to_base_units().magnitude)
    return abs(value - other) <= max(tolerance, 1e-9) * max(abs(value), abs(other))


def same_kind(left_unit: str, right_unit: str) -> bool:
    """Return whether two units, by pint's names, measure the same."""
    if left_unit == right_unit:
        return True
    if (quick := _quick(left_unit)) is not None and (other_quick := _quick(right_unit)) is not None:
        return quick[1] == other_quick[1]
    registry = _registry()
    return bool(registry.Quantity(1, left_unit).dimensionality == registry.Quantity(1, right_unit).dimensionality)


def everyday_unit(name: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Return the size and the dimensions of an everyday unit, by pint's name, or None if it is none."""
    return _quick(name)


def load_pint() -> None:
    """Load pint, which takes seconds, before it is needed."""
    _registry()


@functools.cache
def _quick(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Return the factor and the dimensions of a unit that consists of everyday ones, without pint; else None."""
    factor, powers = Fraction(1), dict[str, int]()
    sign = 1
    for piece in re.split(r"([*/])", unit):
        if piece in ("*", "/"):
            sign = 1 if piece == "*" else -1
            continue
        name, _, power = piece.partition("^")
        if name not in _SIMPLE or not re.fullmatch(r"-?\d?", power):
            return None
        size, dimension = _SIMPLE[name]
        number = sign * int(power or 1)
        factor *= size**number
        powers[dimension] = powers.get(dimension, 0) + number
    return factor, tuple(sorted((name, power) for name, power in powers.items() if power))


@functools.cache
def _registry() -> Any:
    with importing("rewards", "pint", install="pint", error_type=MissingChecker):
        import pint
    registry: Any = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)
    for definition in _OWN:
        registry.define(definition)
    return registry
