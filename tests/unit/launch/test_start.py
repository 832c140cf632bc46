"""Whole runs as processes, with parts that need no model; and what comes before one begins or goes on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import rftstream
from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunFinished
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.launch import session, start
from rftstream.preflight import folder_choice
from rftstream.preflight.checks.check_rewards import LOOKED_AT
from rftstream.queries.reference import listing
from rftstream.queries.state.elsewhere import held_elsewhere
from rftstream.runs.folder import RunFolder, open_transport, shown_path
from rftstream.runs.making import create
from rftstream.runs.writes.additions import commit_once
from rftstream.service.control_view import read_control
from rftstream.service.role_claim import new_claim
from tests.unit.tiny_run import RUN_FILE, make_run, write_run_file
from tests.waiting import wait_until


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and process.pid != os.getpid():
            found.append(line)
    return found


# ------------------------------------------------------------------------------------------------ whole runs


def test_python_names_a_run_file_and_changes_settings_as_the_commands_do(run_file: Path) -> None:
    assert rftstream.load_config(run_file) == rftstream.load_config(str(run_file)) == rftstream.load_config([run_file])
    config = rftstream.load_config(run_file, sets=["run.name=other"])
    assert config.run.name == "other"
    with pytest.raises(ConfigError, match=r"--set trainer.ler: unknown key; did you mean 'lr'"):
        rftstream.run(run_file, set={"trainer.ler": 1e-3})
    given = {"run.folder": Path("ü\U0001f600"), "tasksets.sums.options": {"high": 3}}
    config = rftstream.load_config(run_file, sets=start.as_sets(given))
    assert (config.run.folder, config.tasksets["sums"].options) == ("ü\U0001f600", {"high": 3})
    with pytest.raises(ConfigError, match="set: got a RunConfig, expected a run file"):
        rftstream.run(config, set={"trainer.lr": 1e-3})
    missing = run_file.with_name(f"{run_file.stem}s.toml")
    with pytest.raises(ConfigError, match=f"{missing.name}: no such file; .*; did you mean {run_file.name}?"):
        rftstream.run(missing)


@pytest.mark.sampled(2, "start")
@pytest.mark.slow
def test_a_run_ends_by_itself_and_can_be_given_more_steps(run_file: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = io.StringIO()
    sets = ["trackers.tensorboard=board", "evaluations.held.source=arithmetic", "evaluations.held.every=2"]
    result = rftstream.run(run_file, set=sets, stream=out)
    folder = RunFolder(tmp_path / "runs" / "tiny")
    assert (result.run_dir, result.steps, result.version, result.reason, result.exit_code) == (
        folder.path, 4, 4, "steps", 0
    )  # fmt: skip
    assert result.final == folder.final
    assert result.reward_first is not None
    assert result.reward_last is not None
    assert "step 4/4" in out.getvalue()
    assert processes_of(tmp_path) == []
    assert json.dumps(result.to_dict())

    with pytest.raises(ConfigError, match=r"is finished with 4 of 4 steps; give more, e\.g\. --set run\.steps=8"):
        start.resume(folder.path, stream=out)
    before = folder.config_file.read_text()
    with pytest.raises(ConfigError, match=r"keeps its model.*transport\.partitions 2 -> 4"):
        start.resume(folder.path, sets=["run.steps=6", "transport.partitions=4"], stream=out)
    with pytest.raises(ConfigError, match=r"another taskset\.sums: tasksets\.sums\.options\.high unset -> 3"):
        start.resume(folder.path, sets=["run.steps=6", "tasksets.sums.options.high=3"], stream=out)
    with pytest.raises(ConfigError, match=r"run\.folder: got 'elsewhere', but the run lies in .*runs/tiny and goes on"):
        start.resume(folder.path, sets=["run.steps=6", "run.folder=elsewhere"], stream=out)
    assert folder.config_file.read_text() == before, "what was refused changed nothing"

    more = start.resume(folder.path, sets=["run.steps=6", "trainer.lr=1e-5"], stream=out)
    assert (more.steps, more.reason, more.run_dir) == (6, "steps", folder.path)
    assert "changed: trainer.lr 1e-06 -> 1e-05 (what is learned changes)" in out.getvalue()
    assert "changed: learning rate 1e-06 at the last step, 1e-05 at the next (trainer.lr_schedule " in out.getvalue()
    evaluated = re.findall(r"^evaluation held of version (\d+):", out.getvalue(), re.MULTILINE)
    assert set(evaluated) >= {"2", "4", "6"} and len(evaluated) == len(set(evaluated)), "each is said once"
    board = EventAccumulator(str(folder.path / "board"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/reward")] == [1, 2, 3, 4, 5, 6]

    assert "a new run in" not in out.getvalue()
    another = rftstream.run(loader.load([run_file], sets=["run.steps=1"]), progress="none", stream=out)
    assert another.run_dir == tmp_path / "runs" / "tiny-2"
    assert f"a new run in {another.run_dir}: those of this name before it have ended" in out.getvalue()


def test_a_run_that_was_moved_with_its_file_keeps_the_folder_of_its_paths(run_file: Path) -> None:
    config = loader.load([run_file])
    (line, *_) = start.not_taken([run_file], loader.replace(config, base="/old"), [])
    assert line.endswith(f": the folder of relative paths '/old' -> {config.base!r}"), line


@pytest.mark.sampled(2, "start")
@pytest.mark.slow
def test_resume_says_what_it_does_not_take_and_what_code_has_changed(run_file: Path, tmp_path: Path) -> None:
    reward = tmp_path / "own_launch_rewards.py"
    reward.write_text("def score(completion):\n    return 0.5\n")
    text = RUN_FILE.replace("steps = 4", "steps = 2") + '[tasksets.sums]\nreward = "own_launch_rewards:score"\n'
    text = text.replace('[tasksets.sums]\nsource = "arithmetic"\n', "", 1).replace(
        "reward =", 'source = "arithmetic"\nreward ='
    )
    run_file.write_text(text)
    folder, _ = start.create(run_file)
    claim = Claim(role="feeder", epoch=1, host="gpu-1", pid=1, process="feeder-0", claimed_at=time.time())
    imported = new_claim("buffer", 1, process="replay", now=time.time())
    config = loader.load([run_file])
    with closing(open_transport(config, folder)) as transport:
        commit_once(transport, "tiny.feeder", [codec.to_record(imported, "control", 0, run="tiny")])
        assert held_elsewhere(config, transport) == [], "who made the run here is nobody elsewhere"
        commit_once(transport, "tiny.feeder", [codec.to_record(claim, "control", 0, run="tiny")])
    run_file.write_text(text.replace("[trainer]", "[trainer]\nlr = 0.25"))
    (layer := tmp_path / "more.toml").write_text("[run]\nsteps = 9\n")
    reward.write_text("def score(completion):\n    return 0.75\n")
    said = io.StringIO()
    result = start.resume(run_file, layers=[layer], sets=["trainer.lr=0.125"], progress="plain", stream=said)
    assert (result.reason, result.steps, result.reward_last) == ("steps", 2, 0.75)
    lines = said.getvalue().splitlines()
    assert f"not taken from {shown_path(run_file)} {shown_path(layer)}: run.steps 2 -> 9" in lines
    assert "changed: trainer.lr 1e-06 -> 0.125 (what is learned changes)" in lines
    assert not any("not taken" in line and "trainer.lr" in line for line in lines), "what --set gives is taken"
    assert any(line.startswith("the run goes on with the settings that it has recorded") for line in lines)
    assert any(line.startswith("changed: the code of own_launch_rewards in ") for line in lines)
    assert any(line.startswith("roles of this run may be at work elsewhere: workers on gpu-1 ") for line in lines)
    assert not any("'auto'" in line for line in lines), "what is left to rftstream is no change"
    said = io.StringIO()
    with pytest.raises(ConfigError, match=r"more\.toml: got it beside the run folder .*, expected the folder alone"):
        start.resume(tmp_path / "runs" / "tiny", layers=[layer])
    result = start.resume(tmp_path / "runs" / "tiny", sets=["run.steps=3"], progress="plain", stream=said)
    assert (result.steps, result.new_steps) == (3, 1)
    first, reward, *_ = result.summary().splitlines()
    assert ": 1 new step in " in first and first.endswith("s, 3 in all; ended by: steps") and "reward" in reward
    whose = replace(result, sampled_by=tmp_path / "first").summary()
    assert f"(first and last tenth, of what {tmp_path / 'first'} sampled)" in whose, "no reward of this model"
    other = replace(result, reward_first=None, reward_last=0.5, reward_since=7).summary()
    assert "reward 0.500 (last tenth of the steps; another one scored before version 7)" in other.splitlines()
    once = {"sums": {"first": 0.5, "last": 0.5, "first_version": 3, "last_version": 3}}
    assert "evaluation sums 0.500 (version 3)" in replace(result, evaluations=once).summary().splitlines()
    assert ": 1 step in " in replace(result, steps=1).summary()
    again = replace(result, new_steps=result.steps + 4).summary()
    assert ": 3 steps in " in again and "s, and 4 steps that had to be trained again; ended by: steps" in again
    first, *rest = replace(result, new_steps=0, reason="failed", exit_code=2).summary().splitlines()
    assert ": no new step in " in first and "reward" not in " ".join(rest), "what it told before is no news"
    assert "not taken" not in said.getvalue() and "elsewhere" not in said.getvalue()
    assert "the code of" not in said.getvalue()


@pytest.mark.sampled(2, "start")
@pytest.mark.law("lost")
@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_ctrl_c_stops_cleanly(run_file: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "rftstream", "run", str(run_file), "--json", "--set", "run.steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder = RunFolder(tmp_path / "runs" / "tiny")

    def workers(role: str) -> list[int]:
        lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        return [pid for pid, line in lines.items() if role in line and str(tmp_path) in " ".join(line)]

    wait_until(lambda: (folder.logs / "trainer-0.log").exists()
             and "in force" in (folder.logs / "trainer-0.log").read_text())  # fmt: skip
    with pytest.raises(ConfigError, match="this run is live"):
        rftstream.run(run_file)
    (victim,) = workers("trainer")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: "epoch 2" in (folder.logs / "trainer-0.log").read_text())
    assert workers("trainer") != [victim]
    run.send_signal(signal.SIGINT)
    out, error = run.communicate(timeout=120)
    result = json.loads(out.splitlines()[-1])
    assert (run.returncode, result["reason"], result["exit_code"]) == (0, "interrupted", 0)
    assert "trainer-0 ended (killed by SIGKILL); starting again" in error
    assert processes_of(tmp_path) == []
    (line,) = listing.list_runs(tmp_path / "runs")
    assert "stopped by ctrl-C " in listing.runs_to_text([line])
    assert line.stopped is not None
    assert (line.state, line.stopped.by) == ("stopped", "SIGINT")
    with pytest.raises(ConfigError, match="neither ended nor is anybody running it; go on with `rftstream resume"):
        rftstream.run(run_file)


@pytest.mark.sampled(2, "start")
@pytest.mark.slow
def test_a_run_that_was_killed_is_known_by_that_it_left_no_word(run_file: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "rftstream", "run", str(run_file), "--progress", "none", "--set", "run.steps=100000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    folder = RunFolder(tmp_path / "runs" / "tiny")
    log = folder.logs / "trainer-0.log"
    wait_until(lambda: log.exists() and "in force" in log.read_text())
    run.kill()
    run.wait(timeout=120)
    wait_until(lambda: processes_of(tmp_path) == [])
    assert "stopped by a kill " in listing.runs_to_text(listing.list_runs(tmp_path / "runs"))


@pytest.mark.slow
def test_a_run_that_cannot_begin_says_why_and_leaves_its_name_free(run_file: Path, tmp_path: Path) -> None:
    """By a row beyond those that are looked at before."""
    rows = LOOKED_AT * '{"prompt": "1+1=", "answer": "2"}\n'
    (tmp_path / "bad.jsonl").write_text(f'{rows}{{"prompt"\n')
    config = loader.load([run_file], sets=["tasksets.sums.source=jsonl:bad.jsonl"])
    result = rftstream.run(config, progress="none", stream=io.StringIO())
    assert result.exit_code == 2
    assert result.reason == "failed"
    assert result.error is not None
    assert f"bad.jsonl:{LOOKED_AT + 1}: not JSON" in result.error
    assert "nothing was begun" in result.summary()
    assert folder_choice.choose_folder(config, None) == RunFolder(tmp_path / "runs" / "tiny")
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_run_of_demonstrations_alone_that_failed_keeps_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never has a rollout. Nor do steps that its trainer counted come from a run file elsewhere."""
    monkeypatch.chdir(tmp_path)
    rows = (json.dumps({"prompt": f"{one}+1=", "completion": str(one + 1)}) for one in range(8))
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    settings = {
        "run": {"name": "sft", "steps": 99},
        "model": {"path": "fake"},
        "experts": {"source": "jsonl:sums.jsonl", "per_batch": 1},
        "trainer": {"algorithm": "sft", "backend": "fake", "max_skips_in_a_row": 2},
        "backends": {"fake": {"nan_at": [2, 3]}},
        "transport": {"partitions": 2},
    }
    said = io.StringIO()
    result = rftstream.run(loader.from_dict(settings), progress="none", stream=said)
    assert (result.reason, result.version) == ("failed", 4)
    folder = RunFolder(tmp_path / "runs" / "sft")
    assert folder.exists() and folder.log.exists() and folder.weights.exists()
    assert "run files of the host that trains" not in said.getvalue()


def test_ctrl_c_leaves_the_name_free_only_before_a_worker_has_begun(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has ended stays, though its trackers were not waited for."""
    config, folder = loader.load([run_file]), RunFolder(tmp_path / "runs" / "tiny")
    for where in ("fetch_initial", "worker_commands", "Watch"):
        with monkeypatch.context() as patch:
            patch.setattr(session, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                rftstream.run(config, progress="none", stream=io.StringIO())
        assert folder_choice.choose_folder(config, None) == folder
    monkeypatch.setattr(session.Supervisor, "all_left", True)
    monkeypatch.setattr(session.RunSession, "_close_trackers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rftstream.run(config, progress="none", stream=io.StringIO())
    assert folder.log.exists() and folder.exists()
    assert processes_of(tmp_path) == []


def interrupted(*_: object, **more: object) -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------ before a run


def test_unknown_parts_are_refused_before_anything_is_made(run_file: Path, tmp_path: Path) -> None:
    for setting, place in (
        ("trainer.algorithm=gpro", r"trainer\.algorithm: unknown 'gpro'.*did you mean 'grpo'"),
        ("explorer.policy=hff", r"explorer\.policy: unknown 'hff'"),
        ("transport.kind=memory", "'memory' lives in one process"),
        ("tasksets.sums.reward=exakt", r"tasksets\.sums\.reward: unknown 'exakt'.*'exact'"),
    ):
        with pytest.raises(ConfigError, match=place):
            rftstream.run(loader.load([run_file], sets=[setting]))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("store", "refused"), [
    ("file://{place}/store", True), ("{place}/store", True), ("s3://bucket/x", True), ("file://weights", False),
    ("file://{place}/{{run}}", False), ("s3://bucket/{{run}}", False), ("weights", False),
])  # fmt: skip
def test_runs_do_not_share_a_store(run_file: Path, tmp_path: Path, store: str, refused: bool) -> None:
    run_file.write_text(f'{RUN_FILE}[weights]\nstore = "{store.format(place=tmp_path)}"\n')
    config = loader.load([run_file], env={})
    make_run(folder_choice.choose_folder(config, None), run_file, finished=True)
    second = folder_choice.choose_folder(config, None)
    transport = open_transport(config, second, create=True)
    with pytest.raises(ConfigError, match="is the store of tiny already") if refused else nullcontext():
        create.begin(transport, config, second)
    transport.close()
    assert second.exists() is not refused


def test_reopening_takes_back_the_end(run_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "tiny")
    make_run(folder, run_file, finished=True)
    config = loader.load([run_file], sets=["run.steps=8"])
    transport = open_transport(config, folder)
    start.reopen(transport, folder, loader.load([run_file]), config)
    assert read_control(transport).finished is None
    transport.close()


@pytest.mark.parametrize(("reason", "sets", "word"), [
    ("steps", [], "steps"),
    ("steps", ["run.steps=5"], None),
    ("hours", ["run.hours=1", "run.steps=9"], "hours"),
    ("hours", ["run.hours=3", "run.steps=9"], None),
    ("reward", ["run.stop_reward=0.5", "run.steps=9"], "reward"),
    ("reward", ["run.stop_reward=0.6", "run.steps=9"], None),
    ("taskset", ["run.steps=9"], "passes"),
    ("taskset", ["run.steps=9", "tasksets.sums.passes=2"], None),
    ("no_signal", ["run.steps=9"], None),
])  # fmt: skip
def test_what_is_more_than_a_finished_run_had(run_file: Path, reason: str, sets: list[str], word: str | None) -> None:
    before = loader.load([run_file], sets=["run.hours=2", "run.stop_reward=0.5", "tasksets.sums.passes=1"])
    config = loader.load([run_file], sets=["run.hours=2", "run.stop_reward=0.5", "tasksets.sums.passes=1", *sets])
    finished = RunFinished(reason=reason, name=VersionName(trainer_epoch=1, version=4), finished_at=0.0)
    why = start.nothing_more(finished, 4, before, config)
    assert why is None if word is None else why is not None and word in why
