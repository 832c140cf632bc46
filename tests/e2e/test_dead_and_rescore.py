"""Rewards that turn out wrong: mended and the dead put back, or replaced and yesterday's rollouts scored again."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("unscorable")]

BROKEN = """
from pathlib import Path


def score(completion, answer):
    if not Path(__file__).with_name("mended").exists():
        raise RuntimeError("the checker is down")
    return float(completion.strip() == answer)
"""

FLAT = '''
def score(completion, answer):
    """Says nothing about what is right."""
    return 0.5
'''


@pytest.mark.sampled(1, "dead")
@pytest.mark.law("lost", "twice")
def test_a_broken_reward_stops_the_run_and_after_the_mend_nothing_is_lost(place: Workplace) -> None:
    place.write("checks.py", BROKEN)
    reward = sets("tasksets.sums.reward=checks:score", "verifier.tries=1", "feeder.groups_per_batch=16")
    stopped = place.call("run", "tiny.toml", "--json", *reward)
    assert stopped.code == 6, stopped.err
    (line,) = [line for line in stopped.err.splitlines() if line.startswith("rftstream: ")]
    for words in ("200 of the last 200 rollouts could not be scored by score", "RuntimeError: the checker is down",
                  "Mend the reward, put back"):  # fmt: skip
        assert words in line
    assert (stopped.result["reason"], stopped.result["steps"]) == ("failed", 0)
    told = place.look("status", "runs/tiny", "--json").result["stopped"]
    assert (told["by"], told["error"]) == ("error", stopped.result["error"])
    assert "stopped by an error: verifier-0: " in place.look("list", "runs").out
    view = place.view("runs/tiny")
    before = view.assert_nothing_lost()
    assert stopped.result["dead_groups"] == before.groups.dead
    assert (
        "put back the groups that died (`rftstream dead retry runs/tiny --all`), then `rftstream resume runs/tiny`"
        in line
    )
    assert before.groups.trained == 0
    assert before.groups.dead > 40
    assert before.rollouts.pending > 0
    assert all(one.verdict is None for one in view.verified()), "not a reward of 0"

    listed = place.look("dead", "list", "runs/tiny", "--json").result
    assert [(one["reason"], one["role"], one["topic"]) for one in listed["letters"]] == [
        ("error", "verifier", "rollouts")
    ]
    assert listed["num_groups"] == {"dead": before.groups.dead}
    assert stopped.result["no_reward"] == sum(one["count"] for one in listed["letters"])
    assert "RuntimeError: the checker is down" in stopped.result["no_reward_why"]
    assert "the checker is down" in place.look("dead", "show", "runs/tiny", listed["newest"][0]["id"]).out

    place.write("mended", "")
    asked = place.look("dead", "retry", "runs/tiny", "--all", "--json").result
    assert len(asked["groups"]) == before.groups.dead
    assert asked["num_stored"] == before.rollouts.dead
    done = place.call("resume", "runs/tiny", "--json", *sets("run.steps=10"))
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["reason"]) == (10, "steps")
    after = view.assert_nothing_lost()
    assert done.result["dead_groups"] == after.groups.dead - before.groups.dead, "but for those put back"
    assert done.result["no_reward"] == 0, "what died before this command is no news"
    assert after.groups.dead >= before.groups.dead, "the first attempts stay what they are"
    assert after.groups.trained == 160
    trained = {one.ids.group_id for one in view.experiences() if one.batch_sequence < 10}
    retried = {group.rpartition("/")[0] + "/1" for group in asked["groups"]}
    assert retried <= trained
    sampled = Counter(one.ids.rollout_id for one in view.rollouts())
    assert set(sampled.values()) == {1}, "what was sampled before was scored now, not sampled again"
    groups = place.look("dead", "list", "runs/tiny", "--json").result["num_groups"]
    assert groups["put_back"] == before.groups.dead
    place.assert_nobody_left()


@pytest.mark.sampled(1, "dead")
def test_rollouts_are_scored_again_and_trained_from(place: Workplace) -> None:
    """The policy is told nothing and explores; scored with what is right, the same rollouts teach it."""
    place.write("flat_checks.py", FLAT)
    place.write("tiny.toml", FAKE + """
[backends.fake]
skill_rate = 4.0
[evaluations.held-out]
source = "arithmetic"
every = 10
num_tasks = 20
n = 2
""")  # fmt: skip
    size = sets("run.steps=10", "feeder.groups_per_batch=8")
    assert place.call("run", "tiny.toml", *size, *sets("tasksets.sums.reward=flat_checks:score")).code == 0
    first = place.view("runs/tiny")

    done = place.look("rescore", "runs/tiny", "--reward", "exact", "--into", "runs/again", "--json")
    assert done.code == 0, done.err
    table = done.result
    assert table["num_rollouts"] == len({one.ids.rollout_id for one in first.rollouts()}), "the others are skipped"
    assert table["num_both"] >= 240
    assert table["mean_old"] == 0.5
    assert (table["agreement"], table["correlation"]) == (0.0, None)
    assert {abs(one["new"] - one["old"]) for one in table["moved"]} == {0.5}
    again = place.view("runs/again")
    report = again.assert_nothing_lost()
    assert (report.groups.admitted, report.groups.trained) == (first.audit().groups.admitted, 0)
    lag = place.look("status", "runs/again", "--json").result["lag"]
    assert (lag["tasks"], lag["rollouts"]) == (0, 0)
    assert lag["verified"] > 0
    assert "no problem has rewards yet" in place.look("problems", "doubtful", "runs/again").out

    trained = place.call("resume", "runs/again", "--json")
    assert trained.code == 0, trained.err
    assert (trained.result["steps"], trained.result["reason"]) == (10, "steps")
    report = again.assert_nothing_lost()
    assert report.groups.trained == 80
    assert {one.ids.rollout_id for one in again.experiences()} <= {one.ids.rollout_id for one in first.rollouts()}
    means = [[one.metrics["mean"] for one in view.messages("evals")] for view in (first, again)]  # type: ignore[union-attr]
    assert means[1][-1] > means[1][0] + 0.2, "it learned from the scores that it was given later"
    assert means[1][-1] > means[0][-1]

    same = place.look("rescore", "runs/tiny", "--reward", "exact", "--into", "runs/again", "--json")
    assert same.result == table, "done again it changes nothing"
    place.write("late_checks.py", BROKEN)
    late = ("rescore", "runs/tiny", "--reward", "late_checks:score", *sets("verifier.max_dead_share=1"), "--into")
    failed = place.look(*late, "runs/late")
    assert failed.code == 0, failed.err
    assert failed.err.count("RuntimeError: the checker is down") <= 3, f"told once, and counted: {failed.err}"
    assert " of them without a reward, error: RuntimeError: the checker is down" in failed.err
    assert "rewards/functions.py" not in failed.err
    assert "train from it with: rftstream resume runs/late --set trainer.algorithm=topr\n(topr, since" in failed.out
    place.write("late_checks.py", FLAT)
    mended = place.look(*late, "runs/late")
    assert mended.code == 2
    assert "was begun with scorer of sums -> score " in mended.err
    assert "take another folder" in mended.err
    several = '[{ name = "late_checks:score" }, { name = "exact", weight = 0.5 }]'
    later = place.look("rescore", "runs/tiny", "--reward", several, "--new-answers", "--into", "runs/later")
    assert later.code == 0 and "sums: 0 of " in later.err, later.err
    once_more = place.look("rescore", "runs/tiny", "--into", "runs/flat")  # the run's own reward
    assert "has scored all of tiny, too: nothing can change" in once_more.err
    other = place.look("rescore", "runs/tiny", "--reward", "flat_checks:score", "--into", "runs/again")
    assert other.code == 2
    assert "was begun with other settings: tasksets.sums.reward" in other.err
    bounded = ("rescore", "runs/tiny", "--reward", "exact", "--into", "runs/again", *sets("verifier.timeout_s=5"))
    other = place.look(*bounded)
    assert other.code == 2
    assert "was begun with other settings: verifier.timeout_s 10.0 -> 5.0; take the same ones" in other.err
    nothing = place.call("resume", "runs/again", *sets("run.steps=1000"))
    assert nothing.code == 0, nothing.err
    assert again.audit().groups.pending == 0, "what was pending in the first run was skipped, and is dead here"
    assert "has trained all that was imported" in place.look("resume", "runs/again", *sets("run.steps=2000")).err
    place.assert_nobody_left()
