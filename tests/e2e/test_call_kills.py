"""The explorer, or the host of an agent, is killed at every call of a rollout; the embedded log."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.call_kills import ROUNDS, kill_under_agents, kill_under_hosted
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.law("lost", "twice")]

TRANSPORT = "session_timeout_s = 2.0\n"


@pytest.fixture
def told() -> Sequence[str]:
    """Return the faults of one round, another one each time."""
    told = ROUNDS[Random().randrange(len(ROUNDS))]
    print(f"told: {told}")
    return told


@pytest.mark.sampled(5, "kills")
def test_an_explorer_dies_at_every_call_of_agents_elsewhere(place: Workplace, told: Sequence[str]) -> None:
    kill_under_agents(place, "tiny", told, TRANSPORT)


@pytest.mark.sampled(5, "kills")
def test_an_explorer_dies_at_every_call_of_its_own_agents(place: Workplace, told: Sequence[str]) -> None:
    kill_under_hosted(place, "tiny", told, TRANSPORT)


@pytest.mark.sampled(5, "kills")
def test_hosts_die_at_every_call(place: Workplace) -> None:
    kill_under_hosted(place, "tiny", (), TRANSPORT)


@pytest.mark.long
@pytest.mark.parametrize("told", ROUNDS)
def test_an_explorer_dies_at_every_point(place: Workplace, told: Sequence[str]) -> None:
    kill_under_agents(place, "elsewhere", told, TRANSPORT)
    kill_under_hosted(place, "hosted", told, TRANSPORT)
