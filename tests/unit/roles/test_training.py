"""What the trainer does with a batch, for algorithms that ask more of the backend than the policy's logprobs."""

from dataclasses import replace

import numpy as np
import pytest

from rftstream.config.parts import registry
from rftstream.config.role_sections import TrainerSection
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.rollouts import VersionSpan
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.training import Training
from tests.unit import tiny
from tests.unit.algorithms.test_grpo import experience, segment


def batch(backend, *, off):
    """Two groups of three rollouts; the first token of each has a behaviour logprob that is `off` from the policy's."""
    random, scored = np.random.default_rng(0), []
    for number in range(6):
        plain = replace(segment([0, 0, 1, 1, 1]), token_ids=Array.of(random.integers(0, 17, 5), "int32"))
        one = experience(f"g{number // 3}", float(number % 3), plain)
        scored.append(replace(one, batch_sequence=3))
    rows, _ = registry.resolve("algorithm", "grpo")(registry.resolve("algorithm", "grpo").Config()).prepare(scored)
    result = []
    for one, logprobs in zip(scored, backend.logprobs(rows), strict=True):
        shifted = logprobs + np.asarray([0, 0, off, 0, 0], np.float32)
        versions = (VersionSpan(start=2, count=2, trainer_epoch=1, version=1),
                    VersionSpan(start=4, count=1, trainer_epoch=1, version=3))  # fmt: skip
        sampled = replace(one.segments[0], behavior_logprobs=Array.of(shifted, "float32"), versions=versions)
        result.append(replace(one, segments=(sampled,)))
    manifest = BatchManifest(batch_sequence=3, share=0, num_shares=1, count=6, digest="", groups=("g0", "g1"),
                             num_groups=2, total_groups=8)  # fmt: skip
    return Batch(sequence=3, experiences=tuple(result), manifests=(manifest,), positions=(0,))


@pytest.fixture
def backend(tmp_path):
    opened = tiny.backend(tiny.make(tmp_path))
    yield opened
    opened.close()


def train(backend, name, settings, **options):
    part = registry.resolve("algorithm", name)
    algorithm = part(registry.build_config(part, options, where="algorithms"))
    update, values, _ = Training(backend, algorithm, TrainerSection(**settings)).update(batch(backend, off=-0.6), 1e-3)
    assert not update.skipped
    return values


def test_the_most_extreme_tokens_of_a_batch_are_left_out(backend):
    """A third of the tokens has a log-ratio of 0.6, the others of 0: mean square 0.12; with one of them 0.028."""
    few = {"tokens_per_microbatch": 5}  # so that no micro-batch knows of all
    values = train(backend, "m2po", few, threshold=0.02)
    assert values["second_moment_dropped"] == pytest.approx(1 / 3)
    assert values["ratio"] == pytest.approx((2 + np.exp(0.6)) / 3, rel=1e-4)
    assert train(backend, "m2po", few, threshold=0.2)["second_moment_dropped"] == 0


def test_the_reward_of_a_step_is_that_of_all_who_were_decided_not_of_the_batch(backend):
    """As the buffer counted it: with filtered groups, which are not in the batch."""
    one = batch(backend, off=0.0)
    decided = {"reward": 0.25, "reward_std": 0.5, "rollouts": 24.0, "filtered_share": 0.75}
    one = replace(one, manifests=(replace(one.manifests[0], metrics=decided),))
    part = registry.resolve("algorithm", "grpo")
    _, values, _ = Training(backend, part(part.Config()), TrainerSection()).update(one, 1e-3)
    assert {name: values[name] for name in decided} == decided
    assert values["num_rollouts"] == 6


def test_interpolated_proximal_logprobs_are_not_computed(backend):
    """Of the tokens of version 1, trained at 3, one is 0.6 from the policy: half of that is its ratio to the batch's
    policy. With what is computed the ratio of the first step is 1."""
    values = train(backend, "grpo", {}, proximal="log-linear", correction="none")
    assert values["ratio"] == pytest.approx((2 + np.exp(0.3)) / 3, rel=1e-4)
    assert train(backend, "grpo", {}, correction="none")["ratio"] == pytest.approx(1.0)


@pytest.mark.law("staleness")
def test_what_is_trained_is_counted_by_its_age(backend):
    """Six rollouts at version 3 with two tokens of version 1 and one of 3; one token is masked by an operator, one
    rollout was truncated, and the oldest token that a group trains is the group's age."""
    one, part = batch(backend, off=0.0), registry.resolve("algorithm", "grpo")
    training = Training(backend, part(part.Config(mask_truncated=True)), TrainerSection())
    staleness = training.update(one, 1e-3)[2]
    assert (staleness.tokens, staleness.groups) == ((6, 0, 12), (0, 0, 2))
    first, last = one.experiences[0], one.experiences[5]
    masked = replace(first.segments[0], loss_mask=Array.of([0, 0, 0, 1, 1], "uint8"))
    some = (replace(first, segments=(masked,)), *one.experiences[1:5], replace(last, truncated=True))
    assert training.update(replace(one, experiences=some), 1e-3)[2].tokens == (5, 0, 9)
    young = [replace(each, segments=(replace(each.segments[0], loss_mask=Array.of([0, 0, 0, 0, 1], "uint8")),))
             for each in one.experiences[:3]]  # fmt: skip
    staleness = training.update(replace(one, experiences=(*young, *one.experiences[3:])), 1e-3)[2]
    assert (staleness.tokens, staleness.groups) == ((6, 0, 6), (1, 0, 1))


def test_a_batch_that_was_skipped_trained_nothing(backend):
    one, part = batch(backend, off=0.0), registry.resolve("algorithm", "grpo")
    lost = replace(one.experiences[0].segments[0], behavior_logprobs=Array.of([-1, -1, np.nan, -1, -1], "float32"))
    some = (replace(one.experiences[0], segments=(lost,)), *one.experiences[1:])
    update, _, staleness = Training(backend, part(part.Config()), TrainerSection()).update(
        replace(one, experiences=some), 1e-3
    )
    assert update.skipped
    assert (staleness.tokens, staleness.groups) == ((), ())


def test_several_steps_with_everything(backend):
    settings = {"minibatches": 2, "updates_per_batch": 2, "tokens_per_microbatch": 10}
    options = {"proximal": "log-linear", "correction": "mis", "correction_level": "geometric", "sequence_mask": 0.1,
               "kl_coef": 0.1, "kl_unbiased": True, "entropy_coefficient": 0.01}  # fmt: skip
    values = train(backend, "gspo", settings, **options)
    assert values["optimizer_steps"] == 4
    assert {"kl", "entropy", "importance_dropped", "sequences_dropped", "clip_fraction", "ess"} <= values.keys()
    assert all(np.isfinite(value) for value in values.values())
