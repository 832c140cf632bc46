"""The commands that only look: exit codes, JSON, and what they print, over a run folder with an embedded log."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.commands.views import answer_within
from rftstream.config import loader
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.topics import TOPICS
from rftstream.errors import TransportError
from rftstream.runs.folder import RunFolder, create_log
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests.commands import call, called
from tests.unit.synthetic import SyntheticLog, rollout


@pytest.fixture
def run(run_file: Path, tmp_path: Path) -> Path:
    """A run in the middle of its second step."""
    folder = RunFolder(tmp_path / "runs" / "demo")
    config = loader.load([run_file], env={})
    folder.path.mkdir(parents=True)
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    log = SyntheticLog(transport)
    log.step(0, resumed=True)
    log.flow(0, 1)
    log.admit(2)
    log.batch(0, [0])
    log.step(1, metrics={"reward": 0.5}, at=10.0)
    transport.close()
    folder.config_file.write_text(loader.to_toml(config))
    return folder.path


def test_audit_of_several_ends_with_the_worst_code(run: Path, tmp_path: Path) -> None:
    told = call("audit", run, run, "--json")
    assert told.exit_code == 0
    assert [json.loads(line) for line in told.stdout.splitlines()] == [{"run": str(run), **called("audit", run)}] * 2
    absent = tmp_path / "runs" / "absent"
    told = call("audit", run, absent, run)
    assert told.exit_code == 2
    assert told.stdout.count(f"{run}\n\nbalanced: ") == 2 and f"{absent}: no such file" in told.stderr


def change(run: Path, how: Any) -> None:
    transport = EmbeddedTransport(run / "log")
    how(SyntheticLog(transport))
    transport.close()


def test_two_runs_beside_each_other(run: Path) -> None:
    other = shutil.copytree(run, run.with_name("other"))
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.125", config))

    def goes_on(log: SyntheticLog) -> None:
        log.trained[2] = 1
        log.step(2, metrics={"tokens": 300.0, "step_s": 2.0, "wait_s": 1.0}, at=20.0)

    change(other, goes_on)
    told = call("diff", run, other)
    assert told.exit_code == 0, told.output
    rows = dict(re.findall(r"^ *(.*?\S)  +(\S.*)$", told.stdout, re.MULTILINE))
    assert "trainer.lr" in told.stdout and told.stdout.startswith("settings that differ:")
    assert rows["batches trained"].split() == ["1", "2"] and rows["trained tokens/s"].split() == ["-", "100"]
    assert rows["time of the batches trained"].split() == ["-", "3", "s"]
    found = called("diff", run, other)
    assert found["sides"]["after"]["tokens_per_s"] == 100.0 and found["sides"]["before"]["tokens_per_s"] is None
    assert call("diff", run, run.with_name("none")).exit_code == 2


def test_audit_of_a_folder_and_of_its_run_file(run: Path, run_file: Path) -> None:
    report = called("audit", run)
    assert report == called("audit", run_file)
    (part := run_file.with_name("part.toml")).write_text('[run]\nname = "demo"\n')
    assert report == called("audit", part), "a part of the run's file that names the run is enough"
    assert report == called("audit", f"{run_file},{part}"), "several files, where one RUN is expected"
    part.write_text('[run]\nname = "other"\n')
    assert "part of a run file, without [model], [tasksets]; no run other under" in call("audit", part).stderr
    part.write_text('[model]\npath = "fake"\n')
    assert "[run]: missing" in (said := call("inspect", part).stderr) and "the file with run.name and [trans" in said
    assert report["balanced"] is True
    assert report["groups"]["admitted"] == 3
    for key in ("admitted", "pending", "pending_by_stage", "trained", "expired", "filtered", "dead"):
        assert key in report["rollouts"]
        assert key in report["groups"]
    assert set(report["lengths"]["trained"]) == {"count", "mean", "p50", "p95"}
    assert call("audit", run).stdout.startswith("balanced: admitted = pending + trained")


def test_audit_exits_1_for_a_twin_and_for_an_imbalance(run: Path) -> None:
    change(run, lambda log: log.put("rollouts", replace(rollout(log.siblings(0)[0]), finished_at=1.0)))
    report = called("audit", run, code=1)
    assert report["twins"]["rollouts"] == 1
    assert report["balanced"] is True
    change(run, lambda log: log.decide(9, GroupResult.dead))
    assert called("audit", run, code=1)["balanced"] is False
    assert "NOT BALANCED" in call("audit", run).stdout


def test_status(run: Path) -> None:
    report = called("status", run)
    assert (report["run"], report["state"], report["version"], report["steps"]) == ("demo", "stopped", 1, 4)
    assert report["lag"]["tasks"] == 6
    assert re.search(r"reward +0\.500\n", call("status", run).stdout)


def test_a_log_that_does_not_answer_is_given_up_with_what_it_was_asked_for() -> None:
    answered = threading.Event()

    def ask(tell: Callable[[str], None]) -> bool:
        tell("the manifest")
        return answered.wait()

    with pytest.raises(TransportError, match=r"did not answer within 0.01 s: it was asked for (it|the manifest);"):
        answer_within(0.01, ask)
    answered.set()
    assert answer_within(600, ask)


def test_inspect_prints_one_object_a_line(run: Path) -> None:
    result = call("inspect", run, "rollouts", "--json", "--where", "group_id=sums/0/1/0")
    assert [json.loads(line)["message"]["ids"]["sibling"] for line in result.stdout.splitlines()] == [0, 1]
    newest = json.loads(call("inspect", run, "rollouts", "--last", 1, "--json").stdout)["message"]["segments"][0]
    pairs = zip(newest["token_ids"]["values"], newest["loss_mask"]["values"], strict=True)
    said = bytes(token for token, is_sampled in pairs if is_sampled).decode()
    assert said and f"assistant: {said}\n" in call("inspect", run, "rollouts", "--last", 1).stdout
    nothing = call("inspect", run, "rollouts", "--where", "group_id=no")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "rollouts: no such records\n")
    unknown = call("inspect", run, "rollouts", "--where", "group=sums/0/1/0").stderr
    assert unknown.startswith("rollouts: no such records; their headers are ") and " group_id, " in unknown


def test_inspect_without_a_topic_lists_them(run: Path) -> None:
    assert [line["topic"] for line in called("inspect", run)] == list(TOPICS)
    counts = {line["topic"]: line["offsets"] for line in called("inspect", run)}
    assert (counts["steps"], counts["dead"]) == (2, 0)
    text = call("inspect", run).stdout
    assert re.search(r"^  rollouts +sampled, not yet scored +4$", text, re.MULTILINE)
    assert f"`rftstream inspect {run} steps --last 1`" in text
    refused = call("inspect", run, "--last", 1)
    assert refused.exit_code == 2
    assert "TOPIC is missing" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("inspect", "RUN", "rolouts"), "did you mean 'rollouts'"),
        (("inspect", "RUN", "rollouts", "--where", "x"), "expected HEADER=VALUE"),
        (("audit", "nowhere"), "nowhere: no such file"),
        (("delete", "a.toml", "b.toml"), "extra argument (b.toml); several files of a run are one RUN: first.toml,sec"),
        (("list", "rewardz"), "did you mean 'rewards'"),
        (("check", "nowhere.toml"), "nowhere.toml: no such file"),
    ],
)
def test_usage_errors_exit_2(run: Path, arguments: tuple[str, ...], text: str) -> None:
    result = call(*(str(run) if argument == "RUN" else argument for argument in arguments))
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.slow
def test_plot_writes_into_the_run_folder(run: Path, tmp_path: Path) -> None:
    names = ["by_step.png", "by_time.png", "index.html"]
    *pictures, page = [str(run / "plots" / name) for name in names]
    assert called("plot", run) == {"files": pictures, "page": page}
    assert call("plot", run, "--out", tmp_path / "here").exit_code == 0
    assert sorted(file.name for file in (tmp_path / "here").iterdir()) == names


def test_a_report_needs_one_run_that_has_begun(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    for runs, said in (((run,), "the run has not begun"), ((run, run), "--report is of one run; got 2")):
        done = call("studio", *runs, "--report", file)
        assert done.exit_code == 2 and said in done.stderr and not file.exists()
    done = call("studio", run, "--report", tmp_path / "no" / "run.html")
    assert done.exit_code == 2 and f"there is no folder {tmp_path / 'no'}" in done.stderr


def test_list_runs_and_parts(run: Path) -> None:
    (line,) = called("list", "runs", "--folder", run.parent)
    assert (line["run"], line["state"], line["version"], line["reward"]) == ("demo", "stopped", 1, 0.5)
    assert "1 / 4" in call("list", "runs", "--folder", run.parent).stdout
    (logs := run.parent / "other" / "logs").mkdir(parents=True)
    (logs / "explorer-b-0.log").touch()
    listed = call("list", "runs", "--folder", run.parent).stdout
    assert "only logs of workers for another host's run; `rftstream status`" in listed
    assert [part["name"] for part in called("list", "algorithms")][:3] == ["grpo", "dr_grpo", "dapo"]


def test_list_runs_tells_the_reward_that_the_end_of_a_run_tells(run: Path) -> None:
    transport = EmbeddedTransport(RunFolder(run).log)
    log = SyntheticLog(transport)
    for version in range(2, 21):
        log.trained[version] = version
        log.step(version, metrics={"reward": version / 100}, at=10.0 + version)
    transport.close()
    (line,) = called("list", "runs", "--folder", run.parent)
    assert (line["version"], line["reward"]) == (20, pytest.approx((0.19 + 0.20) / 2))


def test_check(run_file: Path) -> None:
    report = called("check", run_file)
    assert report["ok"] is True
    assert report["tasksets"][0]["first_prompt"]["num_tokens"] == 4
    assert called("check", run_file, "--set", "trainer.algorithm=gpro", code=2)["ok"] is False
    told = call("check", run_file, "--set", "trainer.algorithm=gpro")
    assert "did you mean 'grpo'" in told.stdout
    phases = told.stderr.splitlines()
    assert phases[0] == "devices, parts and places ..." and phases[-1] == "the log ..."
    assert len(phases) == 4 + len(report["tasksets"])
    assert not call("check", run_file, "--json").stderr
