"""Every policy gradient learns a small table, along the curve that it learned it along before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rftstream.algorithms import ALGORITHMS
from rftstream.algorithms.policy_gradient import PolicyGradient
from rftstream.config.parts import registry
from tests.golden import table

STEPS = 25
RECORDED: list[tuple[str, dict[str, Any], tuple[float, ...]]] = [
    ("grpo", {}, (0.1875, 0.913021, -0.104295, -0.043363)),
    ("dr_grpo", {"row_tokens": 4}, (0.179688, 0.881771, -0.024771, -0.003403)),
    ("dapo", {"overlong_share": 0.5, "overlong_penalty": 0.1}, (0.169792, 0.917188, -0.058487, -0.039741)),
    ("gspo", {}, (0.182292, 0.786979, -0.042736, -0.037216)),
    ("cispo", {}, (0.1875, 0.913021, -0.045538, -0.215753)),
    ("sapo", {}, (0.182812, 0.905729, -0.114361, -0.063451)),
    ("rloo", {}, (0.183854, 0.922396, -0.017768, -0.002985)),
    ("reinforce_plus_plus", {}, (0.178125, 0.946875, -0.069904, -0.025631)),
    ("remax", {}, (0.190104, 0.893229, 0.365717, 0.106545)),
    ("ppo", {"critic": {"value_clip": 0.5}}, (0.184375, 0.955729, -0.056816, -0.02107)),
    ("ppo", {"lam": 0.9, "gamma": 0.95, "kl_coef": 0.05, "kl_in": "reward"},
     (0.1875, 0.951562, -0.060446, -0.020665)),
    ("gigpo", {}, (0.1875, 0.913021, -0.208592, -0.086726)),
    ("maxrl", {}, (0.18125, 0.805729, -0.058438, -0.004387)),
    ("dppo", {}, (0.1875, 0.914583, -0.104279, -0.043539)),
    ("m2po", {"threshold": 0.001}, (0.166146, 0.644271, 0.008957, -0.228669)),
    ("topr", {}, (0.167708, 0.929688, -1.10503, 0.238412)),
    ("asymre", {}, (0.174479, 0.870833, 0.316855, -0.105608)),
    ("opd", {}, (0.2015625, 0.927604, 0.577896, 0.022935)),
    ("opd", {"reward_weight": 1.0}, (0.2, 0.941146, 0.406222, 0.035136)),
    ("opmd", {}, (0.185938, 0.900521, -0.023277, -0.02986)),
    ("kimi", {}, (0.184375, 0.899479, 0.238437, 0.071547)),
    ("grpo", {"kl_coef": 0.05, "kl_in": "reward"}, (0.1875, 0.911458, -0.10268, -0.046828)),
    ("grpo", {"entropy_coefficient": 0.02, "kl_coef": 0.05, "kl_unbiased": True},
     (0.1875, 0.924479, -0.121307, -0.017373)),
    ("grpo", {"correction": "mask", "proximal": "log-linear"}, (0.179688, 0.915625, -0.058636, -0.005454)),
    ("grpo", {"correction": "icepop", "sequence_mask": 0.01}, (0.16875, 0.84375, -0.359031, -0.346987)),
    ("gspo", {"correction": "mis", "correction_level": "geometric"}, (0.182292, 0.7875, -0.042215, -0.039399)),
    ("reinforce_plus_plus", {"group_baseline": True, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
     (0.185938, 0.911979, -0.039411, -0.018976)),
    ("opmd", {"baseline": "soft"}, (0.196875, 0.949479, -0.04166, -0.03735)),
    ("kimi", {"start": "proximal"}, (0.185938, 0.9, 0.268826, 0.038384)),
]  # fmt: skip
"""Algorithm, settings; mean reward of the first and the last five steps, loss of the steps 5 and 20."""


def name_of(case: Any) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED, ids=name_of)
def test_curve(case: tuple[str, dict[str, Any], tuple[float, ...]]) -> None:
    name, options, recorded = case
    part = registry.resolve("algorithm", name)
    algorithm = part(registry.build_config(part, options, where=f"algorithms.{name}"))
    steps = list(table.play(algorithm, steps=STEPS))
    rewards, losses = np.asarray([one.reward for one in steps]), [one.loss for one in steps]
    found = (rewards[:5].mean(), rewards[-5:].mean(), losses[5], losses[20])
    assert found == pytest.approx(recorded, rel=1e-3, abs=1e-5)
    assert found[1] > found[0] + 0.4


def test_all_are_recorded() -> None:
    gradients = {name for name in ALGORITHMS if issubclass(registry.resolve("algorithm", name), PolicyGradient)}
    assert {name for name, _, _ in RECORDED} == gradients
