"""Cross entropy, MIX, CHORD and DPO: against other people's code and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow
from rftstream.algorithms.chord import Chord
from rftstream.algorithms.dpo import Dpo
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.mix import Mix
from rftstream.algorithms.sft import Sft
from rftstream.backends.torch.network import load_model
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.tasks import RolloutIds, Sampling
from rftstream.core.imitation import imitation_loss, phi_weights, preference_loss
from tests.unit import tiny


def segment(token_ids: Any, mask: Any) -> Segment:
    return Segment(
        token_ids=Array.of(token_ids, "int32"), behavior_logprobs=Array.of([-2.0] * len(token_ids), "float32"),
        loss_mask=Array.of(mask, "uint8"), versions=(),
    )  # fmt: skip


def experience(group: str, *segments: Segment, reward: float | None = None, **more: Any) -> Experience:
    ids = RolloutIds(rollout_id=f"{group}/0", group_id=group, taskset="t", sibling=0, group_size=1, sequence=0,
                     min_version=0)  # fmt: skip
    return Experience(
        **{"ids": ids, "batch_sequence": 0, "share": 0, "position": 0, "loss_kind": LossKind.sft, "segments": segments,
           "reward": reward, "sampling": Sampling(), "expert": reward is None, **more}
    )  # fmt: skip


def random_segments(count: int, seed: int = 0) -> list[Segment]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(random.integers(4, 12))
        mask = random.integers(0, 2, length)
        mask[-1] = 1
        found.append(segment(random.integers(1, 17, length), mask))
    return found


def demonstrations(count: int, seed: int = 0) -> list[Experience]:
    return [experience(f"e{i}", one) for i, one in enumerate(random_segments(count, seed))]


def rollouts(count: int, seed: int = 1) -> list[Experience]:
    random = np.random.default_rng(seed)
    return [
        replace(experience(f"g{i // 2}", one, reward=float(random.random())), loss_kind=LossKind.rl)
        for i, one in enumerate(random_segments(count, seed))
    ]


def micro_batch(rows: Any) -> MicroBatch:
    """Padded by hand, junk where it does not matter."""
    longest = max(len(row.token_ids) for row in rows)

    def pad(arrays: Any, fill: float = math.nan) -> torch.Tensor:
        return torch.stack([
            torch.cat([torch.tensor(np.asarray(one), dtype=torch.float32), torch.full((longest - len(one),), fill)])
            for one in arrays
        ])  # fmt: skip

    return MicroBatch(
        loss_mask_BT=pad([row.loss_mask for row in rows], 0.0),
        behavior_logprobs_BT=pad([row.behavior_logprobs for row in rows]),
        advantages_BT=pad([row.advantages for row in rows], 0.0),
        additions={name: pad([row.additions[name] for row in rows], 0.0) for name in rows[0].additions},
    )  # fmt: skip


def random_logprobs(batch: MicroBatch, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    return (-3 * torch.rand(batch.loss_mask_BT.shape)).requires_grad_()


def number(scalar: torch.Tensor) -> float:
    return float(scalar.detach())


# --------------------------------------------------------------------------------------------- sft


def test_cross_entropy_is_that_of_hugging_face(tmp_path: Any) -> None:
    """A tiny model, ragged rows in micro-batches of any size, float32: loss and the whole step."""
    spec = tiny.make(tmp_path)
    rows, _ = Sft(Sft.Config()).prepare(demonstrations(9))
    backend = tiny.backend(spec)
    update = backend.update(rows, Sft(Sft.Config()), tiny.plan(tokens_per_microbatch=24, lr=0.0))
    model = load_model(spec, torch.device("cpu"))
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), -100)
    for place, row in enumerate(rows):
        tokens = torch.tensor(row.token_ids, dtype=torch.int64)
        ids[place, : len(tokens)] = tokens
        labels[place, : len(tokens)] = torch.where(torch.tensor(row.loss_mask) > 0, tokens, -100)
    theirs = model(input_ids=ids, labels=labels).loss
    theirs.backward()
    assert update.metrics["loss"] == pytest.approx(float(theirs.detach()), abs=1e-5)
    assert update.metrics["nll"] == pytest.approx(float(theirs.detach()), abs=1e-5)
    held_out = Sft(Sft.Config()).held_out(rows, backend.logprobs(rows), None)
    assert held_out["held_out_loss"] == pytest.approx(float(theirs.detach()), abs=1e-5)
    norm = math.sqrt(sum(float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None))
    assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_weights_and_masks_of_imitation() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, math.nan, -1.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    weights = torch.tensor([[1.0, 1.0, math.inf], [0.5, math.nan, 2.0]])
    loss, metrics = imitation_loss(logprobs, weights, mask, num_tokens=6, num_rows=2)
    assert number(loss) == pytest.approx((1 + 2 + 4) / 6)
    assert float(metrics["nll"]) == 11
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1 / 6, -1 / 6, 0, -1 / 12, 0, 0])
    by_row, _ = imitation_loss(logprobs, weights, mask, num_tokens=6, num_rows=2, normalise="sequence")
    assert number(by_row) == pytest.approx((1.5 + 4) / 2)


# --------------------------------------------------------------------------------------------- mix, chord


def test_each_term_of_mix_is_a_mean_over_its_own() -> None:
    """(1 - mu) GRPO + mu SFT, whatever there is of each; values and gradients."""
    mix = Mix(Mix.Config(mu=0.25))
    usual, expert = rollouts(6), demonstrations(3)
    rows, metrics = mix.prepare([*usual, *expert])
    batch, denominators = micro_batch(rows), Denominators.of(rows)
    logprobs = random_logprobs(batch)
    loss, _ = mix.loss(logprobs, batch, denominators)
    assert metrics["num_demonstrations"] == 3
    assert metrics["mu"] == 0.25

    grpo, sft = Grpo(Grpo.Config()), Sft(Sft.Config())
    parts = []
    for algorithm, some, first in ((grpo, usual, 0), (sft, expert, len(usual))):
        own, _ = algorithm.prepare(some)
        own_batch = micro_batch(own)
        longest = own_batch.loss_mask_BT.shape[1]
        own_logprobs = logprobs[first : first + len(own), :longest]
        parts.append(algorithm.loss(own_logprobs, own_batch, Denominators.of(own))[0])
    expected = 0.75 * parts[0] + 0.25 * parts[1]
    assert number(loss) == pytest.approx(number(expected), abs=1e-6)
    gradients = torch.autograd.grad(loss, logprobs, retain_graph=True)[0]
    assert torch.allclose(gradients, torch.autograd.grad(expected, logprobs)[0], atol=1e-7)


def test_the_divergence_in_the_reward_is_that_of_rollouts_alone() -> None:
    """The reference is asked for all rows, and GRPO is told of its own."""
    config = {"kl_coef": 0.1, "kl_in": "reward"}
    mix, grpo = Mix(Mix.Config(**config)), Grpo(Grpo.Config(**config))
    usual, expert = rollouts(4), demonstrations(3)
    alone, _ = grpo.prepare(usual)
    rows, _ = mix.prepare([*usual, *expert])
    assert len(rows) == len(alone) + 3
    reference = [np.linspace(-2, -1, len(row.token_ids), dtype=np.float32) for row in rows]
    expected, metrics = grpo.prepare(usual, reference[: len(alone)])
    found, of_mix = mix.prepare([*usual, *expert], reference)
    assert of_mix["kl"] == metrics["kl"] != 0
    for row, other in zip(found, expected, strict=False):
        np.testing.assert_array_equal(row.advantages, other.advantages)
    assert [row.group for row in found[len(alone) :]] == [max(row.group for row in alone) + n for n in (1, 2, 3)]


def test_metrics_of_mix_are_means_over_their_own_tokens() -> None:
    mix, grpo = Mix(Mix.Config()), Grpo(Grpo.Config())
    usual, expert = rollouts(6), demonstrations(3)

    def summary(algorithm: Any, some: Any, logprobs: torch.Tensor) -> dict[str, float]:
        rows, _ = algorithm.prepare(some)
        batch, denominators = micro_batch(rows), Denominators.of(rows)
        _, sums = algorithm.loss(logprobs[: len(rows), : batch.loss_mask_BT.shape[1]], batch, denominators)
        means = {name: float(value) / (1 if name.startswith("max_") else denominators.num_tokens)
                 for name, value in sums.items()}  # fmt: skip
        return algorithm.summarise(means)

    rows, _ = mix.prepare([*usual, *expert])
    logprobs = random_logprobs(micro_batch(rows)).detach()
    mixed, alone = summary(mix, [*usual, *expert], logprobs), summary(grpo, usual, logprobs)
    assert {name: mixed[name] for name in alone} == pytest.approx(alone, rel=1e-5)
    assert mixed["expert_nll"] > 0


def test_demonstrations_have_no_versions_that_sampled_them(tmp_path: Any) -> None:
    """MIX in one micro-batch with rollouts, whose proximal logprobs and weights depend on who sampled them."""
    config = Mix.Config(mu=0.5, proximal="log-linear", staleness_decay=0.5)
    mix, backend = Mix(config), tiny.backend(tiny.make(tmp_path))
    for batch in ([*rollouts(4), *demonstrations(2)], demonstrations(2)):
        rows, _ = mix.prepare(batch)
        assert all({"proximal_share", "age_weight"} <= row.additions.keys() for row in rows)
        update = backend.update(rows, mix, tiny.plan(updates_per_batch=2))
        assert not update.skipped and np.isfinite(update.metrics["loss"])


def test_the_schedule_of_chord() -> None:
    chord = Chord(Chord.Config(mu_peak=0.8, mu_valley=0.1, mu_warmup_steps=4, mu_decay_steps=10))
    assert [chord.mu(step) for step in (0, 1, 4, 9, 14, 1000)] == pytest.approx([0, 0.2, 0.8, 0.45, 0.1, 0.1])
    rows, metrics = chord.prepare([replace(one, batch_sequence=9) for one in demonstrations(1)])
    assert metrics["mu"] == pytest.approx(0.45)
    assert rows[0].additions["mu"].tolist() == pytest.approx([0.45] * len(rows[0].token_ids))


def test_chord_weighs_tokens_by_how_undecided_the_policy_is() -> None:
    probabilities = torch.tensor([[0.5, 0.9, 1.0, 1e-6]])
    mask = torch.ones_like(probabilities)
    assert phi_weights(probabilities.log(), mask)[0].tolist() == pytest.approx([0.25, 0.09, 0.0, 1e-6], rel=1e-4)
    schedule = {"mu_peak": 1.0, "mu_valley": 1.0}
    losses = {}
    for phi in (True, False):
        chord = Chord(Chord.Config(phi=phi, **schedule))
        rows, _ = chord.prepare(demonstrations(2))
        batch = micro_batch(rows)
        logprobs = random_logprobs(batch)
        losses[phi] = number(chord.loss(logprobs, batch, Denominators.of(rows))[0])
        kept = batch.loss_mask_BT > 0
        p = logprobs.detach()[kept].exp()
        weights = p * (1 - p) if phi else torch.ones_like(p)
        assert losses[phi] == pytest.approx(float((-weights * p.log()).mean()), rel=1e-5)
    assert losses[True] < losses[False]


# --------------------------------------------------------------------------------------------- dpo


def pairs(count: int, seed: int = 0) -> list[Experience]:
    segments = random_segments(2 * count, seed)
    return [
        experience(f"p{i // 2}", one, loss_kind=LossKind.dpo, pair=("chosen", "rejected")[i % 2])
        for i, one in enumerate(segments)
    ]


def test_dpo_by_hand() -> None:
    """Two pairs, one of them with two rows on a side: -log sigmoid(beta (chosen - rejected)), a mean over pairs."""
    policy = torch.tensor([[-1.0, -2.0], [-3.0, math.nan], [-1.0, -1.0], [-2.0, 9.0], [-4.0, 9.0]], requires_grad=True)
    reference = torch.tensor([[-2.0, -2.0], [-2.0, 5.0], [-1.5, -2.0], [-2.5, 0.0], [-3.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    numbers, signs = torch.tensor([4, 4, 7, 7, 7]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    weights = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5])

    def loss(**changes: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = {"beta": 0.5, "label_smoothing": 0.0, "num_pairs": 2.0, **changes}
        return preference_loss(policy, reference, numbers, signs, weights, mask, **settings)

    value, sums = loss()
    first, second = 0.5 * (1 - -1), 0.5 * (1.5 + 0.5 - -1)

    def term(margin: float) -> float:
        return math.log1p(math.exp(-margin))

    assert number(value) == pytest.approx((term(first) + 0.5 * term(second)) / 2)
    assert number(loss(label_smoothing=0.1)[0]) == pytest.approx(
        (0.9 * term(first) + 0.1 * term(-first) + 0.5 * (0.9 * term(second) + 0.1 * term(-second))) / 2
    )
    assert {name: float(one) for name, one in sums.items()} == pytest.approx(
        {"pairs": 2, "accuracy": 2, "margin": first + second, "chosen_reward": 1.5, "rejected_reward": -1.0}
    )
    value.backward()
    assert policy.grad is not None
    slope = -0.5 / (1 + math.exp(first)) / 2
    assert policy.grad[:2].flatten().tolist() == pytest.approx([slope, slope, -slope, 0.0])


@pytest.mark.slow
def test_rows_of_a_pair_come_together(tmp_path: Any) -> None:
    """However small the micro-batches are: the same loss and the same gradient; and a policy that is its own reference
    has the loss log 2."""
    spec = tiny.make(tmp_path)
    rows, metrics = Dpo(Dpo.Config()).prepare(pairs(6))
    assert metrics == {"num_pairs": 6.0}
    found = [tiny.backend(spec).update(rows, Dpo(Dpo.Config()), tiny.plan(tokens_per_microbatch=tokens)).metrics
             for tokens in (4096, 24, 1)]  # fmt: skip
    for one in found:
        assert one["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert one["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_dpo_learns_to_prefer(tmp_path: Any) -> None:
    backend, algorithm = tiny.backend(tiny.make(tmp_path)), Dpo(Dpo.Config(beta=1.0))
    rows, _ = algorithm.prepare(pairs(4))
    for _ in range(8):
        update = backend.update(rows, algorithm, tiny.plan())
    assert update.metrics["accuracy"] == 1.0
    held_out = algorithm.held_out(rows, backend.logprobs(rows), backend.reference_logprobs(rows, 4096))
    assert held_out["held_out_accuracy"] == 1.0
    assert held_out["held_out_loss"] < update.metrics["loss"] < 0.6


def test_denominators_count_what_there_is() -> None:
    def row(mask: Any, group: int, expert: float | None = None) -> TrainingRow:
        count = len(mask)
        additions = {} if expert is None else {"expert": np.full(count, expert, np.float32)}
        zeros = np.zeros(count, np.float32)
        return TrainingRow(token_ids=np.zeros(count, np.int32), loss_mask=np.asarray(mask, np.float32),
                           behavior_logprobs=zeros, advantages=zeros, group=group, additions=additions)  # fmt: skip

    found = Denominators.of([row([0, 1, 1], 0), row([0, 1], 0, 0.0), row([0, 0], 1), row([1, 1, 1], 2, 1.0)])
    assert found == Denominators(
        num_tokens=6, num_rows=3, num_groups=2, num_demonstration_tokens=3, num_demonstration_rows=1
    )
