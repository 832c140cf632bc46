"""PPO with a critic on a made model: sums of two digits below 5, learned from nothing in 70 steps of 256 samples, while
the critic comes to know which beginnings go well."""

import numpy as np
import pytest

from rftstream.algorithms.ppo import Ppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.models.rendering import open_renderer
from tests.golden import arithmetic
from tests.unit import tiny

REWARDS = {10: 0.01, 30: 0.10, 50: 0.41, 70: 0.76}
"""Step -> mean reward of the ten steps up to it."""


@pytest.mark.sampled(2, "curve")
@pytest.mark.slow
def test_reward_rises_as_it_did(tmp_path):
    spec = tiny.make(tmp_path, width=64, seed=2)
    algorithm = Ppo(Ppo.Config(critic=CriticConfig(lr=4e-3)))
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.hold_critic(algorithm.critic, spec.folder)
    backend.open()
    steps = list(arithmetic.play(tiny.policy(spec), backend, algorithm, open_renderer(spec), steps=max(REWARDS),
                                 lr=2e-3, seed=2))  # fmt: skip
    backend.close()
    rewards = np.asarray([step.reward for step in steps])
    found = {step: rewards[step - 10 : step].mean() for step in REWARDS}
    assert found == pytest.approx(REWARDS, abs=0.15)  # rounding differs between machines
    known = np.asarray([step.metrics["value_explained_variance"] for step in steps])
    assert known[:10].mean() < 0.1
    assert known[-30:].mean() > 0.3
    assert max(step.metrics["mismatch_k3"] for step in steps) < 1e-6
    assert all(np.isfinite(step.metrics["critic_grad_norm"]) for step in steps)
