"""The recorded batches of a run become a run of their own: under the same settings, under others, killed in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rftstream.faults import VARIABLE
from tests.e2e.test_resume import IN_TURNS, PATIENCE_S, WITHOUT_A_MODEL, digests, kill_all, wait_for_fault
from tests.e2e.workplace import Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]

PLAIN = """
from rftstream.algorithms.grpo import Grpo


class Flat(Grpo):
    \"\"\"Every rollout is as good as any other.\"\"\"

    def prepare(self, experiences, reference_rewards=None):
        rows, metrics = super().prepare(experiences, reference_rewards)
        for row in rows:
            row.advantages[:] = 1.0
        return rows, metrics
"""

EVALUATION = """
[evaluations.held-out]
source = "arithmetic"
every = 3
num_tasks = 5
n = 2
"""


@pytest.mark.sampled(3, "examples")
@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_real_model_gets_the_same_weights_again_and_others_under_other_settings(place: Workplace) -> None:
    place.write("turns.toml", IN_TURNS)
    place.write("losses.py", PLAIN)
    first = place.call("run", "turns.toml", "--json", timeout_s=PATIENCE_S)
    assert first.code == 0, first.err
    theirs = digests(place.view("runs/turns"))

    same = place.call("replay", "runs/turns", "--into", "runs/same", "--json", timeout_s=PATIENCE_S)
    assert same.code == 0, same.err
    assert (same.result["changed"], same.result["version"], same.result["reason"]) == ([], 7, "steps")
    assert Path(same.result["sampled_by"]).name == "turns"
    view = place.view("runs/same")
    assert digests(view) == theirs, "bit for bit"
    assert view.assert_nothing_lost().groups.trained == 14

    other = place.call("replay", "runs/turns", "--from", "3", "--algorithm", "losses:Flat",
                       *sets("trainer.lr=0.02"), "--into", "runs/other", "--json", timeout_s=PATIENCE_S)  # fmt: skip
    assert other.code == 0, other.err
    assert other.result["changed"] == ["trainer.algorithm 'grpo' -> 'losses:Flat'", "trainer.lr 0.01 -> 0.02"]
    assert (other.result["first"], other.result["num_batches"], other.result["version"]) == (3, 4, 7)
    view = place.view("runs/other")
    assert view.assert_nothing_lost().groups.trained == 14
    ours = digests(view)
    assert [ours[version] == theirs[version] for version in range(1, 8)] == [True] * 3 + [False] * 4

    again = place.look("replay", "runs/other", "--json")
    assert again.code == 0, again.out
    assert again.result["num_batches"] == 7, "the settings of each part are used again"
    place.assert_nobody_left()


@pytest.mark.sampled(5, "kills")
@pytest.mark.law("lost", "twice")
def test_killed_in_the_middle_it_goes_on_and_is_a_run_like_any_other(place: Workplace) -> None:
    place.write("turns.toml", WITHOUT_A_MODEL + EVALUATION)
    first = place.call("run", "turns.toml", "--json")
    assert first.code == 0, first.err
    source = place.view("runs/turns")
    slower = sets("backends.fake.step_s=0.01")
    command = ("replay", "runs/turns", "--from", "1", "--into", "runs/again", *slower)

    planned = place.look(*command, "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert (planned.result["num_batches"], planned.result["num_groups"], planned.result["num_rollouts"]) == (6, 12, 48)
    assert planned.result["changed"] == ["backends.fake.step_s unset -> 0.01"]
    assert not (place.folder / "runs" / "again").exists()

    killed = place.start(*command, "--progress", "none", env={VARIABLE: "trainer:object_written:5:stop"})
    view = place.view("runs/again")
    wait_for_fault(place, view, "trainer:object_written:5")
    assert view.curve().version in (4, 5)
    kill_all(place)
    killed.finish()
    done = place.call(*command, "--json")
    assert done.code == 0, done.err
    assert (done.result["version"], done.result["reason"]) == (7, "steps")
    assert digests(view) == digests(source)
    steps = [step.name for step in view.steps()]
    assert next(name.version for name in steps if name.trainer_epoch == 2) == 2
    assert [name.version for name in steps if name.trainer_epoch == 3] == list(range(4, 8)), "from its checkpoint of 3"
    assert view.assert_nothing_lost().groups.trained == 14
    assert {one.ids.rollout_id for one in view.rollouts()} <= {one.ids.rollout_id for one in source.rollouts()}

    before = view.records("control")
    assert place.look(*command, "--json").result["version"] == 7
    assert view.records("control") == before, "done again it changes nothing"
    status = place.look("status", "runs/again", "--json").result
    assert (status["state"], status["origin"]["versions"]) == ("finished", [1, 7])
    assert status["origin"]["changed"] == ["backends.fake.step_s unset -> 0.01"]
    rollout = view.experiences()[-1].ids.rollout_id
    told = place.look("trace", "runs/again", rollout).out
    assert f"made of {source.folder.path}  its batches from version 1 to 7, changed backends.fake.step_s" in told
    assert "of turns" in told
    assert "step 3/7" in told
    assert place.look("replay", "runs/again").code == 0
    evaluated = place.look("evaluate", "runs/again", "--version", "7", "--json")
    assert evaluated.code == 0, evaluated.err
    assert place.look("plot", "runs/again").code == 0
    place.assert_nobody_left()


def test_what_a_replay_cannot_change_is_refused(place: Workplace, finished_run: Path) -> None:
    into = ("replay", "runs/tiny", "--into", "runs/new")
    for change, said in {
        "sampling.temperature=0.5": "sampling.temperature: a replay trains what was recorded, which this cannot change",
        "tasksets.sums.reward=math": "`rftstream rescore` scores with another reward",
        "feeder.group_size=2": "feeder.group_size",
        "trainer.shares=2": "but not trainer.shares or transport.partitions",
        "explorer.count=2": "expected settings of trainer, stages, algorithms, backends",
        "transport.partitions=8": "records keep their partition",
        "trainer.algorithm=grop": "did you mean 'grpo'?",
        "trainer.lt=1": "trainer.lt: unknown key",
        "algorithms.grpo.clip_high=-1": "algorithms.grpo.clip_high",
    }.items():
        refused = place.look(*into, *sets(change))
        assert refused.code == 2, change
        assert said in refused.err, refused.err
    for more, said in {
        ("--from", "6"): "no batch lies between",
        ("--to", "7"): "expected 0 <= --from <= --to <= 6",
        ("--from", "3", "--set", "run.steps=3"): "run.steps: got 3, expected more than the 3 versions",
        ("--from", "2", "--set", "trainer.backend=torch"): "replay from version 0",
    }.items():
        refused = place.look(*into, *more)
        assert (refused.code, said in refused.err) == (2, True), refused.err
    assert not (place.folder / "runs" / "new").exists()
    for command in (("--set", "trainer.lr=1"), ("--algorithm", "grpo"), ("--dry-run",)):
        refused = place.look("replay", "runs/tiny", *command)
        assert (refused.code, "name the folder of a new run by --into" in refused.err) == (2, True)
    refused = place.look("replay", "runs/tiny", "--into", "runs/tiny")
    assert "is the run itself" in refused.err
    shutil.copytree(finished_run, finished_run.with_name("new"))
    assert "is another run" in place.look(*into).err
