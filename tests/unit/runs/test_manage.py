"""`topics`, `delete` and `doctor`, over runs with an embedded log."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.contracts.control import Claim
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError
from rftstream.preflight.doctor import DoctorReport, Finding
from rftstream.runs.delete import delete_run, is_claimant_alive, plan_deletion, who_is_alive
from rftstream.runs.folder import PARTS, RunFolder, consumer_groups, create_log, open_run
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.transport.findings import Level
from tests.commands import call, called, write_run_file
from tests.loopback import taken_port
from tests.unit.synthetic import SyntheticLog
from tests.waiting import wait_until

MakeRun = Callable[[], Path]


@pytest.fixture
def make_run(run_file: Path, tmp_path: Path) -> MakeRun:
    """A stopped run with a little of everything; `RFTSTREAM`s settings of the file are as it has them then."""

    def make() -> Path:
        folder = RunFolder(tmp_path / "runs" / "demo")
        config = loader.load([run_file], env={})
        folder.path.mkdir(parents=True)
        transport = EmbeddedTransport(folder.log)
        create_log(transport, config)
        SyntheticLog(transport).flow(0, 1)
        transport.close()
        for name in ("weights/versions/000001-00000000.safetensors", "logs/trainer-0.log", "final/config.json"):
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text("some bytes")
        folder.config_file.write_text(loader.to_toml(config))
        folder.lock_file.write_text("1")
        return folder.path

    return make


# --------------------------------------------------------------------------------------------- topics


def test_topics_are_made_once_and_a_run_can_use_them(run_file: Path) -> None:
    before = called("topics", "list", run_file, code=1)
    assert (before["run"], before["fine"]) == ("demo", False)
    assert {line["exists"] for line in before["topics"]} == {False}
    assert not (run_file.parent / "runs").exists(), "to list is to look"
    assert called("topics", "apply", run_file)["made"] == list(TOPICS)
    again = called("topics", "apply", run_file)
    assert (again["made"], again["fine"]) == ([], True)
    assert [line["partitions"] for line in again["topics"][:2]] == [2, 2]
    transport = EmbeddedTransport(run_file.parent / "runs" / "demo" / "log", create=False)
    assert all(transport.admin.committed(group) for group in consumer_groups(loader.load([run_file])))
    transport.close()


def test_topics_of_a_run_with_what_they_hold(make_run: MakeRun, run_file: Path) -> None:
    run = make_run()
    report = called("topics", "list", run)
    assert report == called("topics", "list", run_file)
    assert {line["topic"]: line["offsets"] for line in report["topics"]}["tasks"] == 4
    assert "  tasks       as wanted           2        4\n" in call("topics", "list", run).stdout


def test_other_partitions_are_refused_with_the_difference(run_file: Path) -> None:
    called("topics", "apply", run_file)
    run_file.write_text(run_file.read_text().replace("partitions = 2", "partitions = 5"))
    result = call("topics", "apply", run_file)
    assert result.exit_code == 2
    assert "tasks: has 2 partitions, expected 5 (transport.partitions); rollouts: has 2" in result.stderr
    assert "another run.name" in result.stderr
    listed = called("topics", "list", run_file, code=1)
    assert listed["topics"][0]["differences"] == ["has 2 partitions, expected 5 (transport.partitions)"]


def test_topics_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFTSTREAM_CONFIG", raising=False)
    assert "no such file" in call("topics", "list", "nowhere.toml").stderr
    assert "no run file: none given" in call("topics", "list").stderr
    assert call("topics", "lst", "nowhere.toml").exit_code == 2


# --------------------------------------------------------------------------------------------- delete


def test_delete_shows_asks_and_deletes(make_run: MakeRun) -> None:
    run = make_run()
    shown = call("delete", run, answer="n\n")
    assert shown.exit_code == 1
    assert f"{run}: " in shown.stdout
    assert "  weights " in shown.stdout
    assert "delete all of this? [y/N]" in shown.stdout
    assert run.is_dir()
    assert called("delete", run, "--dry-run")["deleted"] is False
    assert (run / "log").is_dir()
    assert call("delete", run, answer="y\n").exit_code == 0
    assert not run.exists()
    assert run.parent.is_dir()


def test_delete_by_run_file_and_json(make_run: MakeRun, run_file: Path) -> None:
    run = make_run()
    (run / "index").mkdir()
    (run / "targets.json").write_text("[]")
    (run / "modules.123.partial").write_text("")
    (run.parent / "other").mkdir()
    (run.parent / "other" / "config.toml").write_text("")
    assert "give --yes or --dry-run" in call("delete", run_file, "--json").stderr
    assert called("delete", run_file, "--yes")["run_dir"] == str(run)
    assert not run.exists()
    assert run_file.is_file()
    again = call("delete", run_file, "--yes")
    assert again.exit_code == 2
    assert "no run of it yet" in again.stderr and "other" in again.stderr


def test_what_shows_that_a_folder_is_a_run_is_deleted_last() -> None:
    assert PARTS[-2:] == (RunFolder(Path("demo")).config_file.name, RunFolder(Path("demo")).lock_file.name)
    assert {"log", "weights", "index", "logs"} < set(PARTS)


def test_what_trackers_wrote_into_the_folder_goes_too(make_run: MakeRun, tmp_path: Path) -> None:
    write_run_file(tmp_path, '[trackers]\ntensorboard = "board"\nwandb = "me/sums"\n')
    run = make_run()
    for name in ("board", "wandb", "boards"):
        (run / name).mkdir()
        (run / name / "events").write_text("x")
    plan = called("delete", run, "--yes")
    assert plan["kept"] == ["boards"]
    assert plan["parts"]["board"] == plan["parts"]["wandb"] == 1
    assert [one.name for one in run.iterdir()] == ["boards"]


@pytest.mark.parametrize("board", ["..", ".", "/somewhere", "a/b", "../other", "log"])
def test_event_files_elsewhere_stay(make_run: MakeRun, tmp_path: Path, board: str) -> None:
    other = tmp_path / "runs" / "other"
    other.mkdir(parents=True)
    write_run_file(tmp_path, f'[trackers]\ntensorboard = "{board}"\n')
    run = make_run()
    (run / "a" / "b").mkdir(parents=True)
    assert called("delete", run, "--yes")["kept"] == ["a"]
    assert other.is_dir()
    assert [one.name for one in run.iterdir()] == ["a"]


def test_files_of_others_and_links_stay(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("!")
    (run / "plots").symlink_to(elsewhere)
    (run / "logs" / "link").symlink_to(elsewhere)
    (run / "notes.txt").write_text("mine")
    plan = called("delete", run, "--yes")
    assert (plan["kept"], plan["links"]) == (["notes.txt"], {"plots": str(elsewhere)})
    assert [one.name for one in run.iterdir()] == ["notes.txt"]
    assert (elsewhere / "precious").is_file()


def test_objects_outside_the_folder(make_run: MakeRun, run_file: Path, tmp_path: Path) -> None:
    write_run_file(tmp_path, f'[weights]\nstore = "file://{tmp_path}/store"\n')
    run = make_run()
    store = open_run(run)
    try:
        store.store().put("versions/000001-00000000.safetensors", b"x")
        store.store().put("evals/held/1.jsonl", b"x")
        store.store().put("somebody/else", b"x")
    finally:
        store.transport.close()
    plan = called("delete", run, "--yes")
    assert (plan["store"], plan["objects"]) == (f"file://{tmp_path}/store", 2)
    assert sorted(one.name for one in (tmp_path / "store").rglob("*")) == ["else", "somebody"]


def test_a_folder_that_the_store_has_for_the_run_alone_goes(make_run: MakeRun, tmp_path: Path) -> None:
    write_run_file(tmp_path, f'[weights]\nstore = "file://{tmp_path}/store/{{run}}"\n')
    run = make_run()
    opened = open_run(run)
    opened.store().put("versions/000001-00000000.safetensors", b"x")
    opened.transport.close()
    assert (tmp_path / "store" / run.name).is_dir()
    called("delete", run, "--yes")
    assert list((tmp_path / "store").iterdir()) == []


def test_objects_of_a_store_that_another_run_has_stay(make_run: MakeRun, tmp_path: Path) -> None:
    """They have the same names."""
    write_run_file(tmp_path, f'[weights]\nstore = "file://{tmp_path}/store"\n')
    run = make_run()
    other = run.with_name("demo-2")
    other.mkdir()
    (other / "config.toml").write_text((run / "config.toml").read_text())
    opened = open_run(run)
    opened.store().put("versions/000001-00000000.safetensors", b"x")
    opened.transport.close()
    assert "stays, for demo-2 has the same store: what is in file://" in call("delete", run, "--dry-run").stdout
    plan = called("delete", run, "--yes")
    assert (plan["objects"], plan["shared_with"]) == (0, ["demo-2"])
    assert [one.name for one in (tmp_path / "store" / "versions").iterdir()] == ["000001-00000000.safetensors"]


def test_what_is_no_run_folder_is_never_deleted(run_file: Path, tmp_path: Path, make_run: MakeRun) -> None:
    project = tmp_path / "project"
    project.mkdir()
    write_run_file(project).rename(project / "config.toml")
    result = call("delete", project, "--yes")
    assert result.exit_code == 2
    assert "no run.lock, so no run was ever made in it" in result.stderr
    assert "it is not a run folder" in call("delete", tmp_path, "--yes").stderr
    (tmp_path / "run.lock").touch()  # a kill came while `replay --into` copied
    assert "do again the command that" in call("delete", tmp_path, "--yes").stderr
    assert (project / "config.toml").is_file()
    link = tmp_path / "link"
    link.symlink_to(make_run())
    result = call("delete", link, "--yes")
    assert result.exit_code == 2
    assert "is a link to" in result.stderr
    assert (link / "log").is_dir()


def test_delete_of_a_misspelt_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    result = call("delete", run.with_name("deno"), "--yes")
    assert result.exit_code == 2
    assert f"did you mean {run}?" in result.stderr
    assert run.parent.name == "runs"
    result = call("delete", run.parents[2] / run.name, "--yes")
    assert f"did you mean {run}?" in result.stderr, "its name alone, one folder above"


def test_refused_while_somebody_is_at_work(make_run: MakeRun) -> None:
    run = make_run()
    with RunFolder(run).held():
        result = call("delete", run, "--yes")
    assert result.exit_code == 2
    assert f"somebody is at work on this run: `run` or `resume`, process {os.getpid()} here; stop it" in result.stderr
    opened = open_run(run)
    SyntheticLog(opened.transport).put("control", claim())
    opened.transport.close()
    result = call("delete", run, "--yes")
    assert f"evaluator-9, process {os.getpid()} here" in result.stderr
    assert (run / "log").is_dir()


def test_who_is_at_work_is_named_once(make_run: MakeRun) -> None:
    run = make_run()
    opened = open_run(run)
    line = [sys.executable, "-c", "input()", "worker", str(run)]
    with (
        subprocess.Popen(line, stdin=subprocess.PIPE) as claims,
        subprocess.Popen(line, stdin=subprocess.PIPE) as joins,
    ):
        SyntheticLog(opened.transport).put("control", claim(pid=claims.pid))
        alive = who_is_alive(RunFolder(run), opened.transport)
        claims.communicate(b"\n")
        joins.communicate(b"\n")
    opened.transport.close()
    assert alive == [f"evaluator-9, process {claims.pid} here", f"a worker, process {joins.pid} here"]


def test_refused_while_a_worker_that_was_started_by_hand_is_in_its_group(make_run: MakeRun) -> None:
    """Its command line names a run file, not the folder."""
    run = make_run()
    opened = open_run(run)
    member = opened.transport.member("explorer", ["tasks"], name="explorer-here-1", session_timeout_s=1000.0)
    refused = call("delete", run, "--yes")
    member.close()
    opened.transport.close()
    assert refused.exit_code == 2
    assert "somebody is at work on this run: explorer explorer-here-1; stop it first" in refused.stderr
    assert (run / "log").is_dir()
    assert call("delete", run, "--yes").exit_code == 0


def test_who_came_while_we_were_asked_is_not_deleted_under(make_run: MakeRun) -> None:
    run = make_run()
    plan = plan_deletion(run)
    opened = open_run(run)
    member = opened.transport.member("verifier", ["rollouts"], name="verifier-here-1", session_timeout_s=1000.0)
    with pytest.raises(ConfigError, match="somebody is at work on this run: verifier verifier-here-1"):
        delete_run(plan)
    member.close()
    opened.transport.close()
    delete_run(plan)
    assert not run.exists()


def claim(**changes: Any) -> Claim:
    facts: dict[str, Any] = {"role": "evaluator", "epoch": 1, "host": socket.gethostname(), "pid": os.getpid(),
                             "process": "evaluator-9", "claimed_at": time.time()}  # fmt: skip
    return Claim(**{**facts, **changes})


def test_who_is_alive() -> None:
    assert is_claimant_alive(claim()) is True
    assert is_claimant_alive(claim(claimed_at=1.0)) is False, "a later process got the number"
    assert is_claimant_alive(claim(pid=2**22 + 1)) is False
    assert is_claimant_alive(claim(host="elsewhere")) is None


def test_who_was_killed_is_not_alive_while_its_memory_is_given_back() -> None:
    """That takes tens of milliseconds, in which it is neither at work nor a zombie."""
    grown = "memory = bytearray(200 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", grown], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_claimant_alive(claim(pid=process.pid)) is True
        process.kill()
        command_line = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: not command_line.read_bytes())
        assert is_claimant_alive(claim(pid=process.pid)) is False


def test_a_damaged_log_can_be_deleted(make_run: MakeRun) -> None:
    run = make_run()
    for file in (run / "log").iterdir():
        file.unlink()
    assert call("delete", run, "--yes").exit_code == 0
    assert not run.exists()


# --------------------------------------------------------------------------------------------- doctor


def findings(*arguments: object, code: int = 0) -> dict[str, Any]:
    return {one["what"]: one for one in called("doctor", *arguments, code=code)["findings"]}


def test_doctor_of_this_machine() -> None:
    found = findings()
    for what in ("python", "torch", "crc32c", "cores", "disk", "sqlite", "gpu", "open files (ulimit -n)"):
        assert found[what]["found"]
    assert found["sqlite"]["level"] == "ok"
    assert "model" not in found
    assert call("doctor").stdout.splitlines()[-1].startswith("no problems, ")


def test_doctor_of_a_run_file_leaves_nothing_behind(run_file: Path) -> None:
    before = sorted(run_file.parent.rglob("*"))
    found = findings(run_file)
    assert found["model"]["found"].startswith("fake: 256 token ids")
    assert "to be made in" in found["object store"]["found"]
    assert sorted(run_file.parent.rglob("*")) == before


def test_doctor_writes_to_a_store_that_is_there(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_run_file(tmp_path, f'[weights]\nstore = "file://{tmp_path}/store"\n')
    assert "written, read and deleted" in findings(run_file)["object store"]["found"]
    assert not [one for one in (tmp_path / "store").rglob("*") if one.is_file()]


def test_problems_with_what_to_do(run_file: Path, tmp_path: Path) -> None:
    found = findings(run_file, "--set", "model.path=no/such/model", "--set", "explorer.devices=['cuda:7']", code=1)
    assert found["model"]["level"] == "problem"
    assert found["cuda:7"]["level"] == "problem"
    assert found["cuda:7"]["todo"]
    text = call("doctor", run_file, "--set", "explorer.policy=fakee").stdout
    assert "problem  parts" in text
    assert "did you mean 'fake'" in text
    (tmp_path / "file").write_text("")
    found = findings(run_file, "--set", f"run.folder={tmp_path}/file/runs", code=1)
    assert found["run folders"]["level"] == "problem"


def test_exit_codes() -> None:
    def report(*codes: int) -> DoctorReport:
        ok = Finding(level=Level.warning, what="a", found="b")
        problems = (Finding(level=Level.problem, what="a", found="b", exit_code=code) for code in codes)
        return DoctorReport((ok, *problems))

    assert [report().exit_code, report(1).exit_code, report(1, 3).exit_code] == [0, 1, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broker_that_does_not_answer_is_exit_3(run_file: Path) -> None:
    with taken_port() as port:
        address = f"127.0.0.1:{port}"
        found = findings(
            run_file, "--set", "transport.kind=kafka", "--set", f"transport.servers={address}", code=3
        )  # fmt: skip
    assert found["broker"]["level"] == "problem"
    assert f"no Kafka broker answered at {address}" in found["broker"]["found"]
    gc.collect()  # the client leaves sockets that never connected to the collector, which warns
