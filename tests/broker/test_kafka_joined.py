"""Own samplers and training loops on a real broker, which are killed in the middle beside our own explorer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.test_kafka_runs import run_file
from tests.e2e.test_joined import kill_in_the_middle
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]


def test_joined_loops_are_killed_at_twenty_moments(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    name = run_id()
    place.write("tiny.toml", run_file(name, servers))
    kill_in_the_middle(place, f"runs/{name}", 20, "explorer-0")
