import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.algorithms.grpo import Grpo
from rftstream.config.parts.registry import build_config, resolve
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.rollouts import Segment, VersionSpan
from rftstream.contracts.tasks import RolloutIds, Sampling
from rftstream.errors import ConfigError
from tests.suite.each import each

ALL = Denominators(num_tokens=2, num_rows=1)


def segment(mask, logprob=-1.0):
    count = len(mask)
    return Segment(
        token_ids=Array.of(range(count), "int32"), behavior_logprobs=Array.of([logprob] * count, "float32"),
        loss_mask=Array.of(mask, "uint8"), versions=(VersionSpan(start=0, count=1, trainer_epoch=1, version=0),),
    )  # fmt: skip


def experience(group, reward, *segments, temperature=1.0, truncated=False):
    ids = RolloutIds(rollout_id=f"{group}/0", group_id=group, taskset="t", sibling=0, group_size=2, sequence=0,
                     min_version=0)  # fmt: skip
    segments = segments or (segment([0, 1]),)
    teacher = np.concatenate([one.behavior_logprobs.numpy() for one in segments])  # one that agrees
    return Experience(
        ids=ids, batch_sequence=0, share=0, position=0, loss_kind=LossKind.rl, segments=segments,
        reward=reward, sampling=Sampling(temperature=temperature), truncated=truncated,
        additions={"teacher_logprobs": Array.of(teacher, "float32")},
    )  # fmt: skip


def micro_batch(behavior=(0.0, 0.0), advantages=(1.0, 1.0), mask=(1.0, 1.0)):
    return MicroBatch(
        loss_mask_BT=torch.tensor([mask]), behavior_logprobs_BT=torch.tensor([behavior]),
        advantages_BT=torch.tensor([advantages]),
    )  # fmt: skip


def test_rows_carry_the_advantage_of_their_rollout():
    batch = [
        experience("a", 1.0, segment([0, 1, 1]), segment([1, 1])), experience("b", 5.0), experience("a", 0.0),
        experience("b", 5.0, temperature=0.0), experience("b", None),
    ]  # fmt: skip
    rows, metrics = Grpo(Grpo.Config(advantage_eps=1e-9)).prepare(batch)
    half = 1 / math.sqrt(2)
    assert [float(row.advantages[0]) for row in rows] == pytest.approx([half, half, 0.0, -half, 0.0])
    assert [len(row.advantages) for row in rows] == [3, 2, 2, 2, 2]
    assert [row.group for row in rows] == [0, 0, 1, 0, 1]
    assert [row.temperature for row in rows] == [1.0] * 5
    assert rows[1].loss_mask.tolist() == [0, 1]  # nothing precedes the first token
    assert metrics["num_groups"] == 2
    assert metrics["num_rollouts"] == 4
    assert metrics["reward"] == pytest.approx(2.75)
    assert metrics["groups_without_signal"] == 1
    assert metrics["masked_fraction"] == pytest.approx(1 - 6 / 11)


def test_tis_weighs_by_who_sampled():
    policy_BT = torch.log(torch.tensor([[0.8, 0.3]])).requires_grad_()
    behavior = (math.log(0.2), math.log(0.6))
    losses = {}
    for correction in ("tis", "none"):
        algorithm = Grpo(Grpo.Config(correction=correction))
        losses[correction], sums = algorithm.loss(policy_BT, micro_batch(behavior=behavior), ALL)
    assert float(losses["none"].detach()) == pytest.approx(-1.0)
    assert float(losses["tis"].detach()) == pytest.approx(-(2.0 + 0.5) / 2)  # rho 4 is cut at 2, rho 0.5 stays
    means = {name: float(value) / 2 for name, value in sums.items()}
    assert algorithm.summarise(means)["ess"] == pytest.approx(4.5**2 / (2 * (16 + 0.25)))


def test_entropy_is_asked_for_and_subtracted():
    algorithm = Grpo(Grpo.Config(entropy_coefficient=0.1, correction="none"))
    assert algorithm.needs == {"entropy"}
    assert Grpo(Grpo.Config()).needs == frozenset()
    policy_BT = torch.zeros(1, 2, requires_grad=True)
    loss, _ = algorithm.loss(policy_BT, replace(micro_batch(), entropy_BT=torch.tensor([[1.0, 3.0]])), ALL)
    assert float(loss.detach()) == pytest.approx(-1.0 - 0.1 * 2.0)
    with pytest.raises(ValueError, match="entropy_BT"):
        algorithm.loss(policy_BT, micro_batch(), ALL)


@each("options", [{"clip_low": 1.5}, {"dual_clip": 0.5}, {"normalise": "row"}, {"cliplow": 0.1}])
def test_odd_settings_are_refused(options):
    with pytest.raises(ConfigError, match=r"algorithms\.grpo"):
        build_config(Grpo, options, where="algorithms.grpo")


def test_truncated_completions_are_left_out_of_the_loss_and_stay_in_their_group():
    batch = [experience("a", 1.0), experience("a", 0.0, segment([0, 1]), segment([0, 1, 1]), truncated=True)]
    kept, plain = Grpo(Grpo.Config()).prepare(batch)
    rows, metrics = Grpo(Grpo.Config(mask_truncated=True)).prepare(batch)
    assert [row.loss_mask.sum() for row in kept] == [1, 1, 2]
    assert [row.loss_mask.sum() for row in rows] == [1, 0, 0]
    assert [row.advantages[0] for row in rows] == [row.advantages[0] for row in kept]
    assert (metrics["truncated_masked"], metrics["reward"]) == (1, 0.5)
    assert metrics["masked_fraction"] > plain["masked_fraction"]
    assert "truncated_masked" not in plain


def test_kl_is_added_to_the_loss():
    policy_BT = torch.log(torch.tensor([[0.5, 0.2]])).requires_grad_()
    reference_BT = torch.log(torch.tensor([[0.25, 0.8]]))
    for estimator, kl in (("k2", (math.log(2) ** 2 + math.log(4) ** 2) / 4),
                          ("k3", (0.5 + math.log(2) - 1 + 4 - math.log(4) - 1) / 2)):  # fmt: skip
        algorithm = Grpo(Grpo.Config(kl_coef=0.1, kl_estimator=estimator, correction="none"))
        assert algorithm.needs == {"reference_logprobs"}
        loss, sums = algorithm.loss(policy_BT, replace(micro_batch(), reference_logprobs_BT=reference_BT), ALL)
        assert float(loss.detach()) == pytest.approx(-1.0 + 0.1 * kl)
        assert float(sums["kl"]) == pytest.approx(2 * kl)
    with pytest.raises(ValueError, match="reference_logprobs_BT"):
        algorithm.loss(policy_BT, micro_batch(), ALL)


def test_kl_is_taken_from_the_reward():
    """Behaviour logprobs are -1: d is -0.5 for one token of the first rollout, and 0 elsewhere."""
    batch = [experience("a", 1.0, segment([0, 1]), segment([0, 1])), experience("a", 1.0), experience("a", 0.5)]
    reference = [np.asarray(one, np.float32) for one in ([np.nan, -1.5], [np.nan, -1.0], [0.0, -1.0], [0.0, -1.0])]
    algorithm = Grpo(Grpo.Config(kl_coef=0.4, kl_estimator="k1", kl_in="reward", advantage_eps=1e-9))
    assert algorithm.needs == {"reference_rewards"}
    rows, metrics = algorithm.prepare(batch, reference)
    rewards, penalties = np.asarray([1.0, 1.0, 0.5]), np.asarray([0.2, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / rewards.std(ddof=1) - (penalties - penalties.mean())
    assert [row.advantages[0] for row in rows] == pytest.approx([expected[0], expected[0], *expected[1:]])
    assert metrics["kl"] == pytest.approx(0.5 / 4)
    assert metrics["reward"] == pytest.approx(2.5 / 3)
    assert metrics["reward_after_kl"] == pytest.approx(2.3 / 3)


def test_truncated_completions_count_in_the_kl_of_the_reward():
    algorithm = Grpo(Grpo.Config(kl_coef=1.0, kl_in="reward", mask_truncated=True))
    batch = [experience("a", 1.0, truncated=True), experience("a", 1.0)]
    first, _ = algorithm.prepare(batch)
    assert [row.loss_mask.sum() for row in first] == [1, 1]  # the reference is asked for these, too
    rows, metrics = algorithm.prepare(batch, [np.float32([0, -2]), np.float32([0, -1])])
    assert [row.loss_mask.sum() for row in rows] == [0, 1]
    assert metrics["groups_without_signal"] == 1 and metrics["truncated_masked"] == 1
    assert rows[1].advantages[1] == pytest.approx((math.exp(-1) - 0) / 2)  # k3 of d = -1 is exp(-1)


@each("name", ["grpo", "gigpo", "dapo", "gspo", "reinforce_plus_plus", "rloo", "dr_grpo"])
def test_a_small_kl_in_the_reward_stays_small_where_rewards_are_equal(name):
    """Behaviour logprobs are -1. The divergence is 6e-6 in one rollout, and 0 in its siblings."""
    algorithm_type = resolve("algorithm", name)
    config = algorithm_type.Config(kl_coef=1.0, kl_estimator="k1", kl_in="reward")
    batch = [experience("a", 1.0) for _ in range(4)]
    reference = [np.float32([0, -1 - 6e-6 * (number == 0)]) for number in range(4)]
    rows, metrics = algorithm_type(config).prepare(batch, reference)
    largest = max(abs(row.advantages[1]) for row in rows)
    assert 1e-6 < largest < 1e-5, largest
    assert metrics["groups_without_signal"] == 1


def test_k1_in_the_loss_is_refused():
    with pytest.raises(ConfigError, match="'k1' in the loss has no gradient on average"):
        Grpo(Grpo.Config(kl_coef=0.1, kl_estimator="k1"))
    assert Grpo(Grpo.Config(kl_estimator="k1")).needs == frozenset()
    assert Grpo(Grpo.Config(kl_coef=0.1, kl_estimator="k1", kl_unbiased=True)).needs == {"reference_logprobs"}
    with pytest.raises(ConfigError, match="kl_unbiased: is for the loss"):
        Grpo(Grpo.Config(kl_coef=0.1, kl_in="reward", kl_unbiased=True))


def test_bounds_of_the_correction_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"algorithms\.grpo\.correction_low: got 0\.5, expected less than"):
        Grpo(Grpo.Config(correction="icepop", correction_high=0.4))
    with pytest.raises(ConfigError, match=r"algorithms\.grpo\.correction_high: has no effect"):
        Grpo(Grpo.Config(correction="none", correction_high=2.0))


def test_the_ratio_may_be_to_who_sampled():
    """The policy before the batch is told of in the mismatch alone."""
    rows = MicroBatch(
        loss_mask_BT=torch.tensor([[0.0, 1, 1]]), behavior_logprobs_BT=torch.tensor([[0.0, -2.0, -2.0]]),
        advantages_BT=torch.ones(1, 3), proximal_logprobs_BT=torch.tensor([[0.0, -1.5, -1.5]]),
    )  # fmt: skip
    policy_BT = torch.tensor([[0.0, -1.9, -1.4]]).requires_grad_()
    algorithm = Grpo(Grpo.Config(ratio_from="behavior", correction="none"))
    loss, sums = algorithm.loss(policy_BT, rows, Denominators(num_tokens=2, num_rows=1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-(math.exp(0.1) + 1.2) / 2)
    assert policy_BT.grad.tolist() == [[0, pytest.approx(-math.exp(0.1) / 2), 0]]
    assert float(sums["clip_fraction"]) == 1
    assert float(sums["mismatch_k3"]) == pytest.approx(2 * (math.exp(0.5) - 1.5), rel=1e-5)


def test_a_ratio_to_who_sampled_is_not_corrected_again():
    with pytest.raises(ConfigError, match=r"algorithms\.grpo\.correction: got 'tis', expected 'none' with ratio_from"):
        Grpo(Grpo.Config(ratio_from="behavior"))


def test_proximal_logprobs_are_interpolated_by_versions():
    """Trained at version 4: tokens of versions 4, 3, 2 and 0 are 0, 0, 1/2 and 3/4 of the way."""
    spans = [VersionSpan(start=start, count=1, trainer_epoch=1, version=version)
             for start, version in ((1, 4), (2, 3), (3, 2), (4, 0))]  # fmt: skip
    one = experience("a", 1.0, replace(segment([0, 1, 1, 1, 1]), versions=tuple(spans)))
    algorithm = Grpo(Grpo.Config(proximal="log-linear", correction="none"))
    assert algorithm.needs == {"no_proximal_logprobs"}
    (row,), _ = algorithm.prepare([replace(one, batch_sequence=4)])
    assert row.additions["proximal_share"].tolist() == [0, 0, 0, 0.5, 0.75]
    rows = MicroBatch(
        loss_mask_BT=torch.tensor([[0.0, 1, 1, 1, 1]]), behavior_logprobs_BT=torch.zeros(1, 5) - 2.0,
        advantages_BT=torch.ones(1, 5),
        additions={name: torch.tensor(share_T)[None] for name, share_T in row.additions.items()},
    )  # fmt: skip
    policy_BT = (torch.zeros(1, 5) - 1.92).requires_grad_()
    loss, sums = algorithm.loss(
        policy_BT, replace(rows, proximal_logprobs_BT=policy_BT), Denominators(num_tokens=4, num_rows=1)
    )
    ratios = [math.exp(0.08 * part) for part in (1, 1, 0.5, 0.25)]
    assert float(loss.detach()) == pytest.approx(-sum(ratios) / 4)
    assert float(sums["mismatch_k3"]) == pytest.approx(sum(math.exp(x) - x - 1 for x in (0, 0, 0.04, 0.06)), rel=1e-4)


def test_the_weight_of_an_experience_is_a_factor_of_its_loss():
    """A group that is trained on once more counts half; the rows of the other group count in full."""
    batch = [experience("a", 1.0), experience("a", 0.0), experience("b", 1.0), experience("b", 0.0)]
    algorithm = Grpo(Grpo.Config(correction="none"))
    whole, _ = algorithm.prepare(batch)
    assert all(not row.additions for row in whole), "nothing is added where all count in full"
    halved, _ = algorithm.prepare([replace(one, use=1, weight=0.5) for one in batch[:2]] + batch[2:])
    assert [float(row.additions["discount"][1]) for row in halved] == [0.5, 0.5, 0.0, 0.0]
    assert [row.advantages.tolist() for row in halved] == [row.advantages.tolist() for row in whole]
    losses = []
    for row in (*whole, *halved):
        rows = replace(
            micro_batch(behavior=(0.0, -1.0), advantages=row.advantages.tolist(), mask=(0.0, 1.0)),
            additions={name: torch.from_numpy(value)[None] for name, value in row.additions.items()},
        )
        logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
        loss, _ = algorithm.loss(logprobs, rows, Denominators(num_tokens=4, num_rows=4))
        loss.backward()
        losses.append(float(logprobs.grad[0, 1]))
    assert losses[4:] == pytest.approx([0.5 * losses[0], 0.5 * losses[1], losses[2], losses[3]])
    assert losses[0] != 0
