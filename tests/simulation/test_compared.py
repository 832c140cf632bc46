"""Runs whose reward compares siblings, whatever goes wrong between them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.testing import Faults
from tests.simulation.compared import with_compared
from tests.simulation.grid import check_seed, draw_config, is_short
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds


@pytest.mark.law("lost", "twice", "conservation", "unscorable", "staleness", "replay")
@seeds(3, range(100), fits=is_short)
def test_siblings_are_judged_together_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    check_seed(seed, tmp_path, compared=True)


@pytest.mark.law("lost", "twice")
@seeds(2, range(20), fits=is_short)
def test_kills_between_siblings(tmp_path: Path, seed: int) -> None:
    """Of verifiers alone, again and again."""
    faults = Faults(share=0.2, roles=("verifier",), kills=40, joins=2, aborts=10, unknowns=10)
    simulation = check_seed(seed, tmp_path, faults=faults, compared=True)
    laws = simulation.watch
    assert isinstance(laws, Laws) and laws.compared is not None
    if laws.finished is not None and laws.finished.reason == "steps" and laws.version:
        assert laws.compared.num_judged


def test_the_runs_have_all_that_may_matter() -> None:
    configs = [with_compared(draw_config(Random(f"grid {seed}")), seed) for seed in range(40)]
    assert {config.verifier.group_timeout_s for config in configs} == {None, 1.0, 5.0, 20.0, 60.0}
    assert {config.verifier.max_waiting_bytes for config in configs} == {1, 2000, 1 << 28}
    assert {config.feeder.group_size for config in configs} == {1, 2, 3, 4, 5, 6}
    assert {config.verifier.max_concurrent for config in configs} == {1, 4, 256}
