"""A reward model from pairs with a planted preference, and a policy that is rewarded by it: the two examples."""

from __future__ import annotations

import statistics

import pytest

from tests.e2e.test_resume import PATIENCE_S
from tests.e2e.workplace import EXAMPLES, RunView, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE_S)]


def worth(answer: str) -> int:
    """The rule behind the pairs: an even digit counts 1, an odd one -1."""
    return sum(1 if character in "02468" else -1 for character in answer if character.isdigit())


@pytest.mark.sampled(3, "examples")
def test_a_reward_model_from_pairs_rewards_a_policy(place: Workplace) -> None:
    """Made shorter: after a few steps it already agrees with the rule, and the policy is scored by it."""
    view = rewarded_by_a_model(place, steps=10, accuracy=0.8, rewarded_steps=2)
    scored = [(one.verdict.reward, worth(one.rollout.turns[-1].content)) for one in view.verified()
              if one.verdict is not None and one.rollout is not None]  # fmt: skip
    assert len(scored) >= 2 * 128
    assert statistics.correlation(*zip(*scored, strict=True)) > 0.5


@pytest.mark.long
def test_the_policy_learns_what_the_reward_model_likes(place: Workplace) -> None:
    view = rewarded_by_a_model(place, steps=50, accuracy=0.95, rewarded_steps=25)
    assert {one.name.version: one.metrics for one in place.view("runs/reward-model").steps()}[50]["held_out_margin"] > 1
    rewards = [one.metrics["reward"] for one in view.steps()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1
    answers = [one.turns[-1].content for one in view.rollouts()]
    assert sum(map(worth, answers[-256:])) / 256 > sum(map(worth, answers[:256])) / 256 + 1.5, "by the rule itself"


def rewarded_by_a_model(place: Workplace, *, steps: int, accuracy: float, rewarded_steps: int) -> RunView:
    """Return the run that the reward model rewards."""
    for name in ("reward_model.toml", "rewarded.toml", "preferences.jsonl"):
        place.write(name, (EXAMPLES / name).read_text(encoding="utf-8"))
    early = place.look("check", "rewarded.toml")
    assert early.code == 2
    assert "found no config.json" in early.out + early.err

    done = place.call("run", "reward_model.toml", *sets(f"run.steps={steps}"), "--json", timeout_s=2 * PATIENCE_S)
    assert done.code == 0, done.err
    view = place.view("runs/reward-model")
    metrics = {one.name.version: one.metrics for one in view.steps()}
    assert metrics[steps]["held_out_accuracy"] > accuracy
    assert metrics[steps]["held_out_margin"] > 0
    assert metrics[1]["loss"] == pytest.approx(0.693, abs=1e-3)
    assert view.audit().fine
    again = place.look("replay", "runs/reward-model", "--json")
    assert again.code == 0, again.out
    assert again.result["equal"]

    rewarded = place.call("run", "rewarded.toml", *sets(f"run.steps={rewarded_steps}"), "--json",
                          timeout_s=2 * PATIENCE_S)  # fmt: skip
    assert rewarded.code == 0, rewarded.err
    view = place.view("runs/rewarded")
    assert view.audit().fine
    place.assert_nobody_left()
    return view
