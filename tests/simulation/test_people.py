"""Runs with annotators who vote, edit, retract and come late, whatever else goes wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rftstream.contracts.questions import Applied, VoteEffect
from tests.simulation.annotators import play_people

pytestmark = pytest.mark.law("lost", "twice", "order", "conservation")

NUM_SEEDS, SEEDS_A_TEST = 12, 6


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_people_are_counted_whatever_goes_wrong(tmp_path: Path, first: int) -> None:
    effects: Counter[str] = Counter()
    applied: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_A_TEST):
        laws = play_people(tmp_path / str(seed), seed)
        effects += laws.people.effects
        applied += laws.people.applied
    assert set(effects) == {str(effect) for effect in VoteEffect}
    assert set(applied) == {str(one) for one in Applied}


@pytest.mark.long
def test_many_seeds(tmp_path: Path) -> None:
    for seed in range(NUM_SEEDS, 100):
        play_people(tmp_path / str(seed), seed)
