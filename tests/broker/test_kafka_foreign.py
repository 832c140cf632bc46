"""Foreign records on a real broker, where anybody may write and a transaction's records are not next to each other."""

from __future__ import annotations

import pytest

from tests.e2e.test_foreign import strays_into_a_live_run
from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("fencing")]


def test_strays_in_a_live_run(place: Workplace, servers: str, run_id: object) -> None:
    name: str = run_id()  # type: ignore[operator]
    place.write("tiny.toml", FAKE.replace('"tiny"', f'"{name}"') + f'kind = "kafka"\nservers = "{servers}"\n')
    slow = sets("backends.fake.step_s=1.0")  # each stray is made from what stands there, and reading takes a while
    strays_into_a_live_run(place, "tiny.toml", f"runs/{name}", *slow, num_strays=15)
