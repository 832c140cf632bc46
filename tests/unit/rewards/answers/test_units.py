"""Sizes of units, which are exact: as the international tables have them."""

from __future__ import annotations

from fractions import Fraction

from rftstream.rewards.answers.maths.units import equal_quantities, same_kind, unit_name
from tests.suite.each import each


@each(("left", "unit", "right", "other"), [
    ("1", "mile", "1609.344", "m"), ("1", "acre", "4046.872609874", "m^2"), ("1", "公顷", "15", "亩"),
    ("1", "gallon", "3.785411784", "liters"), ("1", "pound", "16", "ounces"), ("3", "斤", "1.5", "千克"),
    ("90", "km/h", "25", "m/s"), ("1", "kWh", "3600", "kj"), ("1", "atm", "101.325", "kpa"),
    ("1", "calorie", "4.184", "joules"), ("37", "celsius", "98.6", "fahrenheit"), ("0", "kelvin", "-273.15", "celsius"),
    ("1", "newton", "1", "kg*m/s^2"), ("5", "元", "50", "角"), ("1.5", "dollars", "150", "cents"),
])  # fmt: skip
def test_a_quantity_is_the_same_in_another_unit(left: str, unit: str, right: str, other: str) -> None:
    names = unit_name(unit, marked=True), unit_name(other, marked=True)
    assert names[0] and names[1] and same_kind(names[0], names[1])
    assert equal_quantities(Fraction(left), names[0], Fraction(right), names[1], tolerance=1e-9)
    assert not equal_quantities(Fraction(left) + 1, names[0], Fraction(right), names[1], tolerance=1e-6)


@each(("unit", "other"), [("kg", "m"), ("m", "m^2"), ("yuan", "dollar"), ("J", "W"), ("s", "Hz")])
def test_units_of_other_kinds(unit: str, other: str) -> None:
    assert not same_kind(unit, other)
