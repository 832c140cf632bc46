"""An algorithm for each taskset: what a batch of several gives, against each algorithm alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators
from rftstream.algorithms.by_taskset import ByTaskset, TasksetAlgorithm, build_algorithm
from rftstream.algorithms.clips import Rloo
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.mix import Mix
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.role_sections import TrainerSection
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.errors import ConfigError
from rftstream.preflight.checks.advice import find_warnings
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.training import Training
from rftstream.runs.writes.load_demonstrations import check_demonstrations
from tests.configs import small_run
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.algorithms.test_imitation import demonstrations, micro_batch, rollouts


def of(taskset: str, count: int, seed: int) -> list[Experience]:
    """Groups of two."""
    return [
        replace(one, ids=replace(one.ids, taskset=taskset, group_id=f"{taskset}/{one.ids.group_id}"))
        for one in rollouts(count, seed)
    ]


def build(name: str, **options: Any) -> Any:
    part = registry.resolve("algorithm", name)
    return part(registry.build_config(part, options, where="algorithms"))


def make(tasksets: dict[str, Any], *, algorithm: str = "grpo", **values: Any) -> RunConfig:
    return small_run(
        trainer={"algorithm": algorithm},
        tasksets={name: {"source": "arithmetic", **one} for name, one in tasksets.items()}, **values,
    )  # fmt: skip


def split(rest: Any, **others: Any) -> ByTaskset:
    return ByTaskset(
        TasksetAlgorithm(rest, ("sums",)), [TasksetAlgorithm(one, (name,)) for name, one in others.items()]
    )


def loss_of(algorithm: Any, rows: Any, denominators: Denominators, policy: list[np.ndarray]) -> tuple[float, Any]:
    batch = micro_batch(rows)
    policy_BT = torch.zeros_like(batch.loss_mask_BT)
    for place, logprobs_T in enumerate(policy):
        policy_BT[place, : len(logprobs_T)] = torch.tensor(logprobs_T)
    loss, sums = algorithm.loss(policy_BT, batch, denominators)
    return float(loss), sums


def policy_of(rows: Any, seed: int = 5) -> list[np.ndarray]:
    """Drawn by the tokens, so that a row has the same wherever it stands."""
    return [-1.5 + 0.3 * np.sin(np.asarray(row.token_ids, np.float32) + seed) for row in rows]


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_each_algorithm_prepares_and_learns_from_its_own_rows(normalise: str) -> None:
    """Its loss over its rows alone, times its share of what it normalises by: RLOO by rows."""
    grpo, rloo = build("grpo", normalise=normalise), build("rloo")
    sums, words = of("sums", 6, 1), of("words", 4, 2)
    mixed = [one for pair in zip(sums[:4], words, strict=True) for one in pair] + sums[4:]
    algorithm = split(grpo, words=rloo)
    rows, _ = algorithm.prepare(mixed)
    usual, others = grpo.prepare(sums)[0], rloo.prepare(words)[0]
    assert [row.group for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for mine, theirs in zip(rows, (*usual, *others), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.advantages.tolist() == theirs.advantages.tolist()
    whole = Denominators.of(rows)
    loss, _ = loss_of(algorithm, rows, whole, policy_of(rows))
    of_usual, of_others = Denominators.of(usual), Denominators.of(others)
    share = of_usual.num_tokens / whole.num_tokens if normalise == "token" else of_usual.num_rows / whole.num_rows
    expected = share * loss_of(grpo, usual, of_usual, policy_of(usual))[0]
    expected += of_others.num_rows / whole.num_rows * loss_of(rloo, others, of_others, policy_of(others))[0]
    assert loss == pytest.approx(expected, rel=1e-5)


def test_experiences_are_told_in_the_order_of_their_rows() -> None:
    algorithm = split(Grpo(Grpo.Config()), maze=build("rloo"))
    batch = [*of("maze", 2, 3), *of("sums", 2, 4), *of("maze", 2, 5)]
    rows, _ = algorithm.prepare(batch)
    tokens = [segment.token_ids.numpy() for one in algorithm.in_order(batch) for segment in one.segments]
    assert all(np.array_equal(row.token_ids, found) for row, found in zip(rows, tokens, strict=True))
    assert [one.ids.taskset for one in algorithm.in_order(batch)] != [one.ids.taskset for one in batch]


def test_one_algorithm_under_two_names_is_that_algorithm() -> None:
    """Advantages are of groups, denominators of the whole: what is asked of two is what one gives."""
    algorithm, one = split(build("grpo"), words=build("grpo")), build("grpo")
    batch = [*of("sums", 6, 1), *of("words", 4, 2)]
    rows, values = algorithm.prepare(batch)
    alone, expected = one.prepare(batch)
    denominators = Denominators.of(alone)
    assert Denominators.of(rows) == denominators
    loss, sums = loss_of(algorithm, rows, denominators, policy_of(rows))
    wanted, theirs = loss_of(one, alone, denominators, policy_of(alone))
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    means = {name: float(value) / denominators.num_tokens for name, value in sums.items()}
    summary = algorithm.summarise(means)
    wished = one.summarise({name: float(value) / denominators.num_tokens for name, value in theirs.items()})
    wished.pop("ess")  # of each part its own
    assert {name: summary[name] for name in wished} == pytest.approx(wished, rel=1e-5)
    assert summary["token_share/sums"] + summary["token_share/words"] == pytest.approx(1.0)


@pytest.mark.slow
def test_micro_batches_add_up_to_one_large_batch(tmp_path: Any) -> None:
    """Through the backend, in float32: the same loss and weights whatever the size of the micro-batches; what one of
    the algorithms needs the other has beside it."""
    batch = [*of("sums", 6, 1), *of("words", 4, 2), *demonstrations(3)]
    results = []
    for tokens in (6, 10_000):
        backend = tiny.backend(tiny.make(tmp_path / str(tokens)))
        algorithm = split(build("mix", mu=0.3, kl_coef=0.1), words=build("m2po"))
        assert algorithm.needs == {"reference_logprobs", "row_logprobs"}
        training = Training(backend, algorithm, TrainerSection(tokens_per_microbatch=tokens))
        manifest = BatchManifest(batch_sequence=0, share=0, num_shares=1, count=13, digest="", groups=(), num_groups=5,
                                 total_groups=5)  # fmt: skip
        update, values, _ = training.update(Batch(0, tuple(batch), (manifest,), (0,)), 1e-3)
        assert not update.skipped
        results.append((values, tiny.state(backend)))
        backend.close()
    small, large = results
    assert small[0]["loss"] == pytest.approx(large[0]["loss"], rel=1e-5)
    assert small[0]["microbatches"] > 5 > large[0]["microbatches"]
    assert {"kl/sums", "expert_nll/sums", "second_moment_dropped/words", "entropy/words"} <= large[0].keys()
    assert "kl/words" not in large[0]
    assert large[0]["num_demonstrations"] == 3
    assert large[0]["num_rollouts"] == 10


def test_demonstrations_are_of_the_runs_own_algorithm() -> None:
    mix, rloo = Mix(Mix.Config(mu=0.25)), Rloo(Rloo.Config())
    algorithm = split(mix, words=rloo)
    words, experts = of("words", 4, 2), demonstrations(2)
    rows, values = algorithm.prepare([*words, *experts])
    whole = Denominators.of(rows)
    own = rloo.prepare(words)[0]
    imitated = mix.prepare(experts)[0]
    loss, _ = loss_of(algorithm, rows, whole, policy_of(rows))
    alone = Denominators.of(imitated)
    expected = loss_of(rloo, own, Denominators.of(own), policy_of(own))[0]
    expected += loss_of(mix, imitated, alone, policy_of(imitated))[0]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert values["num_demonstrations"] == 2
    assert hasattr(algorithm, "held_out")
    assert not hasattr(split(rloo, words=mix), "held_out")


def test_metrics_of_the_whole_are_what_one_algorithm_would_say() -> None:
    batch = [*of("sums", 6, 1), *of("words", 4, 2)]
    values = split(build("grpo"), words=build("rloo")).prepare(batch)[1]
    rewards = [one.reward for one in batch]
    assert values["reward"] == pytest.approx(np.mean(rewards))
    assert values["reward_std"] == pytest.approx(np.std(rewards))
    assert (values["num_groups"], values["num_groups/sums"], values["num_groups/words"]) == (5, 3, 2)
    assert values["advantage_max"] == max(values["advantage_max/sums"], values["advantage_max/words"])
    assert "reward/words" not in values, "the buffer says that of all that was decided"


def test_what_the_reference_says_reaches_those_that_ask_for_it() -> None:
    grpo, rloo = build("grpo", kl_coef=0.5, kl_in="reward"), build("rloo")
    algorithm = split(rloo, words=grpo)
    sums, words = of("sums", 4, 1), of("words", 4, 2)
    rows, _ = algorithm.prepare([*words, *sums])
    assert "reference_rewards" in algorithm.needs
    reference = policy_of(rows)
    again, values = algorithm.prepare([*words, *sums], reference)
    expected = grpo.prepare(words, reference[4:])[0]
    assert [row.advantages.tolist() for row in again[4:]] == [row.advantages.tolist() for row in expected]
    assert [row.advantages.tolist() for row in again[:4]] == [row.advantages.tolist() for row in rows[:4]]
    assert "kl/words" in values


def test_to_do_without_the_policy_before_the_batch_all_have_to() -> None:
    interpolates = build("grpo", proximal="log-linear")
    assert "no_proximal_logprobs" not in split(interpolates, words=build("rloo")).needs
    assert "no_proximal_logprobs" in split(interpolates, words=build("grpo", proximal="log-linear", clip_low=0.1)).needs


def test_from_the_run_file() -> None:
    tasksets = {"sums": {}, "words": {"algorithm": "rloo"}, "more": {"algorithm": "grpo"},
                "wide": {"algorithm": {"name": "grpo", "clip_high": 0.4}}, "text": {"algorithm": "rloo"}}  # fmt: skip
    config = make(tasksets, algorithms={"grpo": {"clip_low": 0.1}})
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, ByTaskset)
    labels = [part.label for part in algorithm.parts]
    assert labels == ["sums+more", "words+text", "wide"]
    wide = algorithm.parts[2].algorithm
    assert isinstance(wide, Grpo)
    assert (wide.config.clip_low, wide.config.clip_high) == (0.1, 0.4)
    assert loader.from_toml(loader.to_toml(config)) == config
    assert find_warnings(config, {}, None, None) == []
    assert isinstance(build_algorithm(make({"sums": {}, "words": {"algorithm": "grpo"}})), Grpo)


@each(
    ("algorithm", "problem"),
    [
        ("gpro", r"unknown 'gpro'.*did you mean 'grpo'"),
        ({"clip_high": 0.4}, r"tasksets.words.algorithm: found no name"),
        ({"name": "grpo", "clip_hihg": 0.4}, r"tasksets.words.algorithm.clip_hihg: unknown key.*clip_high"),
        ({"name": "grpo", "clip_high": -1.0}, r"tasksets.words.algorithm.clip_high: got -1.0"),
    ],
)
def test_what_is_wrong_is_said(algorithm: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_algorithm(make({"sums": {}, "words": {"algorithm": algorithm}}))


def test_a_taskset_is_learned_from_by_what_learns_from_rollouts() -> None:
    with pytest.raises(ConfigError, match=r"tasksets.words.algorithm: 'sft' learns nothing from rollouts"):
        check_demonstrations(make({"sums": {}, "words": {"algorithm": "sft"}}))
