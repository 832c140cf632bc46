"""Loops of users in the places of samplers and trainer: whatever goes wrong, our own roles' laws hold. Batches and
weights are those of our own roles, too, where nothing but the tasks decides about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.grid import check_seed, is_short
from tests.simulation.seeds import seeds

pytestmark = pytest.mark.law("lost", "twice", "order", "staleness", "conservation", "replay")


@seeds(1, range(200), fits=is_short)
def test_joined_loops_keep_the_laws(seed: int, tmp_path: Path) -> None:
    check_seed(seed, tmp_path, joined=True)
