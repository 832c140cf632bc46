"""TOPR on rollouts that another policy sampled: a new model learns from a recorded run what that run had learned."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.topr import Topr
from rftstream.models.rendering import open_renderer
from tests.golden import arithmetic
from tests.unit import tiny

STEPS = 120


@pytest.mark.slow
def test_it_learns_from_what_was_recorded_where_ratios_do_not(tmp_path):
    spec, other = tiny.make(tmp_path, width=64, seed=2), tiny.make(tmp_path / "other", width=64, seed=3)
    renderer = open_renderer(spec)
    policy, backend = tiny.policy(spec), tiny.backend(spec)
    recorded = []
    for version in range(STEPS):
        policy.load(backend.served_tensors(), tiny.name(version))
        recorded.append(arithmetic.sample(policy, renderer, version, seed=2))
        arithmetic.train(backend, Grpo(Grpo.Config()), recorded[-1], lr=2e-3)
    rewards = {}
    for algorithm in (Topr(Topr.Config()), Grpo(Grpo.Config())):
        learner = tiny.backend(other)
        for batch in recorded:
            arithmetic.train(learner, algorithm, batch, lr=2e-3)
        policy.load(learner.served_tensors(), tiny.name(STEPS))
        held_out = arithmetic.sample(policy, renderer, 0, seed=7)
        rewards[type(algorithm)] = np.mean([one.reward for one in held_out])
    assert rewards[Topr] > 0.7
    assert rewards[Grpo] < 0.5
