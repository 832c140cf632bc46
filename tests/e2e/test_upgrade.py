"""Workers of two releases at once: the run goes on, whoever is replaced first, and what one cannot read waits."""

from __future__ import annotations

import pytest

from tests.e2e.workplace import Workplace
from tests.releases import NOTE
from tests.upgrades import READERS_FIRST, RollingUpgrade

pytestmark = pytest.mark.slow


def test_a_run_goes_to_a_later_release_and_back(place: Workplace) -> None:
    upgrade = RollingUpgrade(place, "rolling")
    upgrade.play((True, READERS_FIRST), (False, READERS_FIRST))
    upgrade.assert_whole()
    upgrade.assert_field_is_kept()
    assert {NOTE, None} <= {note for _, note in upgrade.notes("steps")}
