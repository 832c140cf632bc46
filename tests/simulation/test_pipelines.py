"""Runs with random operators, whatever goes wrong: all laws, and every decision computed again from the log."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.config.data_pipelines.pipelines import operator_places
from tests.simulation.grid import check_seed, draw_config, is_short
from tests.simulation.pipelines import BY_FACTS, with_pipelines
from tests.simulation.seeds import seeds

FOUND = (1382, 2159)
"""By these a trainer was found that deleted what somebody else had said, and one that went on in a folder that its
successor had removed."""


@pytest.mark.law("lost", "twice", "derived", "conservation")
@seeds(2, range(100), stored=FOUND, fits=is_short)
def test_operators_decide_as_the_log_says_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    simulation = check_seed(seed, tmp_path, pipelines=True)
    found = simulation.recompute()
    assert found.fine, found.to_text()
    decides = any(place.side == "task" for place in operator_places(simulation.config))
    assert found.num_draws or not decides or not simulation.records("tasks")


def test_the_pipelines_have_all_that_may_matter() -> None:
    drawn = [Random(f"grid {seed}") for seed in range(40)]
    configs = [with_pipelines(draw_config(random), random) for random in drawn]
    places = [place for config in configs for place in operator_places(config)]
    assert {place.side for place in places} == {"task", "experience"}
    assert {place.taskset for place in places} == {None, "sums", "more"}
    names = {place.name.rpartition(":")[2] for place in places}
    assert names >= {
        *BY_FACTS,
        "Lucky",
        "Clumsy",
        "ClumsyLate",
        "Choosy",
        "length",
        "truncated",
        "zero_variance",
        "replay",
        "priority",
        "hindsight",
    }
