"""Every algorithm learns a small table, along the curve that it learned it along before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rftstream import plugins
from rftstream.algorithms import ALGORITHMS
from tests.golden import table

STEPS = 40
RECORDED: list[tuple[str, dict[str, Any], tuple[float, ...]]] = []
"""Algorithm, settings; mean reward of the first and the last five steps, loss of the steps 5 and 20."""


def name_of(case: Any) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", RECORDED, ids=name_of)
def test_curve(case: tuple[str, dict[str, Any], tuple[float, ...]]) -> None:
    name, options, recorded = case
    part = plugins.resolve("algorithm", name)
    algorithm = part(plugins.build_config(part, options, where=f"algorithms.{name}"))
    steps = list(table.play(algorithm, steps=STEPS))
    rewards, losses = np.asarray([one.reward for one in steps]), [one.loss for one in steps]
    found = (rewards[:5].mean(), rewards[-5:].mean(), losses[5], losses[20])
    assert found == pytest.approx(recorded, rel=1e-3, abs=1e-5)
    assert found[1] > found[0] + 0.4


def test_all_are_recorded() -> None:
    assert {name for name, _, _ in RECORDED} == set(ALGORITHMS)
