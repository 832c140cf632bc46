"""Mini-batches: with the same weights the mean of their losses and gradients is the whole batch's, and each has as much
of every kind and taskset as the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.algorithms import ALGORITHMS
from rftstream.algorithms.base import Denominators, TrainingRow
from rftstream.algorithms.by_taskset import ByTaskset, TasksetAlgorithm
from rftstream.algorithms.mix import Mix
from rftstream.backends.base import UpdatePlan
from rftstream.backends.deepspeed.wire import pack, rows_in, unpack
from rftstream.backends.passes import Passes, minibatch_rows
from rftstream.backends.torch.inputs import Inputs
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.core.packing import split_minibatches
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.algorithms.test_by_taskset import build
from tests.unit.algorithms.test_imitation import demonstrations, experience, random_segments

CPU = torch.device("cpu")
VOCABULARY, LONGEST = 20, 16


class Table:
    """A policy in float64 that knows a token and its place, and nothing else."""

    packs = shares = False

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_TV = torch.randn((LONGEST, VOCABULARY), generator=generator, dtype=torch.float64)
        self.logits_TV.requires_grad_()

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_NV = self.logits_TV.log_softmax(-1)[inputs.places_N]
        places = (inputs.rows_N, inputs.places_N)
        zeros_BT = torch.zeros(inputs.rows.loss_mask_BT.shape, dtype=torch.float64)
        found_N = logprobs_NV.gather(1, inputs.targets_N[:, None])[:, 0]
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return zeros_BT.index_put(places, found_N), zeros_BT.index_put(places, entropy_N)

    def flops(self, inputs: Inputs, *, backward: bool) -> float:
        return 0.0

    def routed(self) -> dict[str, torch.Tensor]:
        return {}


def scored(sizes: list[int], *, taskset: str = "sums", seed: int = 0) -> list[Experience]:
    """Groups of so many rollouts, of one to three segments."""
    random, made = np.random.default_rng(seed), []
    for group, size in enumerate(sizes):
        for sibling in range(size):
            segments = random_segments(int(random.integers(1, 4)), seed=seed + 100 * group + sibling)
            one = experience(
                f"{taskset}/{group}", *segments, reward=float(random.integers(5)) / 4, loss_kind=LossKind.rl
            )
            count = sum(len(segment.token_ids.numpy()) for segment in segments)
            made.append(replace(
                one, ids=replace(one.ids, rollout_id=f"{taskset}/{group}/{sibling}", taskset=taskset, sibling=sibling),
                sampling=replace(one.sampling, temperature=0.0 if sibling == 0 else 1.0),
                additions={"teacher_logprobs": Array.of(-3 * random.random(count), "float32")},
            ))  # fmt: skip
    return made


def pairs(count: int, seed: int = 0) -> list[Experience]:
    segments = random_segments(2 * count, seed)
    return [
        replace(experience(f"pair{number // 2}", one), loss_kind=LossKind.dpo,
                pair="chosen" if number % 2 == 0 else "rejected")
        for number, one in enumerate(segments)
    ]  # fmt: skip


def given_to(name: str, groups: list[int], experts: int) -> list[Experience]:
    if name in ("dpo", "reward_model"):
        return pairs(len(groups))
    if name == "sft":
        return demonstrations(len(groups))
    return [*scored(groups, seed=3), *(demonstrations(experts) if name in ("mix", "chord") else [])]


def prepared(algorithm: Any, batch: list[Experience]) -> Any:
    """As the trainer does, with what the critic and the policies before the batch say made up."""
    rows, _ = algorithm.prepare(batch)
    said = [np.where(row.loss_mask > 0, -2 + 0.3 * np.sin(np.arange(len(row.loss_mask))), 0).astype(np.float32)
            for row in rows]  # fmt: skip
    if "reference_rewards" in algorithm.needs:
        rows, _ = algorithm.prepare(batch, said)
    if "row_logprobs" in algorithm.needs:
        rows, _ = algorithm.refine(rows, said)
    if "values" in algorithm.needs:
        rows, _ = algorithm.estimate(rows, said)
    return rows


def gradients(algorithm: Any, rows: Any, minibatches: int) -> tuple[list[torch.Tensor], list[float], Passes]:
    """Of each mini-batch, in several micro-batches, none of which changes the policy; the policy before the batch and
    the reference are others."""
    network: Any = Table(seed=0)
    plan = UpdatePlan(
        lr=0.0, minibatches=minibatches, updates_per_batch=1, max_grad_norm=0.0, tokens_per_microbatch=300
    )
    passes = Passes(network, rows, plan, CPU, whole_groups="whole_groups" in algorithm.needs)
    before: Any = Table(seed=1)
    before.logits_TV = (network.logits_TV + 0.2 * before.logits_TV).detach()
    for minibatch in passes.minibatches:
        minibatch.proximal = [before.logprobs(inputs)[0] for inputs in minibatch.inputs]
    passes.compute_reference(Table(seed=2))  # type: ignore[arg-type]
    found, losses = [], []
    for minibatch in passes.minibatches:
        network.logits_TV.grad = None
        losses.append(passes.accumulate(minibatch, algorithm))
        found.append(network.logits_TV.grad)
    return found, losses, passes


def mean_is_whole(algorithm: Any, rows: Any, minibatches: int, count: int) -> None:
    parts, losses, passes = gradients(algorithm, rows, minibatches)
    (whole,), (loss,), once = gradients(algorithm, rows, 1)
    assert len(parts) == count
    assert whole.abs().max() > 1e-6
    # rows hold float32, and behind a clip nothing else is rounded
    torch.testing.assert_close(sum(parts) / len(parts), whole, rtol=1e-9, atol=1e-12)
    assert np.mean(losses) == pytest.approx(loss, rel=1e-6, abs=1e-7)
    expected = once.metrics(algorithm)
    assert passes.metrics(algorithm) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert passes.num_tokens == once.num_tokens == sum(row.loss_mask.sum() for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize(
    ("groups", "experts", "minibatches"),
    [([8] * 3, 6, 4), ([3, 7, 2, 5, 6, 1], 1, 4), ([4, 4, 4, 1], 5, 3)],
)
def test_the_mean_over_minibatches_is_the_whole_batch(
    name: str, groups: list[int], experts: int, minibatches: int
) -> None:
    algorithm = build(name)
    rows = prepared(algorithm, given_to(name, groups, experts))
    count = min(minibatches, len({row.group for row in rows if row.loss_mask.any()}))
    mean_is_whole(algorithm, rows, minibatches, count)


@each("name", ["grpo", "dapo", "sapo", "rloo", "mix", "chord"])
def test_with_divergence_entropy_and_means_over_rows(name: str) -> None:
    options: dict[str, Any] = {"kl_coef": 0.1, "entropy_coefficient": 0.01, "staleness_decay": 0.9}
    options |= {"normalise": "sequence"} if name in ("grpo", "dapo", "mix", "chord") else {}
    algorithm = build(name, **options)
    mean_is_whole(algorithm, prepared(algorithm, given_to(name, [3, 5, 2, 4], 6)), 4, 4)


def test_with_an_algorithm_for_each_taskset() -> None:
    mix, rloo = build("mix"), build("rloo")
    algorithm = ByTaskset(TasksetAlgorithm(mix, ("sums",)), [TasksetAlgorithm(rloo, ("words",))])
    batch = [*scored([4, 3, 2]), *demonstrations(5), *scored([2, 5], taskset="words", seed=9)]
    rows = prepared(algorithm, batch)
    assert {row.stratum for row in rows} == {"rl/sums", "sft/t", "rl/words"}
    mean_is_whole(algorithm, rows, 4, 4)
    strata = [Counter(row.stratum for row in part) for part in split(rows, 4)]
    assert all(part.keys() == {"rl/sums", "sft/t", "rl/words"} for part in strata)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 7), st.integers(1, 9), st.floats(0.01, 0.99))
def test_the_mean_of_mix_whatever_the_sizes(groups: list[int], experts: int, minibatches: int, mu: float) -> None:
    algorithm = Mix(Mix.Config(mu=mu))
    rows = prepared(algorithm, given_to("mix", groups, experts))
    parts, losses, _ = gradients(algorithm, rows, minibatches)
    (whole,), (loss,), _ = gradients(algorithm, rows, 1)
    torch.testing.assert_close(sum(parts) / len(parts), whole, rtol=1e-9, atol=1e-12)
    assert np.mean(losses) == pytest.approx(loss, rel=1e-6, abs=1e-7)


def split(rows: Any, minibatches: int, **changes: Any) -> list[list[TrainingRow]]:
    """The rows of each mini-batch."""
    return minibatch_rows(rows, replace(tiny.plan(minibatches=minibatches), **changes), False)


@each("groups", [[4] * 6, [2] * 12, [8] * 3, [24]])
def test_each_step_sees_rollouts_and_demonstrations(groups: list[int]) -> None:
    """24 rollouts and 6 demonstrations in 4 mini-batches."""
    rows = prepared(build("mix"), given_to("mix", groups, 6))
    kinds = [Counter(bool(row.additions["expert"].any()) for row in part) for part in split(rows, 4)]
    assert sorted(part[True] for part in kinds) == [1, 1, 2, 2]
    rollouts = [len({(row.group, row.rollout) for row in part if not row.additions["expert"].any()})
                for part in split(rows, 4)]  # fmt: skip
    assert sum(rollouts) == 24
    assert max(rollouts) - min(rollouts) <= max(groups) % 24


@pytest.mark.slow
def test_weights_of_imitation_lead_to_different_updates_with_minibatches_too(tmp_path: Any) -> None:
    """24 rollouts and 6 demonstrations: where steps saw one kind alone, mu hardly mattered, since Adam makes each step
    as long as any other."""
    spec, cosines = tiny.make(tmp_path), {}
    for minibatches in (1, 4):
        changes = []
        for mu in (0.05, 0.95):
            backend, algorithm = tiny.backend(spec), Mix(Mix.Config(mu=mu))
            before = weights(backend)
            backend.update(prepared(algorithm, given_to("mix", [4] * 6, 6)), algorithm,
                           tiny.plan(minibatches=minibatches, lr=1e-4))  # fmt: skip
            changes.append(weights(backend) - before)
            backend.close()
        cosines[minibatches] = float(changes[0] @ changes[1] / np.linalg.norm(changes[0]) / np.linalg.norm(changes[1]))
    assert cosines[4] < cosines[1] + 0.2, cosines


def weights(backend: Any) -> np.ndarray:
    tensors = backend.served_tensors()
    return np.concatenate([np.frombuffer(tensors[name].data, np.float32) for name in sorted(tensors)]).astype(float)


def test_groups_stay_together_where_there_are_enough() -> None:
    rows = prepared(build("grpo"), [*scored([3, 3, 2, 4]), *scored([2, 5, 1, 3, 2], taskset="words", seed=50)])
    parts = split(rows, 4)
    assert [len({row.group for row in part}) for part in parts] == [3, 2, 2, 2]
    assert sum(len({row.group for row in part}) for part in parts) == 9
    assert all({row.stratum for row in part} == {"rl/sums", "rl/words"} for part in parts)


def test_what_is_left_over_does_not_pile_up() -> None:
    """Five strata of three groups over four: each mini-batch has three or four."""
    groups_N = np.arange(15)
    parts = split_minibatches(groups_N, 4, strata_N=groups_N // 3)
    assert sorted(len(part) for part in parts) == [3, 4, 4, 4]
    assert [part.tolist() for part in split_minibatches(groups_N, 15, strata_N=groups_N // 3)] == [
        [one] for one in range(15)
    ]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=12), st.integers(1, 14),
    st.booleans(),
)  # fmt: skip
def test_strata_are_spread_evenly(groups: list[tuple[int, int]], count: int, whole: bool) -> None:
    """Each group has a stratum and so many rollouts, a row each."""
    groups_N = np.repeat(np.arange(len(groups)), [size for _, size in groups])
    strata_N = np.asarray([groups[group][0] for group in groups_N])
    rollouts_N = np.arange(len(groups_N))
    parts = split_minibatches(groups_N, count, strata_N=strata_N, rollouts_N=None if whole else rollouts_N)
    assert sorted(int(row) for part in parts for row in part) == list(range(len(groups_N)))
    assert len(parts) == min(count, len(groups)) and all(len(part) for part in parts)
    for stratum in set(strata_N.tolist()):
        own = [part[strata_N[part] == stratum] for part in parts]
        num_groups = len(set(groups_N[strata_N == stratum].tolist()))
        together = whole or num_groups >= len(parts)
        names_N = groups_N if together else rollouts_N
        numbers = [len(set(names_N[part].tolist())) for part in own]
        assert max(numbers) - min(numbers) <= 1
        if together:
            assert sum(numbers) == num_groups, "no group is in two"


def test_odd_arrays_are_named() -> None:
    with pytest.raises(ValueError, match=r"packing: got strata .*\(2,\), expected integers \[N\]"):
        split_minibatches(np.zeros(3, int), 1, strata_N=np.zeros(2, int))


def test_a_run_of_before_is_cut_as_it_was() -> None:
    """In the batch's order, with denominators of each mini-batch's own."""
    rows = prepared(build("mix"), given_to("mix", [4] * 6, 6))
    network: Any = Table(seed=0)
    plan = replace(tiny.plan(minibatches=4), stratified=False)
    found = Passes(network, rows, plan, CPU).minibatches
    kinds = [Counter(bool(row.additions["expert"].any()) for row in part) for part in split(rows, 4, stratified=False)]
    assert [part[True] for part in kinds] == [0, 0, 3, 3]
    parts = split(rows, 4, stratified=False)
    assert [one.denominators for one in found] == [Denominators.of(part) for part in parts]


def test_rows_keep_their_stratum_on_their_way_to_other_ranks() -> None:
    rows = prepared(build("mix"), given_to("mix", [2, 2], 2))
    assert [row.stratum for row in rows_in(unpack(pack(rows)))] == [row.stratum for row in rows]
    assert {row.stratum for row in rows} == {"rl/sums", "sft/t"}
