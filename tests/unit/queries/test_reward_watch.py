"""Signs of reward hacking, from recorded steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rftstream.algorithms.reward_signs import find_reward_signs
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.queries.curves.history import History
from tests.configs import small_run
from tests.suite.each import each

STEPS = 40


def config_of(reward: Any = "exact", **evaluations: dict[str, Any]) -> RunConfig:
    return small_run(
        tasksets={"train": {"source": "arithmetic", "reward": reward}},
        evaluations={name: {"source": "arithmetic", **one} for name, one in evaluations.items()},
    )  # fmt: skip


def history(
    steps: dict[str, tuple[float, float]],
    curves: dict[str, Callable[[float], float]] | None = None,
    **evaluations: list[float],
) -> History:
    """Metrics that go evenly from their first to their last value, those of other curves by the share of the steps that
    is done, and means of evaluations, evenly spread."""
    records = [
        StepRecord(
            name=VersionName(trainer_epoch=1, version=version),
            batch_sequence=version - 1,
            positions=(0,),
            trained_groups=version,
            trained_rollouts=version,
            weights_digest=None,
            metrics={
                **{name: a + (b - a) * version / STEPS for name, (a, b) in steps.items()},
                **{name: curve(version / STEPS) for name, curve in (curves or {}).items()},
            },
        )
        for version in range(1, STEPS + 1)
    ]
    results = [
        EvalResult(
            evaluation=name,
            name=VersionName(trainer_epoch=1, version=number * STEPS // (len(means) - 1)),
            num_tasks=1,
            num_samples=1,
            num_unscored=0,
            metrics={"mean": mean},
            generations=None,
        )
        for name, means in evaluations.items()
        for number, mean in enumerate(means)
    ]
    return History(steps=tuple(records), resumes=(), evaluations=tuple(results), current=records[-1])


def signs(found: History, config: RunConfig) -> dict[str, str]:
    return {sign.kind: sign.text for sign in find_reward_signs(found.metrics, found.evaluations, config)}


BOTH = [{"name": "exact"}, {"name": "well_formed", "weight": 0.5}]
WELL = {"reward": (0.1, 1.4), "part/exact": (0.1, 0.9), "part/well_formed": (0.0, 1.0), "length_mean": (100.0, 150.0)}


def test_a_run_that_does_well_has_none() -> None:
    config = config_of(BOTH, held_out={}, canary={"canary": True})
    assert signs(history(WELL, held_out=[0.1, 0.5, 0.9], canary=[0.05, 0.04, 0.05]), config) == {}
    long = {**WELL, "length_mean": (100.0, 900.0)}
    assert signs(history(long, held_out=[0.1, 0.5, 0.9]), config) == {}, "longer, and better for it"


@each(
    ("means", "told"),
    [([0.0, 0.3], True), ([0.3, 0.3], False), ([0.0, 0.05], False), ([0.05, 0.6, 0.02], False)],
)
def test_a_canary(means: list[float], told: bool) -> None:
    found = signs(history({"reward": (0.1, 0.9)}, canary=means), config_of(canary={"canary": True}))
    assert ("canary" in found) == told
    assert "canary" not in signs(history({"reward": (0.1, 0.9)}, canary=means), config_of(canary={}))


def test_one_part_that_rises_while_the_others_fall() -> None:
    hacked = {"reward": (0.5, 0.9), "part/exact": (0.5, 0.4), "part/well_formed": (0.0, 1.0)}
    found = signs(history(hacked), config_of(BOTH))
    assert found.keys() == {"dominance"}
    assert found["dominance"] == (
        "train: well_formed added +0.39 from the steps to version 8 to those from 31 to 40, the other parts -0.08"
    )


def test_a_part_that_falls_while_the_whole_rises() -> None:
    rewards = [{"name": "exact"}, {"name": "well_formed", "weight": 0.5}, {"name": "contains"}]
    parts = {
        "reward": (0.5, 1.5),
        "part/exact": (0.2, 0.9),
        "part/well_formed": (0.9, 0.1),
        "part/contains": (0.0, 0.9),
    }
    found = signs(history(parts), config_of(rewards))
    assert found == {
        "falling": "train: well_formed went by -0.31 from the steps to version 8 to those from 31 to 40, the reward by "
        "+0.77"
    }
    assert signs(history({**parts, "part/well_formed": (0.9, 0.85)}), config_of(rewards)) == {}
    assert signs(history({**parts, "reward": (1.5, 0.5)}), config_of(rewards)) == {}, "the reward shows it"


@each(
    ("kl", "reward", "told"),
    [
        (lambda x: x**6, lambda x: min(x, 0.6), True),
        (lambda x: x**6, lambda x: x, False),  # the reward still pays for it
        (lambda x: 0.5 * x, lambda x: min(x, 0.6), False),  # evenly
        (lambda x: 0.01 * x**6, lambda x: min(x, 0.6), False),  # hardly any
    ],
)
def test_a_divergence_that_buys_no_more_reward(
    kl: Callable[[float], float], reward: Callable[[float], float], told: bool
) -> None:
    found = history({}, {"kl": kl, "reward": reward})
    assert ("kl" in signs(found, config_of())) == told
    without_middle = replace(found, steps=found.steps[:12] + found.steps[-12:], passed_over=STEPS - 24)
    assert "kl" not in signs(without_middle, config_of()), "a glance does not know how fast it went"


def test_a_reward_that_no_evaluation_follows() -> None:
    found = history({"reward": (0.1, 0.9), "length_mean": (100.0, 400.0)}, held_out=[0.4, 0.4, 0.4], other=[0.2, 0.1])
    assert signs(found, config_of(held_out={}, other={})).keys() == {"held_out", "length"}
    assert signs(found, config_of()) == {}, "nothing to compare with"
    parts = history(
        {"reward": (0.1, 0.7), "part/exact": (0.1, 0.2), "part/well_formed": (0.0, 1.0)}, held_out=[0.4, 0.4]
    )
    assert signs(parts, config_of(BOTH, held_out={}))["held_out"].endswith("; most of it by well_formed +0.39")
    two = {f"part/{one}/{part}": (0.0, end) for one in ("train", "more") for part, end in
           (("exact", 0.1), ("well_formed", 0.8))}  # fmt: skip
    config = config_of(BOTH, held_out={})
    config = replace(config, tasksets=dict.fromkeys(("train", "more"), config.tasksets["train"]))
    said = signs(history({"reward": (0.1, 0.7), **two}, held_out=[0.4, 0.4]), config)["held_out"]
    assert said.endswith("; most of it by well_formed in train +0.31, well_formed in more +0.31")


def test_a_second_opinion_that_is_far_away() -> None:
    config = config_of([{"name": "exact"}, {"name": "well_formed", "use": "check"}])
    assert signs(history({"reward": (0.5, 0.5), "metric/well_formed.apart": (0.0, 0.6)}), config).keys() == {"checks"}
    assert signs(history({"reward": (0.5, 0.5), "metric/well_formed.apart": (0.0, 0.1)}), config) == {}
    config = config_of([{"name": "judge"}, {"name": "judge", "use": "check"}])  # the second is called judge-2
    assert signs(history({"reward": (0.5, 0.5), "metric/judge-2.apart": (0.0, 0.6)}), config).keys() == {"checks"}


@pytest.mark.parametrize("part", ["", "judge-2."])
def test_a_judge_that_contradicts_itself(part: str) -> None:
    bias = {
        f"metric/{part}orders_disagree": (0.0, 0.7),
        f"metric/{part}prefers_first": (0.0, 0.7),
        "reward": (0.5, 0.5),
    }
    found = signs(history(bias), config_of())
    assert found.keys() == {"judge"}
    assert "contradicts itself in 62% of the comparisons" in str(found["judge"])
    assert "sees first is +0.62" in str(found["judge"])
    assert signs(history({**bias, f"metric/{part}orders_disagree": (0.0, 0.4)}), config_of()) == {}


def test_more_and_more_rollouts_without_a_reward() -> None:
    assert signs(history({"reward": (0.5, 0.5), "unscored_share": (0.0, 0.4)}), config_of()).keys() == {"unscored"}


def test_a_canary_has_wrong_answers() -> None:
    config = config_of(plain={}, canary={"canary": True})
    plain = open_taskset("plain", config.evaluations["plain"], config)
    canary = open_taskset("canary", config.evaluations["canary"], config)
    assert len(canary) == len(plain) and canary.digest != plain.digest
    for index in (0, 1, len(plain) - 1):
        asked, wrong = plain.problem(index), canary.problem(index)
        assert wrong.messages == asked.messages
        assert wrong.answer is not None and wrong.answer != asked.answer


def test_a_canary_of_problems_with_one_answer(tmp_path: Any) -> None:
    (tmp_path / "same.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "1"}\n')
    config = config_of(canary={"canary": True, "source": f"jsonl:{tmp_path / 'same.jsonl'}"})
    taskset = open_taskset("canary", config.evaluations["canary"], config)
    with pytest.raises(ConfigError, match="problem 0 has the same answer and columns as the next 1, expected"):
        taskset.problem(0)
