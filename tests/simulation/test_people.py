"""Runs with annotators who vote, edit, retract and come late, whatever else goes wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rftstream.contracts.questions import Applied, VoteEffect
from tests.simulation.annotators import play_people
from tests.simulation.grid import is_short
from tests.simulation.seeds import seeds

pytestmark = pytest.mark.law("lost", "twice", "order", "conservation")


@seeds(1, range(100), fits=is_short)
def test_people_are_counted_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    play_people(tmp_path, seed)


@pytest.mark.long
def test_all_that_may_become_of_a_vote_becomes_of_some(tmp_path: Path) -> None:
    effects: Counter[str] = Counter()
    applied: Counter[str] = Counter()
    for seed in range(6):
        laws = play_people(tmp_path / str(seed), seed)
        effects += laws.people.effects
        applied += laws.people.applied
    assert set(effects) == {str(effect) for effect in VoteEffect}
    assert set(applied) == {str(one) for one in Applied}
