"""PPO's own: rewards of tokens, and what becomes of them once the critic has spoken. Its loss is
`clipped_surrogate_losses`, tested with all the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.ppo import RETURNS, VALUES, Ppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.config.parts.registry import build_config
from rftstream.core.packing import pad_rows
from rftstream.errors import ConfigError
from tests.unit.algorithms.test_grpo import experience, segment


def ppo(**settings):
    return Ppo(build_config(Ppo, settings, where="algorithms.ppo"))


def test_settings_stand_where_they_are_looked_for():
    algorithm = ppo(lam=0.9, critic={"lr": 1e-4, "warmup_batches": 3})
    assert algorithm.critic == CriticConfig(lr=1e-4, warmup_batches=3)
    assert "values" in algorithm.needs
    with pytest.raises(ConfigError, match=r"algorithms\.ppo\.critic\.rate: unknown key; known: lr"):
        ppo(critic={"rate": 1.0})


def test_the_last_token_of_a_rollout_has_its_reward():
    """Over all its segments; the last one here has no trained token, and the other rollout is unscored."""
    batch = [experience("a", 2.0, segment([0, 1, 0, 1, 0]), segment([0, 1, 1]), segment([0, 0])), experience("b", None)]
    rows, metrics = ppo().prepare(batch)
    assert [row.advantages.tolist() for row in rows] == [[0] * 5, [0, 0, 2], [0, 0]]
    assert [row.rollout for row in rows] == [0, 0, 0]
    assert metrics["reward"] == 2.0


def test_divergence_is_taken_at_each_token():
    """Behaviour logprobs are -1: k1 is 0.5 at one token and -1 at another."""
    algorithm = ppo(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    batch = [experience("a", 1.0, segment([0, 1, 0, 1])), experience("b", 0.0)]
    rows, metrics = algorithm.prepare(batch, [np.float32([0, -1.5, np.nan, 0]), np.float32([0, -1])])
    assert rows[0].advantages.tolist() == pytest.approx([0, -0.05, 0, 1.1])
    assert rows[1].advantages.tolist() == [0, 0]
    assert metrics["kl"] == pytest.approx(-0.5 / 3)


def test_advantages_by_hand():
    """lam 0.5, gamma 1. First rollout, over two rows: values 0.5, 1, 0.25, and 1 as the reward of its last token:
    deltas 0.5, -0.75, 0.75. The second: a value of 0.5, no reward."""
    batch = [experience("a", 1.0, segment([0, 1, 0, 1]), segment([0, 1])), experience("b", 0.0)]
    values = [np.float32(one) for one in ([9, 0.5, 9, 1], [9, 0.25], [9, 0.5])]
    algorithm = ppo(lam=0.5, whiten_advantages=False)
    rows, metrics = algorithm.estimate(algorithm.prepare(batch)[0], values)
    a3, a2 = 0.75, -0.75 + 0.5 * 0.75
    a1 = 0.5 + 0.5 * a2
    assert [row.advantages.tolist() for row in rows] == [[0, a1, 0, a2], [0, a3], [0, -0.5]]
    assert [row.additions[RETURNS].tolist() for row in rows] == [[0, 0.5 + a1, 0, 1 + a2], [0, 1], [0, 0]]
    assert all(row.additions[VALUES] is said for row, said in zip(rows, values, strict=True))
    all_four = np.asarray([a1, a2, a3, -0.5])
    assert metrics["advantage"] == pytest.approx(all_four.mean())
    assert metrics["advantage_std"] == pytest.approx(all_four.std())
    assert metrics["advantage_max"] == 0.75
    assert metrics["value"] == pytest.approx(2.25 / 4)
    returns = np.asarray([0.5 + a1, 1 + a2, 1, 0])
    assert metrics["return"] == pytest.approx(returns.mean())
    assert metrics["value_explained_variance"] == pytest.approx(1 - all_four.var() / returns.var())
    white, after = ppo(lam=0.5).estimate(algorithm.prepare(batch)[0], values)
    advantages = {"advantage", "advantage_std", "advantage_max"}
    assert {name: after[name] for name in after.keys() - advantages} == {
        name: metrics[name] for name in metrics.keys() - advantages
    }
    found = np.concatenate([row.advantages[row.loss_mask > 0] for row in white])
    np.testing.assert_allclose(found, (all_four - all_four.mean()) / all_four.std(ddof=1), rtol=1e-5)
    assert not any(row.advantages[row.loss_mask == 0].any() for row in white)
    assert after["advantage"] == pytest.approx(0.0, abs=1e-12)
    assert after["advantage_std"] == pytest.approx(found.std(), rel=1e-6)
    assert after["advantage_max"] == pytest.approx(np.abs(found).max(), rel=1e-6)


def test_truncated_rollouts_can_be_left_out():
    algorithm = ppo(mask_truncated=True)
    batch = [experience("a", 1.0), experience("b", 9.0, truncated=True), experience("c", 0.0)]
    rows, _ = algorithm.estimate(algorithm.prepare(batch)[0], [np.zeros(2, np.float32)] * 3)
    assert [row.advantages[1] for row in rows] == pytest.approx([2**-0.5, 0, -(2**-0.5)])
    everything = [replace(one, truncated=True) for one in batch]
    rows, metrics = algorithm.estimate(algorithm.prepare(everything)[0], [np.zeros(2, np.float32)] * 3)
    assert not any(row.loss_mask.any() for row in rows)
    assert metrics["value_explained_variance"] == 0


def value_batch(rows, some):
    """Rows of additions with the numbers of rows, as a backend pads them."""

    def padded(arrays):
        return torch.from_numpy(pad_rows(arrays).astype(np.float64))[some]

    return MicroBatch(
        loss_mask_BT=padded([row.loss_mask for row in rows]), behavior_logprobs_BT=None, advantages_BT=None,
        additions={name: padded([row.additions[name] for row in rows]) for name in (VALUES, RETURNS)},
    )  # fmt: skip


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_value_loss_is_a_mean_over_tokens_however_it_is_cut(clip):
    random = np.random.default_rng(0)
    batch = [experience("a", 1.0, segment([0, 1, 1])), experience("b", 0.0, segment([0, 1, 0, 1, 1]))]
    algorithm = ppo(critic={"value_clip": clip})
    rows = algorithm.prepare(batch)[0]
    rows, _ = algorithm.estimate(rows, [random.standard_normal(len(row.token_ids)).astype(np.float32) for row in rows])
    values_BT = torch.from_numpy(random.standard_normal((2, 5))).requires_grad_()
    denominators = Denominators.of(rows)
    whole, metrics = algorithm.value_loss(values_BT, value_batch(rows, slice(None)), denominators)
    (gradient_BT,) = torch.autograd.grad(whole, values_BT)
    total = 0.0
    for row, said in zip(rows, values_BT.tolist(), strict=True):
        for t in np.flatnonzero(row.loss_mask).tolist():
            old, target = float(row.additions[VALUES][t]), float(row.additions[RETURNS][t])
            near = min(max(said[t], old - clip), old + clip) if clip else said[t]
            total += max((said[t] - target) ** 2, (near - target) ** 2) / 2
    assert float(whole.detach()) == pytest.approx(total / 5)
    parts = [algorithm.value_loss(values_BT[some], value_batch(rows, some), denominators) for some in
             (slice(0, 1), slice(1, 2))]  # fmt: skip
    torch.testing.assert_close(sum(one[0] for one in parts), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(one[0] for one in parts), values_BT)[0], gradient_BT)
    assert float(sum(one[1]["value_clip_share"] for one in parts)) == float(metrics["value_clip_share"])
