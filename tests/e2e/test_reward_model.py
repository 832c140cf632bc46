"""A reward model from pairs with a planted preference, and a policy that is rewarded by it: the two examples."""

from __future__ import annotations

import pytest

from tests.e2e.test_resume import PATIENCE_S
from tests.e2e.workplace import EXAMPLES, Workplace, sets

pytestmark = pytest.mark.slow


def worth(answer: str) -> int:
    """The rule behind the pairs: an even digit counts 1, an odd one -1."""
    return sum(1 if character in "02468" else -1 for character in answer if character.isdigit())


@pytest.mark.timeout(6 * PATIENCE_S)
def test_a_reward_model_from_pairs_rewards_a_policy(place: Workplace) -> None:
    for name in ("reward_model.toml", "rewarded.toml", "preferences.jsonl"):
        place.write(name, (EXAMPLES / name).read_text(encoding="utf-8"))

    early = place.call("check", "rewarded.toml", timeout_s=PATIENCE_S)
    assert early.code == 2
    assert "found no config.json" in early.out + early.err

    done = place.call("run", "reward_model.toml", "--json", timeout_s=2 * PATIENCE_S)
    assert done.code == 0, done.err
    view = place.view("runs/reward-model")
    steps = {one.name.version: one.metrics for one in view.steps()}
    assert steps[50]["held_out_accuracy"] > 0.95
    assert steps[50]["held_out_margin"] > 1
    assert steps[1]["loss"] == pytest.approx(0.693, abs=1e-3)
    assert view.audit().fine

    again = place.call("replay", "runs/reward-model", "--json", timeout_s=2 * PATIENCE_S)
    assert again.code == 0, again.out
    assert again.result["equal"]

    rewarded = place.call("run", "rewarded.toml", *sets("run.steps=25"), "--json", timeout_s=2 * PATIENCE_S)
    assert rewarded.code == 0, rewarded.err
    view = place.view("runs/rewarded")
    rewards = [one.metrics["reward"] for one in view.steps()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1
    answers = [one.turns[-1].content for one in view.rollouts()]
    assert sum(map(worth, answers[-256:])) / 256 > sum(map(worth, answers[:256])) / 256 + 1.5, "by the rule itself"
    assert view.audit().fine
    place.assert_nobody_left()
