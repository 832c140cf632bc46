"""What holds for every built-in policy gradient: masks, shares, order, gradients, names."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms import ALGORITHMS as ALL
from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.policy_gradient import (
    AGE_WEIGHT,
    CORRECTIONS,
    PROXIMAL_SHARE,
    Clipped,
    CorrectedPolicyGradient,
    PolicyGradient,
)
from rftstream.algorithms.ratios import KEPT
from rftstream.config.parts import registry
from rftstream.contracts.rollouts import VersionSpan
from tests.suite.each import each
from tests.unit.algorithms.test_grpo import experience, segment

ALGORITHMS = [name for name in ALL if issubclass(registry.resolve("algorithm", name), PolicyGradient)]
"""Those that learn from rewards; the others are tested in test_imitation.py."""
ROWS, TOKENS = 6, 5
REGULARISED = {"entropy_coefficient": 0.1, "kl_coef": 0.2, "kl_unbiased": True}
LEVELS = ("token", "sequence", "geometric")
SETTINGS = [
    *((name, {}) for name in ALGORITHMS),
    *((name, REGULARISED) for name in ALGORITHMS),
    *(("grpo", {"correction": one, "correction_level": level}) for one in CORRECTIONS for level in LEVELS),
    ("grpo", {"correction": "none", "normalise": "sequence", "dual_clip": 3.0, "kl_coef": 0.1, "kl_estimator": "k2"}),
    ("grpo", {"proximal": "log-linear"}),
    ("grpo", {"ratio_from": "behavior", "correction": "none"}),
    ("grpo", {"staleness_decay": 0.9, "proximal": "log-linear"}),
    ("kimi", {"staleness_decay": 0.5}),
    ("gspo", {"sequence_mask": 0.01, "correction": "mis", "correction_level": "geometric"}),
    ("dapo", {"sequence_mask": 0.01, "sequence_mask_from": "proximal", "correction": "none"}),
    ("kimi", {"start": "proximal"}),
]
ABSOLUTE = {"topr", "maxrl", "ppo"}
"""Rewards that are all higher give other advantages: TOPR's baseline and MaxRL's mean are absolute, and of PPO it is
rewards that `prepare` gives."""
STOPS = {"cispo", "topr", "log-linear"}
"""Part of their gradient is stopped, which numerical differences would see: their formulas are tested instead."""


def name_of(setting):
    return "-".join([setting[0], *(f"{key}={value}" for key, value in setting[1].items())])


settings = each("setting", SETTINGS, ids=name_of)


def build(setting):
    name, options = setting
    part = registry.resolve("algorithm", name)
    return part(registry.build_config(part, options, where=f"algorithms.{name}"))


class Rows:
    """Ragged rows with holes, the last one without any trained token."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(scale):
            return scale * torch.randn((ROWS, TOKENS), generator=generator, dtype=torch.float64)

        self.mask = (torch.rand((ROWS, TOKENS), generator=generator) < 0.75).double()
        self.mask[:-1, 1], self.mask[-1] = 1, 0
        self.policy = normal(1.0) - 3
        self.proximal, self.reference = self.policy + normal(0.3), self.policy + normal(0.5)
        self.behavior = self.proximal + normal(0.4)
        self.entropy = normal(1.0).abs()
        self.advantages = normal(1.0)[:, :1].expand(ROWS, TOKENS).clone()
        self.kept = (torch.rand((ROWS, TOKENS), generator=generator) < 0.8).double()
        self.share = torch.rand((ROWS, TOKENS), generator=generator, dtype=torch.float64)
        self.age_weight = torch.rand((ROWS, TOKENS), generator=generator, dtype=torch.float64)

    def where_masked(self, fill):
        """The same with something else at masked positions."""
        other = Rows()
        for name in vars(self).keys() - {"mask"}:
            setattr(other, name, torch.where(self.mask > 0, getattr(self, name), fill))
        return other

    def denominators(self):
        return Denominators(num_tokens=float(self.mask.sum()), num_rows=float((self.mask.sum(1) > 0).sum()))

    def loss(self, algorithm, *, some=slice(None), policy=None, denominators=None):
        batch = MicroBatch(
            loss_mask_BT=self.mask[some], behavior_logprobs_BT=self.behavior[some],
            advantages_BT=self.advantages[some],
            additions={KEPT: self.kept[some], PROXIMAL_SHARE: self.share[some], AGE_WEIGHT: self.age_weight[some]},
            entropy_BT=self.entropy[some],
            proximal_logprobs_BT=self.proximal[some], reference_logprobs_BT=self.reference[some],
        )  # fmt: skip
        policy = self.policy if policy is None else policy
        return algorithm.loss(policy[some], batch, denominators or self.denominators())

    def gradient(self, algorithm, **options):
        policy = self.policy.clone().requires_grad_()
        loss, metrics = self.loss(algorithm, policy=policy, **options)
        loss.backward()
        return loss.detach(), policy.grad, metrics


@settings
def test_all_masked_gives_zero(setting):
    rows = Rows()
    rows.mask.zero_()
    loss, gradient, metrics = rows.gradient(build(setting), denominators=Denominators(num_tokens=0, num_rows=0))
    assert float(loss) == 0
    assert not gradient.any()
    assert not any(float(value) for value in metrics.values())


@settings
@each("fill", [math.nan, 1e6])
def test_what_is_masked_does_not_leak(setting, fill):
    rows, algorithm = Rows(), build(setting)
    torch.testing.assert_close(rows.where_masked(fill).gradient(algorithm), rows.gradient(algorithm))


@settings
def test_micro_batches_add_up_to_one_batch(setting):
    rows, algorithm = Rows(), build(setting)
    loss, gradient, metrics = rows.gradient(algorithm)
    parts = [rows.gradient(algorithm, some=part) for part in (slice(0, 2), slice(2, 3), slice(3, ROWS))]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(sum(part[1] for part in parts), gradient)
    assert all(part[2].keys() == metrics.keys() for part in parts)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[2][name] for part in parts), value, msg=name)


@settings
def test_order_of_rows_does_not_matter(setting):
    rows, algorithm = Rows(), build(setting)
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    loss, metrics = rows.loss(algorithm)
    torch.testing.assert_close(rows.loss(algorithm, some=order), (loss, metrics))


@pytest.mark.slow
@each("setting", [one for one in SETTINGS if not STOPS & {one[0], *one[1].values()}], ids=name_of)
def test_gradient_is_that_of_the_formula(setting):
    rows, algorithm = Rows(seed=1), build(setting)
    rows.policy.requires_grad_()
    assert torch.autograd.gradcheck(lambda policy: rows.loss(algorithm, policy=policy)[0], rows.policy, eps=1e-6)


@settings
def test_summaries_are_numbers(setting):
    rows, algorithm = Rows(), build(setting)
    _, _, metrics = rows.gradient(algorithm)
    means = {name: float(value) / rows.denominators().num_tokens for name, value in metrics.items()}
    summary = algorithm.summarise(means)
    assert {"mismatch_k3", "ess"} <= summary.keys() and "rho" not in summary
    assert all(math.isfinite(value) for value in summary.values())
    assert 0 < summary["ess"] <= 1 and summary["mismatch_k3"] > 0


def test_stopped_gradients():
    """CISPO: -min(r, c) A; TOPR: -w A, with w of the whole row; both over their denominators."""
    rows = Rows()
    ratio = (rows.policy - rows.proximal).exp()
    weight = (rows.proximal - rows.behavior).exp().clamp(max=2.0)
    _, gradient, _ = rows.gradient(build(("cispo", {"max_ratio": 1.1})))
    expected = -weight * ratio.clamp(max=1.1) * rows.advantages * rows.mask / rows.mask.sum()
    torch.testing.assert_close(gradient, expected)
    row = ((rows.policy - rows.behavior) * rows.mask).sum(1, keepdim=True).exp().clamp(max=1.0)
    _, gradient, _ = rows.gradient(build(("topr", {})))
    expected = -torch.where(rows.advantages < 0, row, 1.0) * rows.advantages * rows.mask / 5
    torch.testing.assert_close(gradient, expected)


def test_older_tokens_count_less():
    """Of one row, by the version of each token: 0.5 ** (7 - v); the divergence counts in full."""
    one = segment([0, 1, 1, 1, 1])
    spans = ((1, 2, 4), (3, 1, 7), (4, 1, 8))  # the last one by a version that this batch does not know: not older
    versions = tuple(VersionSpan(start=s, count=n, trainer_epoch=1, version=v) for s, n, v in spans)
    old = replace(experience("a", 1.0, replace(one, versions=versions)), batch_sequence=7)
    algorithm = build(("grpo", {"staleness_decay": 0.5}))
    rows, _ = algorithm.prepare([old, experience("a", 0.0, one)])
    np.testing.assert_array_equal(rows[0].additions[AGE_WEIGHT], np.float32([1, 0.125, 0.125, 1, 1]))
    assert AGE_WEIGHT not in build(("grpo", {})).prepare([old])[0][0].additions
    whole, weighed = (build(("grpo", {"kl_coef": 0.2, "correction": "none"} | more))
                      for more in ({}, {"staleness_decay": 0.5}))  # fmt: skip
    batch = Rows()
    (_, plain, _), (_, less, metrics) = batch.gradient(whole), batch.gradient(weighed)
    _, divergence, _ = batch.gradient(whole.__class__(replace(whole.config, kl_coef=0.4)))
    of_kl = divergence - plain
    torch.testing.assert_close(less - of_kl, (plain - of_kl) * batch.age_weight)
    torch.testing.assert_close(metrics[AGE_WEIGHT], (batch.age_weight * batch.mask).sum())


@each("name", [name for name in ALGORITHMS if name not in ("ppo", "remax")])
def test_prepare_gives_what_all_need(name):
    """Rows, groups and the common metrics; order of experiences and what is unscored make no difference. PPO waits for
    its critic, and ReMax has a greedy sibling: test_ppo.py, test_remax.py."""
    algorithm = build((name, {"gigpo": {"turn_weight": 0.0}, "opd": {"reward_weight": 1.0}}.get(name, {})))
    batch = [experience("a", 1.0, segment([0, 1, 1]), segment([1, 1])), experience("b", 0.5), experience("a", 0.0),
             experience("b", 0.75), experience("b", None), experience("c", 1.0)]  # fmt: skip
    rows, metrics = algorithm.prepare(batch)
    assert [row.group for row in rows] == [0, 0, 1, 0, 1, 2]
    assert [len(row.advantages) for row in rows] == [3, 2, 2, 2, 2, 2]
    assert all(row.advantages.dtype == np.float32 for row in rows)
    assert (metrics["num_groups"], metrics["num_rollouts"], metrics["reward"]) == (3, 5, pytest.approx(0.65))
    assert metrics["groups_without_signal_share"] == pytest.approx(1 / 3)
    assert metrics["masked_fraction"] == pytest.approx(1 - 7 / 13)
    assert rows[0].advantages[1] == rows[1].advantages[1] > rows[3].advantages[1]
    again, same = algorithm.prepare([batch[4], *batch[:4], batch[5]])
    assert same == metrics
    for one, other in zip(again, rows, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages)
    assert algorithm.prepare([experience("a", None)]) == ((), {"num_groups": 0.0, "num_rollouts": 0.0})


@each("name", [name for name in ALGORITHMS if name not in ("topr", "asymre", "reinforce_plus_plus", "ppo")])
def test_a_group_that_agrees_has_no_advantage(name):
    batch = [experience("a", 0.7) for _ in range(7)] + [experience("b", 0.2)]
    rows, _ = build((name, {})).prepare(batch)
    assert not any(row.advantages.any() for row in rows)


@each("name", ALGORITHMS)
def test_shifting_all_rewards(name):
    """Changes nothing where siblings or the batch are compared."""
    batch = [experience(group, reward) for group, reward in (("a", 0.9), ("a", 0.1), ("b", 0.3), ("b", 0.35))]
    shifted = [replace(one, reward=one.reward + 2.0) for one in batch]
    values = [[row.advantages[1] for row in build((name, {})).prepare(some)[0]] for some in (batch, shifted)]
    is_same = np.allclose(values[0], values[1], atol=1e-5)
    assert is_same == (name not in ABSOLUTE), (
        f"{name}: rewards that are all higher give {'the same' if is_same else 'other'} advantages; if that is meant, "
        "put its name into ABSOLUTE in tests/unit/algorithms/test_algorithms.py, or take it out"
    )


UNCORRECTED = {"dppo", "m2po", "topr", "asymre", "opmd", "kimi"}


def test_ratios_to_who_sampled_need_no_correction():
    """Those that have one take the ratio to the policy before the batch."""
    corrected = {
        name for name in ALGORITHMS if issubclass(registry.resolve("algorithm", name), CorrectedPolicyGradient)
    }
    assert set(ALGORITHMS) - corrected == UNCORRECTED, (
        "an algorithm whose ratio is to the policy that sampled stands in UNCORRECTED in "
        "tests/unit/algorithms/test_algorithms.py; others inherit from CorrectedPolicyGradient"
    )


@pytest.mark.parametrize("base", [PolicyGradient, CorrectedPolicyGradient, Clipped])
def test_one_without_settings_of_its_own_has_those_that_it_inherits(base):
    class Own(base):
        def advantages(self, rewards_N, groups_N):
            return rewards_N - 1.0

    own = Own(registry.build_config(Own, {"kl_coef": 0.1}, where="algorithms.own"))
    rows, _ = own.prepare([experience("g", 3.0)])
    assert (own.config.kl_coef, rows[0].advantages[1]) == (0.1, 2.0)
