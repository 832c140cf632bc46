"""GRPO on a made model: sums of two digits below 5, learned from nothing in 110 steps of 256 samples. And TOPR on what
that run sampled: another new model learns from it what that run had learned."""

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.ratios import Topr
from rftstream.models.rendering import open_renderer
from tests.golden import arithmetic
from tests.unit import tiny

REWARDS = {10: 0.01, 30: 0.12, 50: 0.47, 70: 0.80, 90: 0.94, 110: 0.98}
"""Step -> mean reward of the ten steps up to it."""
STEPS = max(REWARDS)
RECORDED = slice(50, STEPS)
"""The batches that another model learns from."""

pytestmark = pytest.mark.slow


MODEL = {"width": 64, "seed": 2}


@pytest.fixture(scope="module")
def policy(spec):
    return tiny.policy(spec)


@pytest.fixture(scope="module")
def run(spec, policy):
    """Its batches, and what each step said."""
    backend, renderer = tiny.backend(spec), open_renderer(spec)
    batches, steps = [], []
    for version in range(STEPS):
        policy.load(backend.served_tensors(), tiny.name(version))
        batches.append(arithmetic.sample(policy, renderer, version, seed=2))
        steps.append(arithmetic.train(backend, Grpo(Grpo.Config()), batches[-1], lr=2e-3))
    return batches, steps


@pytest.mark.sampled(2, "curve")
def test_reward_rises_as_it_did(run):
    _, steps = run
    rewards = np.asarray([step.reward for step in steps])
    for at, expected in REWARDS.items():
        assert rewards[at - 10 : at].mean() == pytest.approx(expected, abs=0.15), at
    assert rewards[-10:].mean() > 0.9
    assert max(step.metrics["mismatch_k3"] for step in steps) < 1e-6  # same weights, same dtype
    assert steps[0].metrics["entropy"] > 2.8
    assert all(np.isfinite(step.metrics["grad_norm"]) for step in steps)


@pytest.mark.sampled(2, "curve")
def test_topr_learns_from_what_was_recorded_where_ratios_do_not(run, spec, policy, tmp_path):
    batches, _ = run
    other, rewards = tiny.make(tmp_path, width=64, seed=3), {}
    for algorithm in (Topr(Topr.Config()), Grpo(Grpo.Config())):
        learner = tiny.backend(other)
        for batch in batches[RECORDED]:
            arithmetic.train(learner, algorithm, batch, lr=2e-3)
        policy.load(learner.served_tensors(), tiny.name(STEPS))
        held_out = arithmetic.sample(policy, open_renderer(spec), 0, seed=7)
        rewards[type(algorithm)] = np.mean([one.reward for one in held_out])
    assert rewards[Topr] > 0.7
    assert rewards[Grpo] < 0.5
