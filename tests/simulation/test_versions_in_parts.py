"""Versions in parts under faults: two writers share each version, and readers have whole ones, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.backends.fake import FakeBackend
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.service.role import Log
from rftstream.weights.stores.store import ObjectStore
from tests.part_writers import PartWriters
from tests.simulation.grid import check_seed
from tests.simulation.seeds import seeds


def version_writer(self: FakeBackend, store: ObjectStore) -> PartWriters:
    return PartWriters(store, model=self._spec.name)


@pytest.mark.law("lineage")
@seeds(2, range(60))
def test_versions_in_parts_hold_the_laws(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBackend, "version_writer", version_writer, raising=False)
    simulation = check_seed(seed, tmp_path)
    told = [one.message for one in Log(simulation.transport()).messages("weights")]
    versions = [one for one in told if isinstance(one, WeightsAnnounced)]
    assert versions
    assert all(len(one.parts) == 2 for one in versions)
