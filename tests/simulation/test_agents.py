"""Agents in simulated runs whose processes are killed, stopped and refused: the laws of calls hold, and of the run.

What is left out of the rules of calls is noticed: test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.agent_runs import play_agents

pytestmark = pytest.mark.law("lost", "twice", "fencing", "conservation", "lineage")


@pytest.mark.parametrize("seed", range(6))
def test_the_laws_hold_with_agents(tmp_path: Path, seed: int) -> None:
    calls, _ = play_agents(tmp_path, seed)
    assert calls.num_told >= 12


def test_faults_lead_to_answers_that_are_told_again(tmp_path: Path) -> None:
    assert sum(play_agents(tmp_path / str(seed), seed)[0].num_told_again for seed in range(6, 10)) > 0
