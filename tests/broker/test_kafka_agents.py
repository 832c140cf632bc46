"""Agents on Kafka: explorers and hosts are killed at every call of a rollout, in runs that wait beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import randbelow

import pytest

from tests.call_kills import ROUNDS, kill_under_agents, kill_under_hosted
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1800)]

Kill = Callable[[Workplace, str, Sequence[str], str], None]
Play = Callable[[Kill, Sequence[str]], None]


@pytest.fixture
def play(servers: str, run_id: Callable[[], str], tmp_path: Path) -> Play:
    """Plays one run; most of it is waiting until the group has noticed that a member is dead."""

    def played(kill: Kill, told: Sequence[str]) -> None:
        name = run_id()
        place = Workplace(tmp_path / name)
        try:
            kill(place, name, told, f'kind = "kafka"\nservers = "{servers}"\nsession_timeout_s = 6.0\n')
        finally:
            place.end()

    return played


PLAYS: list[tuple[Kill, Sequence[str]]] = [
    *((kill, told) for told in ROUNDS for kill in (kill_under_agents, kill_under_hosted)), (kill_under_hosted, ())
]  # fmt: skip
"""Explorers die at every call, at one of its points in each round; with nothing told it is hosts that die."""


@pytest.mark.sampled(5, "kills")
@pytest.mark.heavy("an explorer that starts five times, and sessions that run out")
@pytest.mark.law("lost", "twice")
def test_explorers_or_hosts_die_at_every_call(play: Play) -> None:
    """One of the plays, another one each time."""
    number = randbelow(len(PLAYS))
    print(f"PLAYS[{number}]")
    play(*PLAYS[number])


@pytest.mark.long
@pytest.mark.law("lost", "twice")
def test_explorers_and_hosts_die_at_every_call_and_point(play: Play) -> None:
    with ThreadPoolExecutor(3) as pool:
        for played in [pool.submit(play, *one) for one in PLAYS]:
            played.result()


@pytest.mark.long
def test_calls_that_take_longer_than_a_session(play: Play) -> None:
    """The explorer keeps its share of the work meanwhile, and who asks again is answered by the same call."""

    def kill(place: Workplace, name: str, told: Sequence[str], transport: str) -> None:
        kill_under_agents(place, name, told, transport, policy="tokens_per_s = 1.0\n")
        log = place.view(f"runs/{name}").log_of("explorer-0")
        assert log.count(" partitions (0 lost,") == log.count(" partitions (") == 1

    play(kill, ())
