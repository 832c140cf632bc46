"""Rewards of other libraries through the whole flow: their verdicts, parts and metrics, as steps tell of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.testing import Simulation
from tests.flow.scene import make_config

REWARDS = '''
def right(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """verl's."""
    return {"score": float(solution_str.strip() == ground_truth) + bonus, "length": len(solution_str), "pred": "x"}


def small(prompts, completions, answer, **columns):
    """TRL's; it has an opinion on small answers only."""
    return [0.5 if int(right) < 9 else None for right in answer]


def never_above_nine(completions, answer, **columns):
    return [1.0 if int(right) < 10 else None for right in answer]
'''


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module."""
    (tmp_path / "flow_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "flow_rewards"


def test_parts_and_metrics_reach_the_steps(tmp_path: Path, rewards: str) -> None:
    right, small = f"{rewards}:right", f"{rewards}:small"
    config = make_config(
        run__steps=4,
        tasksets__sums__reward=[{"name": right, "weight": 2.0}, {"name": small}],
        rewards={right: {"bonus": 0.25}},
    )
    simulation = Simulation(config, folder=tmp_path)
    simulation.run()
    steps = [one for one in simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    verified = [one for one in simulation.messages("verified") if isinstance(one, VerifiedRollout)]
    assert len(steps) == 4
    for step in steps:
        assert step.metrics["metric/right.length"] > 0
        assert 0.25 <= step.metrics["part/right"] <= 1.25
    applied = [one for one in verified if one.verdict and "small" in one.verdict.parts]
    assert 0 < len(applied) < len(verified)
    for one in verified:
        assert one.verdict is not None
        parts = one.verdict.parts
        assert one.verdict.reward == pytest.approx(2 * parts["right"] + parts.get("small", 0.0))
        assert one.verdict.scorer == "right+small"


@pytest.mark.law("unscorable")
def test_where_no_reward_applies_the_rollout_has_none(tmp_path: Path, rewards: str) -> None:
    config = make_config(
        run__steps=3, tasksets__sums__reward=f"{rewards}:never_above_nine", verifier__max_dead_share=1.0,
        buffer__min_siblings=1,
    )  # fmt: skip
    simulation = Simulation(config, folder=tmp_path)
    simulation.run()
    verified = [one for one in simulation.messages("verified") if isinstance(one, VerifiedRollout)]
    without = [one for one in verified if one.verdict is None]
    assert 0 < len(without) < len(verified)
    for one in verified:
        assert one.rollout is not None and one.rollout.problem is not None
        assert (one.verdict is None) == (int(one.rollout.problem.answer or "") >= 10)
    assert {one.reason for one in without} == {UnscorableReason.error}
    assert "no reward applies" in (without[0].detail or "")
