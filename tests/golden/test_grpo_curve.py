"""GRPO on a made model: sums of two digits below 5, learned from nothing in 110 steps of 256 samples."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.models.rendering import open_renderer
from tests.golden import arithmetic
from tests.unit import tiny

REWARDS = {10: 0.01, 30: 0.12, 50: 0.47, 70: 0.80, 90: 0.94, 110: 0.98}
"""Step -> mean reward of the ten steps up to it."""


@pytest.mark.slow
def test_reward_rises_as_it_did(tmp_path):
    spec = tiny.make(tmp_path, width=64, seed=2)
    policy, backend = tiny.policy(spec), tiny.backend(spec)
    steps = list(
        arithmetic.play(policy, backend, Grpo(Grpo.Config()), open_renderer(spec), steps=max(REWARDS), lr=2e-3, seed=2)
    )
    rewards = np.asarray([step.reward for step in steps])
    for at, expected in REWARDS.items():
        assert rewards[at - 10 : at].mean() == pytest.approx(expected, abs=0.15), at
    assert rewards[-10:].mean() > 0.9
    assert max(step.metrics["mismatch_k3"] for step in steps) < 1e-6  # same weights, same dtype
    assert steps[0].metrics["entropy"] > 2.8
    assert all(np.isfinite(step.metrics["grad_norm"]) for step in steps)
