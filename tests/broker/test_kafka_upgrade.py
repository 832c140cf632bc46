"""Workers of two releases at once on Kafka. tests/e2e/test_upgrade.py is its twin in `make test`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.e2e.workplace import Workplace
from tests.upgrades import READERS_FIRST, RollingUpgrade

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.law("lost", "twice")]

WRITERS_FIRST = READERS_FIRST[::-1]
"""The release before reads what the later one writes."""


@pytest.mark.parametrize("passes", [
    pytest.param([(True, WRITERS_FIRST)], id="writers-first"),
    pytest.param([(True, READERS_FIRST), (False, READERS_FIRST)], id="readers-first-and-back"),
])  # fmt: skip
def test_a_run_goes_to_a_later_release(
    place: Workplace, servers: str, run_id: Callable[[], str], passes: Sequence[tuple[bool, Sequence[str]]]
) -> None:
    upgrade = RollingUpgrade(place, run_id(), f'kind = "kafka"\nservers = "{servers}"\n')
    upgrade.play(*passes)
    upgrade.assert_whole()
    upgrade.assert_field_is_kept()
