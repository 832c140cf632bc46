"""Bad input: each is told in one clear line with the right exit code, and nothing of the run is lost for it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rftstream.config.sections import MakeModel, ModelSection
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.models.folders.folder import prepare_model
from tests.e2e.played import play
from tests.e2e.workplace import COMMAND, FAKE, Finished, Workplace, sets

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
FROM_FILE = FAKE.replace('source = "arithmetic"', 'source = "jsonl:sums.jsonl"').replace("steps = 6\n", "")


def refused(done: Finished, *words: str, code: int = 2) -> None:
    """Ended with the code and one line that says all of it."""
    assert done.code == code, f"{done.code}: {done.out}{done.err}"
    lines = [line for line in done.err.splitlines() if line.startswith("rftstream: ")]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in lines[0]


# ------------------------------------------------------------------------------------------------ the run file


SPOILT = "class Broken(:\n    pass\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny.toml", *sets("trainer.lrr=1")], ["trainer.lrr: unknown key", "did you mean 'lr'?"]),
        (["nowhere.toml"], ["nowhere.toml: no such file"]),
        (["broken.toml"], ["broken.toml: line 2: run.name", "not TOML"]),
        (["tiny.toml", *sets("policies.fake.tokens_per_sec=1")],
         ["policies.fake.tokens_per_sec: unknown key", "'tokens_per_s'"]),
        (["tiny.toml", *sets("trainer.backend=spoilt_part:Broken")],
         ["importing 'spoilt_part:Broken' failed: SyntaxError", "spoilt_part.py, line 1"]),
        (["tiny.toml", *sets("explorer.policy=empty_part:Policy")], ["module 'empty_part' has no 'Policy'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_made(
    place: Workplace, arguments: list[str], words: list[str]
) -> None:
    place.write("broken.toml", "[run]\nname = tiny\n")
    place.write("spoilt_part.py", SPOILT)
    place.write("empty_part.py", "")
    done = place.look("run", *arguments, "--json")
    refused(done, *words)
    assert not done.out, "there is no run, and so no result"
    assert not (place.folder / "runs").exists()


@pytest.mark.sampled(1, "bad-input")
@pytest.mark.law("lost")
def test_a_reward_that_cannot_be_built_ends_the_run_at_once_and_what_was_sampled_is_kept(place: Workplace) -> None:
    place.write("mine.py", SPOILT)
    assert place.look("run", "tiny.toml", "--no-workers", *sets("tasksets.sums.reward=mine:score")).code == 0
    view = place.view("runs/tiny")
    play(view, "feeder", "explorer", "trainer", until=lambda: len(view.rollouts()) >= 12)
    sampled = {one.ids.rollout_id for one in view.rollouts()}
    for reward, words in (
        ("mine:score", ["importing 'mine:score' failed: SyntaxError", "mine.py, line 1"]),
        ("absent:score", ["cannot import 'absent:score': no module named 'absent'"]),
    ):
        done = place.call("resume", "runs/tiny", "--json", *sets(f"tasksets.sums.reward={reward}"))
        refused(done, "tasksets.sums.reward: ", *words)
        assert "starting again" not in done.err
        place.assert_nobody_left()
    resumed = place.call("resume", "runs/tiny", *sets("tasksets.sums.reward=exact"))
    assert resumed.code == 0, resumed.err
    assert view.assert_nothing_lost().version == 6
    assert sampled <= {one.ids.rollout_id for one in view.verified() if one.verdict is not None}


# ------------------------------------------------------------------------------------------------ tasksets


@pytest.mark.sampled(1, "bad-input")
def test_prompts_longer_than_the_context(place: Workplace) -> None:
    """They are refused, then the same run goes on without them."""
    place.write("tiny.toml", FROM_FILE)
    rows = [*SUMS[:7], {"prompt": "what is the sum of 1 and 2, please: 1+2=", "answer": "3"}, SUMS[7]]
    place.write_lines("sums.jsonl", rows)
    settings = sets(
        "model.context=16", "tasksets.sums.passes=1", "tasksets.sums.shuffle=false", "sampling.max_tokens=4"
    )
    said = "has a prompt of 40 tokens, expected fewer than the context of 16"
    checked = place.look("check", "tiny.toml", *settings)
    assert checked.code == 2
    assert f"tasksets.sums: problem 7 (sums.jsonl:8) {said}" in checked.out
    done = place.call("run", "tiny.toml", "--json", *settings)
    refused(done, f"tasksets.sums: problem 7 {said}", "set too_long to 'skip' or 'truncate'")
    view = place.view("runs/tiny")
    view.assert_nothing_lost()

    skipped = place.call("resume", "runs/tiny", "--json", *sets("tasksets.sums.too_long=skip"))
    assert skipped.code == 0, skipped.err
    assert skipped.result["reason"] == "taskset"
    assert view.assert_nothing_lost().groups.trained == 8
    assert json.loads(place.look("status", "runs/tiny", "--json").out)["left_out"] == 1


# ------------------------------------------------------------------------------------------------ rewards

REWARD = '''
import os
import time


def score(completion, answer, how):
    """`how` is a column of the taskset."""
    if how == "raises" or (how == "raises for wrong ones" and completion.strip() != answer):
        raise ValueError(f"cannot judge {completion!r}")
    if how == "hangs":
        time.sleep(600)
    if how == "crashes":
        os._exit(7)
    return float(completion.strip() == answer)
'''


@pytest.mark.law("unscorable")
def test_what_cannot_be_scored_is_dead_with_its_reason_and_never_zero(place: Workplace) -> None:
    hows = ["raises", "hangs", "crashes", *["raises for wrong ones"] * 4, "works"]
    place.write("tiny.toml", FROM_FILE)
    place.write("mine.py", REWARD)
    place.write_lines("sums.jsonl", [{**row, "how": how} for row, how in zip(SUMS, hows, strict=False)])
    done = place.call(
        "run", "tiny.toml", "--json",
        *sets("tasksets.sums.passes=1", "tasksets.sums.reward=mine:score", "verifier.timeout_s=1", "verifier.tries=2",
              "feeder.group_size=3", "feeder.max_staleness=4", "policies.fake.answer_depends_on=task",
              "policies.fake.right_share=0.4", "verifier.processes=2"),
    )  # fmt: skip
    assert done.code == 0, done.err
    view = place.view("runs/tiny")
    report = view.assert_nothing_lost()

    by_how: dict[str, list[VerifiedRollout]] = {how: [] for how in hows}
    for one in view.verified():
        assert one.rollout is not None
        assert one.rollout.problem is not None
        by_how[one.rollout.problem.info["how"]].append(one)
    for how, reason in (("raises", "error"), ("hangs", "timeout"), ("crashes", "error")):
        assert len(by_how[how]) == 3
        assert {str(one.reason) for one in by_how[how]} == {reason}
        assert [one.verdict for one in by_how[how]] == [None] * 3, "not a reward of 0"
    assert "cannot judge" in (by_how["raises"][0].detail or "")
    wrong = [one for one in by_how["raises for wrong ones"] if one.verdict is None]
    right = [one for one in by_how["raises for wrong ones"] if one.verdict is not None]
    assert wrong, "this seed has some of each"
    assert {one.verdict.reward for one in right if one.verdict} == {1.0}
    assert all(one.verdict is not None for one in by_how["works"])

    unscored = {one.ids.rollout_id for one in view.verified() if one.verdict is None}
    letters = view.dead()
    assert Counter(letter.reason for letter in letters) == {"error": 6 + len(wrong), "timeout": 3}
    assert {letter.key.decode() for letter in letters if letter.key} == unscored
    assert {(letter.topic, letter.role, letter.tries) for letter in letters} == {("rollouts", "verifier", 2)}

    scored = Counter(one.ids.group_id for one in view.verified() if one.verdict is not None)
    for outcome in view.outcomes():
        enough = scored[outcome.group_id] >= 2
        assert outcome.result == ("batched" if enough else "dead")
        assert outcome.reason == ("complete" if enough else outcome.reason)
        assert enough or outcome.reason.startswith("unscorable: ")
    wrong_in_batches = sum(scored[one.ids.group_id] >= 2 for one in wrong)
    assert report.groups.dead == sum(one.result == "dead" for one in view.outcomes()) > 3
    assert report.rollouts.dead == 3 * report.groups.dead + wrong_in_batches
    assert not unscored & {one.ids.rollout_id for one in view.experiences()}, "nothing unscored is trained on"


# ------------------------------------------------------------------------------------------------ a full disk

LIMIT_KIB = 2048


def with_little_room(*command: str) -> list[str]:
    """No file may grow beyond the limit: for SQLite the same as a full disk."""
    return ["bash", "-c", f'ulimit -S -f {LIMIT_KIB}; exec "$0" "$@"', *command]


@pytest.mark.sampled(1, "full-disk")
@pytest.mark.law("lost")
def test_a_run_that_was_stopped_on_a_full_disk_can_be_resumed(place: Workplace) -> None:
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=60"), command=with_little_room(COMMAND))
    view = place.view("runs/tiny")
    place.wait_for(lambda: "no room" in run.err, "a word where people look")
    run.send(signal.SIGINT)
    place.wait_for(lambda: "ctrl-C again ends it at once" in run.err, "an answer")
    run.send(signal.SIGINT)
    stopped = run.finish()
    assert stopped.result["reason"] == "interrupted"
    place.assert_nobody_left()
    view.assert_nothing_lost()
    done = place.call("resume", "runs/tiny", "--json")
    assert done.code == 0, done.err
    assert view.assert_nothing_lost().groups.trained == 120


@pytest.fixture
def small_disk(tmp_path: Path, place: Workplace) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        place.end()
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.sampled(1, "full-disk")
def test_a_small_file_system_runs_full_and_is_made_larger(place: Workplace, small_disk: Path) -> None:
    """Weights, checkpoints and logs have no room either."""
    run = place.start("run", "tiny.toml", "--run-dir", small_disk / "run", "--json", *sets("run.steps=60"))
    view = place.view(small_disk / "run")
    place.wait_for(lambda: "no room" in run.err or "No space" in run.err, "a word where people look")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    done = run.finish()
    assert done.code == 0, done.err
    assert view.assert_nothing_lost().groups.trained == 120


# ------------------------------------------------------------------------------------------------ run folders


@pytest.mark.sampled(1, "bad-input")
def test_a_resume_with_other_data_is_refused_with_the_difference(place: Workplace) -> None:
    place.write("tiny.toml", FROM_FILE)
    place.write_lines("sums.jsonl", SUMS)
    assert place.look("run", "tiny.toml", "--no-workers", *sets("run.steps=2")).code == 0
    view = place.view("runs/tiny")
    play(view, "feeder", until=lambda: view.control().manifest is not None)
    before = (place.folder / "runs/tiny/config.toml").read_bytes()

    def resume(*assignments: str) -> Finished:
        return place.look("resume", "runs/tiny", *sets("run.steps=4", *assignments))

    refused(resume("tasksets.sums.columns.prompt=answer"), "tasksets.sums.columns.prompt unset -> 'answer'")
    refused(resume("tasksets.more.source=arithmetic"), "taskset.more", "tasksets.more.source unset -> 'arithmetic'")
    refused(resume("run.seed=1"), "run.seed 0 -> 1")
    refused(resume("transport.partitions=8"), "transport.partitions 4 -> 8")
    model = make_model(place)
    refused(resume(f"model.path={model}"), "another model: model.path 'fake' -> ", str(model))
    place.write_lines("sums.jsonl", SUMS[1:])
    refused(
        resume(), "taskset.sums: same settings, other data", "rescore runs/tiny --new-answers --into", "model.init_from"
    )
    place.write_lines("more.jsonl", SUMS[1:])
    moved = resume("tasksets.sums.source=jsonl:more.jsonl")
    refused(moved, "taskset.sums: other data in 'jsonl:", "more.jsonl' than in 'jsonl:", "sums.jsonl'; take")
    place.write_lines("sums.jsonl", SUMS)
    assert (place.folder / "runs/tiny/config.toml").read_bytes() == before, "what was refused changed nothing"
    assert place.call("resume", "runs/tiny", *sets("run.steps=4", "trainer.lr=1e-5")).code == 0
    assert view.assert_nothing_lost().version == 4


def make_model(place: Workplace) -> Path:
    return prepare_model(ModelSection(make=MakeModel()), place.folder / "model", 0).folder


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.law("lost", "fencing")
def test_a_live_run_cannot_be_run_twice_and_stray_workers_do_not_harm_it(place: Workplace) -> None:
    run = place.start("run", "tiny.toml", *sets("run.steps=100000", "backends.fake.step_s=0.05"))
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 1, "a step")
    refused(place.look("run", "tiny.toml"), "runs/tiny: this run is live", "--run-dir")
    refused(place.look("run", "tiny.toml", "--run-dir", "runs/tiny"), "this run is live")
    refused(place.look("resume", "runs/tiny"), f"this run is live, held by process {run.pid}")
    refused(place.look("worker", "tiny.toml", "--role", "explorr"), "did you mean 'explorer'?")
    with listening() as port:
        done = place.call("worker", "tiny.toml", "--role", "explorer", "--process", "mine", "--metrics-port", str(port))
    assert done.code == 2
    assert f"--metrics-port {port}: Address already in use; take another port" in done.err
    assert "Traceback" not in done.err
    assert run.alive
    version = view.curve().version
    place.wait_for(lambda: view.curve().version > version, "another step, for all that")
    run.send(signal.SIGINT)
    assert run.finish().code == 0
    refused(place.look("run", "tiny.toml"), "neither ended nor is anybody running it", "rftstream resume runs/tiny")
    view.assert_nothing_lost()


def test_a_run_folder_that_cannot_be_written(place: Workplace) -> None:
    place.write("taken", "a file")
    for arguments, why in (
        (["--run-dir", "taken"], "File exists"),
        (["--run-dir", "taken/run"], "Not a directory"),
        (["--run-dir", "/proc/run"], "No such file or directory"),
    ):
        refused(place.look("run", "tiny.toml", *arguments), f"{why}, expected a run folder that can be written")
    refused(place.look("run", "tiny.toml", *sets("run.folder=taken")), "run.folder: ", "(Not a directory), expected")


def test_a_file_system_that_cannot_be_written(place: Workplace, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = place.look("run", "tiny.toml", "--run-dir", small_disk / "run")
    refused(done, "Read-only file system, expected a run folder that can be written")


def test_a_missing_or_damaged_log(place: Workplace, finished_run: Path) -> None:
    log = finished_run / "log/log.sqlite"
    whole = log.read_bytes()
    shutil.rmtree(log.parent)
    absent = "log.sqlite: no log there, an existing one was expected"
    for command in (("audit",), ("status",), ("inspect", "steps"), ("resume", "--set", "run.steps=8")):
        refused(place.look(command[0], "runs/tiny", *command[1:]), absent)
    refused(place.look("audit", "nowhere"), "nowhere: no such file")
    place.write("empty/nothing.txt", "")
    refused(place.look("audit", "empty"), "no config.toml in it, so it is not a run folder")

    log.parent.mkdir()
    log.write_bytes(b"not a log at all" + whole[16:])
    refused(place.look("audit", "runs/tiny"), "a log of rftstream was expected")
    log.write_bytes(whole[: len(whole) // 2])
    refused(place.look("resume", "runs/tiny", *sets("run.steps=8")), "malformed")
    damaged = bytearray(whole)
    damaged[4 * 8192 :] = bytes(len(whole) - 4 * 8192)
    log.write_bytes(damaged)
    refused(place.look("audit", "runs/tiny"), "check the disk", code=3)
    log.write_bytes(whole)
    assert place.look("audit", "runs/tiny").code == 0
