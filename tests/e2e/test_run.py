"""Whole runs by the command: from the run file to `final/`, stopped and gone on with, ended by each of its rules."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rftstream.contracts.topics import TOPICS
from rftstream.weights.snapshot import decode_snapshot, state_digest
from tests.e2e.workplace import EXAMPLES, FAKE, Workplace, sets
from tests.flow.test_replay import change_a_byte

SETTLED = {"run_dir", "steps", "version", "reward_first", "reward_last", "wall_s", "reason"}
"""Keys of `run --json` that scripts rely on."""

SHORT = (
    "run.steps=8", "feeder.groups_per_batch=4", "feeder.group_size=4", "evaluations.sums.every=4",
    "evaluations.sums.num_tasks=5", "trainer.checkpoint_every=3",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ a real model


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_arithmetic_example_from_start_to_end(place: Workplace) -> None:
    done = place.call("run", EXAMPLES / "arithmetic.toml", "--run-dir", "arithmetic", "--json", *sets(*SHORT),
                      timeout_s=600)  # fmt: skip
    assert done.code == 0, done.err
    result = done.result
    assert set(result) >= SETTLED
    assert result["run_dir"] == str(place.folder / "arithmetic")
    assert (result["steps"], result["version"], result["reason"]) == (8, 8, "steps")
    assert 0 <= result["reward_first"] <= 1
    assert 0 <= result["reward_last"] <= 1
    assert result["wall_s"] > 0
    assert "step 8/8" in done.err, "plain lines, where stdout is for the result"
    place.assert_nobody_left()

    view = place.view("arithmetic")
    steps = view.steps()
    assert [step.name.version for step in steps] == list(range(1, 9))
    assert len(view.experiences()) == 8 * 16
    assert {rollout.status for rollout in view.rollouts()} <= {"completed", "truncated"}
    evaluated = [(one.name.version, one.num_tasks, one.num_samples) for one in view.messages("evals")]  # type: ignore[union-attr]
    assert evaluated == [(0, 5, 4), (4, 5, 4), (8, 5, 4)]
    final = Path(result["final"])
    assert state_digest(decode_snapshot((final / "model.safetensors").read_bytes(), where="final")) == (
        steps[-1].weights_digest
    )
    check_model_folder(final)
    check_commands(place, "arithmetic")
    check_replay(place, "arithmetic")
    refused = place.look("resume", "arithmetic", *sets("run.steps=10", "model.make.width=32"))
    assert refused.code == 2
    assert "another recipe: width 64 -> 32; take back the change" in refused.err


def check_model_folder(folder: Path) -> None:
    """It is an ordinary one: transformers loads it, and it answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "3+4="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"].shape == (1, 4)
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert answer.shape[1] in (5, 6)


def check_commands(place: Workplace, run: str) -> None:
    """`audit`, `inspect`, `status` and `plot` say what they are to say, with the settled keys."""
    audit = place.call("audit", run, "--json")
    assert audit.code == 0, audit.err
    (report,) = audit.lines
    assert report["balanced"] is True
    kinds = {"admitted", "pending", "pending_by_stage", "trained", "expired", "filtered", "dead"}
    for counted, number in (("groups", 8 * 4), ("rollouts", 8 * 16)):
        assert set(report[counted]) == kinds
        assert report[counted]["trained"] == number
        left = sum(report[counted][kind] for kind in kinds - {"admitted", "pending_by_stage"})
        assert report[counted]["admitted"] == left
    assert report["twins"]
    assert not any(report["twins"].values())
    assert set(report["lengths"]["trained"]) == {"count", "mean", "p50", "p95"}
    assert report["lengths"]["trained"]["count"] == 128
    assert place.look("audit", run).out.startswith("balanced: admitted = pending + trained")

    seen = {topic: place.look("inspect", run, topic, "--json", "--last", "20").lines for topic in TOPICS}
    for topic in ("tasks", "rollouts", "verified", "batches", "outcomes", "weights", "steps", "evals", "control"):
        assert seen[topic], topic
        for record in seen[topic]:
            assert {"topic", "partition", "offset", "key", "headers", "message"} <= set(record)
            assert "error" not in record
    rollout = seen["rollouts"][-1]["message"]
    (segment,) = rollout["segments"]
    assert len(segment["token_ids"]["values"]) == len(segment["behavior_logprobs"]["values"])
    assert sum(segment["loss_mask"]["values"]) == rollout["num_tokens"]
    assert all(logprob <= 0 for logprob in segment["behavior_logprobs"]["values"])

    (status,) = place.look("status", run, "--json").lines
    assert (status["run"], status["state"], status["version"]) == ("arithmetic", "finished", 8)
    (plots,) = place.look("plot", run, "--json").lines
    for file in plots["files"]:
        assert Path(file).read_bytes().startswith(b"\x89PNG"), file
    (runs,) = place.look("list", "runs", "--folder", ".", "--json").lines
    assert [(one["run"], one["version"]) for one in runs] == [(run, 8)]


def check_replay(place: Workplace, run: str) -> None:
    """All digests are equal; with one byte of one recorded batch changed the step is named."""
    again = place.look("replay", run, "--json")
    assert again.code == 0, again.out
    assert again.result["equal"]
    assert (again.result["num_batches"], again.result["num_digests"], again.result["not_promised"]) == (8, 9, [])
    shutil.copytree(place.folder / run, place.folder / "damaged")
    change_a_byte(place.folder / "damaged" / "log", 5, Random(0))
    damaged = place.look("replay", "damaged", "--from", "3")
    assert damaged.code == 1
    assert "FIRST DIFFERENCE at version 6 (batch 5): batch: recorded trained, replayed batches[0]@" in damaged.out
    shutil.rmtree(place.folder / "damaged")


# ------------------------------------------------------------------------------------------------ run files


@pytest.mark.sampled(2, "run")
def test_a_second_run_gets_a_folder_of_its_own_and_lines_are_plain(place: Workplace, finished_run: Path) -> None:
    told = place.call("run", "tiny.toml")
    assert told.code == 0, told.err
    assert "\x1b" not in told.out, "no terminal, no control sequences"
    lines = told.out.splitlines()
    assert lines[0] == "a new run in runs/tiny-2: those of this name before it have ended"
    assert lines[1].startswith("step 0/6")
    assert any(line.startswith("step 6/6  reward ") for line in lines)
    assert "the model is in runs/tiny-2/final" in told.out
    for folder in (finished_run, finished_run.with_name("tiny-2")):
        assert place.view(folder).assert_nothing_lost().version == 6
    assert place.look("status", "tiny.toml").out.startswith("tiny-2"), "a run file means its newest run"


@pytest.mark.sampled(2, "run")
def test_a_terminal_gets_a_live_view(place: Workplace) -> None:
    ours, theirs = pty.openpty()
    run = place.start("run", "tiny.toml", stdout=theirs, stderr=theirs, env={"TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    seen = b""
    while run.alive or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # nobody holds the other end any more
                break
    os.close(ours)
    assert run.finish().code == 0, seen.decode()
    text = seen.decode()
    assert "\x1b[" in text, "drawn anew in place"
    for word in ("step 6", "reward", "workers", "trainer-0", "loading", "the model is in runs/tiny/final"):
        assert word in text


@pytest.mark.sampled(2, "run")
def test_overlays_the_environment_and_set_in_their_order(place: Workplace) -> None:
    base = place.write("base.toml", FAKE.replace("steps = 6", "steps = 9"))
    more = place.write("more.toml", '[run]\nname = "overlaid"\nsteps = 8\n[feeder]\ngroup_size = 2\n')
    env = {
        "RFTSTREAM_CONFIG": os.pathsep.join([str(base), str(more)]),
        "RFTSTREAM__RUN__STEPS": "7",
        "RFTSTREAM__FEEDER__GROUPS_PER_BATCH": "3",
    }
    done = place.call("run", "--json", "--set", "run.steps=2", env=env)
    assert done.code == 0, done.err
    assert done.result["run_dir"] == str(place.folder / "runs" / "overlaid")
    assert done.result["steps"] == 2, "--set wins over the environment, which wins over the files"
    view = place.view("runs/overlaid")
    assert {rollout.ids.group_size for rollout in view.rollouts()} == {2}, "the later file wins"
    assert {manifest.num_groups for manifest in view.manifests()[:2]} == {3}, "the environment wins over the files"
    worker = place.call("worker", "--role", "explorer", "--wait-s", "0.2", env=env)
    assert worker.code == 3, "a whole command, which waits for a run that is not finished"
    assert "waited 0.2 s for a run of" in worker.err


@pytest.mark.sampled(2, "run")
def test_from_python_until_the_reward_is_reached(place: Workplace) -> None:
    script = place.write(
        "mine.py",
        """
import json
import rftstream

reward = ["run.steps=4000", "run.stop_reward=0.4", "run.stop_reward_over=3", "backends.fake.start_skill=1"]
config = rftstream.load_config(["tiny.toml"], sets=reward)
result = rftstream.run(config, run_dir="mine", progress="none")
assert result.final is not None and (result.final / "model.safetensors").is_file()
print(json.dumps(result.to_dict()))
""",
    )
    done = place.call(script, command=[sys.executable])
    assert done.code == 0, done.err
    assert (done.result["reason"], done.result["exit_code"]) == ("reward", 0)
    view = place.view("mine")
    curve = view.curve()
    assert sum(curve.rewards()[-3:]) / 3 >= 0.4
    assert view.assert_nothing_lost().version == curve.num_steps == done.result["steps"] < 4000
    place.assert_nobody_left()


# ------------------------------------------------------------------------------------------------ stopping


@pytest.mark.law("lost", "twice")
def test_ctrl_c_stops_cleanly_and_resume_goes_on_to_the_end(place: Workplace) -> None:
    slow = sets("policies.fake.tokens_per_s=40", "policies.fake.mean_tokens=6", "run.steps=100000")
    run = place.start("run", "tiny.toml", "--json", *slow)
    view = place.view("runs/tiny")
    by_hand = place.start("worker", "tiny.toml", "--role", "explorer", "--process", "mine")
    place.wait_for(lambda: "owns 2 partitions" in view.log_of("mine"), "a share of the work")
    sampled = len(view.rollouts())
    place.wait_for(lambda: len(view.rollouts()) > sampled + 6, "some work of both explorers")
    by_hand.send(signal.SIGTERM)
    left = by_hand.finish()
    assert left.code == 0, left.err
    assert "stopping: finishing what is in hand" in left.err
    assert "left: stopped" in left.err

    place.wait_for(lambda: view.curve().version >= 3, "three steps")
    run.send(signal.SIGINT)
    stopped = run.finish()
    assert stopped.code == 0, stopped.err
    assert (stopped.result["reason"], stopped.result["error"]) == ("interrupted", None)
    assert 3 <= stopped.result["steps"] < 100000
    place.assert_nobody_left()
    for name in ("explorer-0", "verifier-0", "trainer-0"):
        assert "left: stopped" in view.log_of(name)
        assert "a successor does the rest" not in view.log_of(name), "what waits for weights is given back"
    before = view.assert_nothing_lost()
    assert before.groups.trained == 2 * before.version

    end = before.version + 4
    resumed = place.call("resume", "runs/tiny", "--json", *sets(f"run.steps={end}", "policies.fake.tokens_per_s=0"))
    assert resumed.code == 0, resumed.err
    assert (resumed.result["steps"], resumed.result["version"], resumed.result["reason"]) == (end, end, "steps")
    after = view.assert_nothing_lost()
    assert after.groups.trained == 2 * end
    assert after.groups.admitted >= before.groups.admitted, "what was on its way is still there"
    trained = [one.ids.rollout_id for one in view.experiences() if one.batch_sequence < end]
    assert len(trained) == len(set(trained)) == 6 * end
    nothing = place.look("resume", "runs/tiny")
    assert nothing.code == 2
    assert f"runs/tiny: is finished with {end} of {end} steps; give more" in nothing.err


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.sampled(2, "run")
def test_a_run_ends_with_its_taskset_and_a_short_batch(place: Workplace) -> None:
    """By steps and by the reward others end here, after their time in tests/flow/test_trainer.py."""
    place.write("tiny.toml", FAKE.replace("steps = 6\n", ""))
    done = place.call("run", "tiny.toml", "--json", *sets("tasksets.sums.passes=1", "tasksets.sums.options.size=7"))
    assert done.code == 0, done.err
    assert (done.result["reason"], done.result["steps"]) == ("taskset", 4)
    assert Path(done.result["final"]).is_dir()
    view = place.view("runs/tiny")
    assert [manifest.num_groups for manifest in view.manifests()] == [2, 2, 2, 1], "the last batch is short"
    assert [manifest.last for manifest in view.manifests()] == [False, False, False, True]
    assert view.assert_nothing_lost().groups.trained == 7
    more = place.call("resume", "runs/tiny", "--json", *sets("tasksets.sums.passes=2"))
    assert more.code == 0, more.err
    assert (more.result["reason"], view.assert_nothing_lost().groups.trained) == ("taskset", 14)
