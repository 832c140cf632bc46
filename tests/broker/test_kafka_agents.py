"""Agents on Kafka: explorers and hosts are killed at every call of a rollout, in runs that wait beside each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.call_kills import POINTS, kill_at, kill_hosted_at
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

Play = Callable[[Workplace, str, str], None]


def test_explorers_and_hosts_die_at_every_call(servers: str, run_id: Callable[[], str], tmp_path: Path) -> None:
    """Most of such a run is waiting until the group has noticed that a member is dead."""
    transport = f'kind = "kafka"\nservers = "{servers}"\nsession_timeout_s = 6.0\n'
    plays: list[Play] = [lambda place, name, log, point=point: kill_at(place, name, point, log) for point in POINTS]  # type: ignore[misc]
    plays += [lambda place, name, log, point=point: kill_hosted_at(place, name, point, log) for point in POINTS]  # type: ignore[misc]
    plays.append(lambda place, name, log: kill_hosted_at(place, name, None, log))

    def play(what: Play) -> None:
        name = run_id()
        place = Workplace(tmp_path / name)
        try:
            what(place, name, transport)
        finally:
            place.end()

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(play, what) for what in plays]:
            done.result()
