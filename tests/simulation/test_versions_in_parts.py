"""Versions in parts under faults: several ranks share each version, and readers have whole ones, whoever is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rftstream.contracts.versions import WeightsAnnounced, WeightsKind
from rftstream.service.role import Log
from rftstream.testing import Faults
from tests.simulation.grid import check_seed, is_short
from tests.simulation.laws import Laws
from tests.simulation.ranks import DIED, KILLED, SEEN_LATE, TOO_LATE
from tests.simulation.seeds import seeds


@pytest.mark.law("lineage", "bounded")
@seeds(3, range(200), fits=is_short)
def test_versions_in_parts_hold_the_laws(seed: int, tmp_path: Path) -> None:
    told = [one.message for one in Log(check_seed(seed, tmp_path, ranks=True).transport()).messages("weights")]
    versions = [one for one in told if isinstance(one, WeightsAnnounced)]
    assert all(len(one.parts) > 1 for one in versions)


@pytest.mark.law("lineage")
def test_the_runs_have_all_that_may_matter(tmp_path: Path) -> None:
    """Deltas in parts, and each fault between two parts."""
    kinds: Counter[str] = Counter()
    for seed in (1, 6, 9):
        simulation = check_seed(seed, tmp_path / f"{seed}", faults=Faults(), ranks=True)
        told = [one.message for one in Log(simulation.transport()).messages("weights")]
        kinds.update(one.kind for one in told if isinstance(one, WeightsAnnounced))
        laws = simulation.watch
        assert isinstance(laws, Laws) and laws.ranks is not None
        kinds += laws.ranks.happened
    assert {*WeightsKind, DIED, KILLED, TOO_LATE, SEEN_LATE} <= {*+kinds}
