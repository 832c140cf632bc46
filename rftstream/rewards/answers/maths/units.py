"""Names of units, English and Chinese, their exact sizes, and whether two quantities are equal."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

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
_DEFINITIONS = """
km=1000*m dm=m/10 cm=m/100 mm=m/1000 um=mm/1000 nm=um/1000 inch=cm*254/100 ft=12*inch yd=3*ft mi=1760*yd
hectare=10000*m^2 mu=2000*m^2/3 acre=43560*m^2*1440000/15499969 L=dm^3 l=L mL=L/1000
gal=231*inch^3 qt=gal/4 pt=gal/8 cup=gal/16
g=kg/1000 mg=g/1000 t=1000*kg jin=kg/2 lb=kg*45359237/100000000 oz=lb/16 ton=2000*lb
min=60*s h=60*min day=24*h week=7*day year=day*1461/4 month=year/12 Hz=1/s
N=kg*m/s^2 J=N*m kJ=1000*J cal=J*4184/1000 eV=J*1602176634/10000000000^2/100000000 W=J/s kW=1000*W kWh=kW*h
Pa=N/m^2 kPa=1000*Pa atm=101325*Pa C=A*s V=W/A ohm=V/A F=C/V degC=K degF=K*5/9
rad=1 degree=314159265358979323846/18000000000000000000000
dollar=100*cent jiao=yuan/10 fen=yuan/100
"""
"""Units by others; those that stand for none are the base units. An acre is one of US survey feet."""
_SIZES = dict(definition.split("=") for definition in _DEFINITIONS.split())
_ZEROS = {"degC": Fraction(27315, 100), "degF": Fraction(45967, 100)}
"""Unit of a scale whose zero is not that of its dimension -> how far it is away, in this unit."""
_EVERYDAY = {
    "m", "km", "cm", "dm", "mm", "inch", "ft", "yd", "mi", "s", "min", "h", "day", "week", "kg", "g", "mg", "t", "lb",
    "oz", "dollar", "cent", "yuan", "jiao", "fen", "euro", "pound_sterling", "rupee",
}  # fmt: skip
"""Units that may be parts of a compound, such as 2 h 30 min."""


def unit_name(text: str, *, marked: bool) -> str | None:
    r"""Return the name of a unit as it was written, or None if it is no known unit.

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
    """Return whether two quantities are equal after conversion, up to a relative tolerance. Units are those of
    `unit_name`."""
    (size, dimensions), (other_size, others) = unit_size(left_unit), unit_size(right_unit)
    one, two = (left + _ZEROS.get(left_unit, 0)) * size, (right + _ZEROS.get(right_unit, 0)) * other_size
    return dimensions == others and abs(one - two) <= Fraction(max(tolerance, 1e-9)) * max(abs(one), abs(two))


def same_kind(left_unit: str, right_unit: str) -> bool:
    """Return whether two units, by their names, measure the same."""
    return unit_size(left_unit)[1] == unit_size(right_unit)[1]


def is_everyday(unit: str) -> bool:
    """Return whether a unit consists of everyday ones."""
    return all(re.sub(r"\^-?\d$", "", name) in _EVERYDAY for name in re.split(r"[*/]", unit))


@functools.cache
def unit_size(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    """Return the size of a unit in base units, and its dimensions: each base unit with its power."""
    size, powers, sign = Fraction(1), dict[str, int](), 1
    for piece in re.split(r"([*/])", unit):
        if piece in ("*", "/"):
            sign = 1 if piece == "*" else -1
            continue
        name, _, power = piece.partition("^")
        exponent = sign * int(power or 1)
        if name.isdecimal():
            size *= Fraction(name) ** exponent
            continue
        inner, dimensions = unit_size(_SIZES[name]) if name in _SIZES else (Fraction(1), ((name, 1),))
        size *= inner**exponent
        for dimension, count in dimensions:
            powers[dimension] = powers.get(dimension, 0) + count * exponent
    return size, tuple(sorted((name, power) for name, power in powers.items() if power))
