"""The explorer, or the host of an agent, is killed at every call of a rollout; the embedded log."""

from __future__ import annotations

import pytest

from tests.call_kills import POINTS, kill_at, kill_hosted_at
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRANSPORT = "session_timeout_s = 2.0\n"


@pytest.mark.parametrize("point", POINTS)
def test_an_explorer_dies_at_every_call_of_agents_elsewhere(place: Workplace, point: str) -> None:
    kill_at(place, "tiny", point, TRANSPORT)


@pytest.mark.parametrize("point", POINTS)
def test_an_explorer_dies_at_every_call_of_its_own_agents(place: Workplace, point: str) -> None:
    kill_hosted_at(place, "tiny", point, TRANSPORT)


def test_hosts_die_at_every_call(place: Workplace) -> None:
    kill_hosted_at(place, "tiny", None, TRANSPORT)
