"""Every law has tests in each storey where one is expected, and a mutant that breaks it."""

from __future__ import annotations

import pytest

from tests import law_coverage
from tests.law_coverage import EXPECTED, HERE, LAWS, STOREYS
from tests.simulation.mutants import MUTANTS

WITHOUT_MUTANTS = {"no-pickle": "the test looks through the sources; no schedule breaks it"}


def test_every_law_is_held_in_each_storey_where_it_is_expected() -> None:
    assert EXPECTED.keys() == LAWS.keys()
    marked = law_coverage.find_marked()
    lacking = [f"{law}: {storey}" for law, storeys in EXPECTED.items() for storey in storeys if not marked[law][storey]]
    assert not lacking


def test_every_make_test_holds_every_law_in_each_of_its_storeys() -> None:
    """Whatever it draws of families of tests."""
    marked = law_coverage.find_marked()
    lacking = [
        f"{law}: {storey}"
        for law, storeys in EXPECTED.items() for storey in storeys
        if not any(file.always for file in marked[law][storey])
    ]  # fmt: skip
    assert not lacking


def test_every_law_has_a_mutant_that_breaks_it() -> None:
    mutants = law_coverage.find_mutants()
    assert {law for law, names in mutants.items() if not names} == set(WITHOUT_MUTANTS)
    found = {name: law for law, names in mutants.items() for name in names}
    assert found == {name: one.law for name, one in MUTANTS.items()}


def test_marks_stand_where_they_are_looked_for() -> None:
    folders = {HERE / folder for folders in STOREYS.values() for folder in folders}
    assert all(folder.is_dir() for folder in folders)
    marked = [path for path in HERE.rglob("test_*.py") if "mark.law(" in path.read_text(encoding="utf-8")]
    assert [path for path in marked if not folders & set(path.parents) and path.name != "test_laws.py"] == []


def test_the_marks_that_are_read_are_those_of_pytest() -> None:
    """Of a file with marks of its own, of its tests and of a class."""
    from tests.flow import test_trainer_restarts as restarts

    marked = law_coverage.find_marked()
    read = {
        name: {law for law, storeys in marked.items() for file in storeys["flow"]
               if file.path == "flow/test_trainer_restarts.py" and name in file.tests}
        for name in dir(restarts) if name.startswith("test_")
    }  # fmt: skip
    above = restarts.pytestmark if isinstance(restarts.pytestmark, list) else [restarts.pytestmark]
    for name, laws in read.items():
        own: list[pytest.Mark] = getattr(getattr(restarts, name), "pytestmark", [])
        marks = [*own, *(one.mark for one in above)]
        assert laws == {law for mark in marks if mark.name == "law" for law in mark.args}
