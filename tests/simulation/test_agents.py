"""Agents in simulated runs whose processes are killed, stopped and refused: the laws of calls hold, and of the run.

What is left out of the rules of calls is noticed: test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.agent_runs import play_agents
from tests.simulation.seeds import seeds

pytestmark = pytest.mark.law("lost", "twice", "fencing", "conservation", "lineage")


@seeds(2, range(30))
def test_the_laws_hold_with_agents(tmp_path: Path, seed: int) -> None:
    play_agents(tmp_path, seed)


TOLD_AGAIN = 6
"""A seed whose faults lead to it."""


def test_faults_lead_to_answers_that_are_told_again(tmp_path: Path) -> None:
    calls, _ = play_agents(tmp_path, TOLD_AGAIN)
    assert calls.num_told >= 12
    assert calls.num_told_again > 0
