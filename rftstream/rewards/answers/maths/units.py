"""Names of units in English and Chinese, their exact sizes, and the equality of two quantities."""

from __future__ import annotations

import functools
import re
from fractions import Fraction


def _named(text: str) -> dict[str, str]:
    """Return a map from text of the form `name=word=word`: word -> name of the unit."""
    groups = (group.split("=") for group in text.split())
    return {word: name for name, *words in groups for word in words}


_CHINESE_NAMES = """
km^2=平方千米=平方公里 cm^2=平方厘米 dm^2=平方分米 mm^2=平方毫米 m^2=平方米 cm^3=立方厘米 dm^3=立方分米
mm^3=立方毫米 m^3=立方米 km/h=千米每小时=千米/小时=千米/时=公里每小时 m/s=米每秒=米/秒 km=千米=公里 cm=厘米 dm=分米
mm=毫米 um=微米 nm=纳米 m=米 kg=千克=公斤 mg=毫克 g=克 t=吨 jin=斤 mL=毫升 L=升 h=小时 min=分钟 s=秒钟=秒 day=天
week=周 month=个月=月 year=年 hectare=公顷 mu=亩 degC=摄氏度 degree=度 N=牛顿=牛 J=焦耳=焦 kWh=千瓦时 kW=千瓦
W=瓦特=瓦 V=伏特=伏 A=安培=安 ohm=欧姆=欧 Pa=帕斯卡=帕 Hz=赫兹=赫 mol=摩尔 yuan=人民币=元 jiao=角 dollar=美元
pound_sterling=英镑 euro=欧元
"""
_CHINESE = _named(_CHINESE_NAMES)
COUNTERS = set(
    "个只人本张条头匹辆台件支枝根块棵朵颗粒把双对组次种名位间层页篇座艘架套杯瓶盒箱袋包筐排行列倍道题步岁时分点"
)
"""Chinese words that follow a count and do not change its size."""

_ENGLISH_NAMES = """
m=meter=metre=meters cm=centimeter=centimetre=cm mm=millimeter=millimetre=mm km=kilometer=kilometre=km dm=decimeter=dm
inch=inch=inches=in ft=foot=feet=ft yd=yard=yd mi=mile=mi g=gram kg=kilogram=kg mg=milligram=mg t=tonne ton=ton
lb=pound=lb oz=ounce=oz L=liter=litre=l mL=milliliter=millilitre=ml gal=gallon qt=quart pt=pint cup=cup s=second=sec
min=minute=min h=hour=hr day=day week=week month=month year=year=yr mi/h=mph km/h=kph=kmph=kmh degree=degree=deg
rad=radian=rad dollar=dollar=usd cent=cent euro=euro=eur yuan=yuan=rmb rupee=rupee N=newton J=joule W=watt
kW=kilowatt=kw V=volt A=ampere=amp ohm=ohm Pa=pascal=pa Hz=hertz=hz mol=mole=mol K=kelvin degC=celsius degF=fahrenheit
acre=acre hectare=hectare cal=calorie atm=atm=atmosphere kJ=kilojoule=kj nm=nm kWh=kwh kPa=kpa eV=ev
"""
_ENGLISH = _named(_ENGLISH_NAMES)
_SINGLE = {"m", "g", "s", "h", "L", "l", "t", "N", "J", "W", "V", "A", "K", "C", "F", "Ω"}
"""Symbols of one letter, which could also be variables."""
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
"""Units defined by others; units without a definition are the base units. An acre uses US survey feet."""
_SIZES = dict(definition.split("=") for definition in _DEFINITIONS.split())
_ZEROS = {"degC": Fraction(27315, 100), "degF": Fraction(45967, 100)}
"""Unit of a scale with its own zero -> the offset of that zero from the dimension's zero, in this unit."""
_EVERYDAY = {
    "m", "km", "cm", "dm", "mm", "inch", "ft", "yd", "mi", "s", "min", "h", "day", "week", "kg", "g", "mg", "t", "lb",
    "oz", "dollar", "cent", "yuan", "jiao", "fen", "euro", "pound_sterling", "rupee",
}  # fmt: skip
"""Units that may be parts of a compound, such as 2 h 30 min."""


def unit_name(text: str, *, marked: bool) -> str | None:
    r"""Return the canonical name of a written unit, or None if the unit is unknown.

    `marked`: the unit was in \text{}, so a single letter cannot be a variable."""
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
    """Return whether two quantities are equal after conversion, up to a relative tolerance. Units are results of
    `unit_name`."""
    (size, dimensions), (other_size, others) = unit_size(left_unit), unit_size(right_unit)
    one, two = (left + _ZEROS.get(left_unit, 0)) * size, (right + _ZEROS.get(right_unit, 0)) * other_size
    return dimensions == others and abs(one - two) <= Fraction(max(tolerance, 1e-9)) * max(abs(one), abs(two))


def same_kind(left_unit: str, right_unit: str) -> bool:
    """Return whether two units, by their names, measure the same kind of quantity."""
    return unit_size(left_unit)[1] == unit_size(right_unit)[1]


def is_everyday(unit: str) -> bool:
    """Return whether a unit consists only of everyday units."""
    return all(re.sub(r"\^-?\d$", "", name) in _EVERYDAY for name in re.split(r"[*/]", unit))


@functools.cache
def unit_size(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    """Return the size of a unit in base units, and its dimensions: each base unit with its exponent."""
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
