"""Unfinished rollouts on Kafka: an explorer is killed, and another goes on from what it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_partials import kill_and_go_on
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.broker, pytest.mark.law("lost", "twice")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path)
    try:
        yield workplace
    finally:
        workplace.end()


def test_a_killed_explorers_rollouts_are_finished_by_another(
    place: Workplace, servers: str, run_id: Callable[[], str]
) -> None:
    kill_and_go_on(place, run_id(), 600.0, f'kind = "kafka"\nservers = "{servers}"\nsession_timeout_s = 6.0\n')
