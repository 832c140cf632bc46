"""Runs with random operators, whatever goes wrong: all laws, and every decision computed again from the log."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rftstream.config.pipelines import operator_places
from tests.simulation.grid import check_seed, draw_config
from tests.simulation.pipelines import BY_FACTS, with_pipelines

FIRST, SEEDS_A_TEST = (0, 20), 15
"""Seed 19 takes as long as all others together."""


@pytest.mark.law("lost", "twice", "derived", "conservation")
@pytest.mark.parametrize("first", FIRST)
def test_operators_decide_as_the_log_says_whatever_goes_wrong(tmp_path: Path, first: int) -> None:
    decided = 0
    for seed in range(first, first + SEEDS_A_TEST):
        found = check_seed(seed, tmp_path / str(seed), pipelines=True).recompute()
        decided += found.num_draws + found.num_groups + found.num_rollouts
    assert decided > 20 * SEEDS_A_TEST


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
