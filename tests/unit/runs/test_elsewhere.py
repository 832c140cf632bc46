"""A host that does not see the run folder has run files of its own: where these say otherwise, they change no run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Claim, RunFinished
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, RftError
from rftstream.launch import host
from rftstream.launch.joining import FilesAsRead
from rftstream.launch.sessions.host_workers import hold_names
from rftstream.models.folders.folder import prepare_model
from rftstream.preflight import folder_choice
from rftstream.queries.state import elsewhere
from rftstream.queries.state.elsewhere import held_elsewhere, nobody_at_work, reached_here_alone
from rftstream.queries.state.status_reading import read_status
from rftstream.runs.folder import OpenRun, RunFolder, create_log, open_transport
from rftstream.runs.making.elsewhere import (
    FilesHere,
    TrainersElsewhere,
    check_end,
    check_resumed,
    steps_followed,
    steps_of,
)
from rftstream.runs.manifest import data_digests, make_manifest
from tests.unit.synthetic import SyntheticLog
from tests.waiting import wait_until


def config_of(tmp_path: Path, steps: int | None, **more: object) -> RunConfig:
    found = loader.from_dict({
        "run": {"name": "sums", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
    })  # fmt: skip
    return loader.replace(found, base=str(tmp_path), run__steps=steps, **({} if steps else {"run__hours": 9.0}), **more)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    """A run of 9 steps, of which 3 are trained, as a host without its config.toml opens it with 2 in its run file."""
    folder, began = RunFolder(tmp_path / "runs" / "sums"), config_of(tmp_path, 9)
    folder.path.mkdir(parents=True)
    transport = open_transport(began, folder, create=True)
    create_log(transport, began)
    log = SyntheticLog(transport)
    digests = data_digests(began, prepare_model(began.model, folder.model, 0))
    log.put("control", make_manifest(began, "sums", digests, 1.0))
    log.step(0, resumed=True, config=loader.to_toml(began))
    for version in (1, 2, 3):
        log.trained[version] = version
        log.step(version)
    yield OpenRun(folder, config_of(tmp_path, 2), transport)
    transport.close()


def test_a_worker_whose_file_would_end_the_run_is_refused(run: OpenRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sums: run\.steps: got 2 from .* at version 3 of 9, and would end by it"):
        check_end(run.transport, run.config, "sums")
    lower = config_of(tmp_path, 5, trainer__lr=0.5, trainer__device="cuda:1", explorer__count=7)
    lines = check_end(run.transport, lower, "sums")
    assert [line.partition(" ")[0] for line in lines] == ["run.steps", "trainer.lr"], "and what is a host's own may be"
    assert check_end(run.transport, config_of(tmp_path, 9), "sums") == []


def test_what_the_newest_trainer_works_by_counts(run: OpenRun, tmp_path: Path) -> None:
    log = SyntheticLog(run.transport)
    log.trained[3] = 3
    log.step(3, epoch=2, resumed=True, config=loader.to_toml(config_of(tmp_path, 3)))
    assert check_end(run.transport, config_of(tmp_path, 3), "sums") == [], "it was told to end there"
    found = read_status(run)
    assert found.num_steps == 3
    passed_over = steps_of(run, found.control, (), found.history.current)
    assert passed_over == 3, "a glance at a long run does not see the start of its newest trainer"


def test_a_worker_that_scores_by_another_reward_waits_for_a_trainer_with_it(run: OpenRun, tmp_path: Path) -> None:
    """Its share of the rollouts would have other rewards, and nobody would see why."""

    def here(role: str, config: RunConfig) -> FilesHere:
        return FilesHere(role, run.transport, config, "sums", said.append)

    said: list[str] = []
    other = config_of(tmp_path, 9, tasksets__sums__reward=[{"name": "well_formed"}], tasksets__sums__passes=3)
    code = {"tolerance": 0.001, "sandbox_url": "http://here"}  # the latter is how this host reaches it
    strict = here("verifier", config_of(tmp_path, 9, rewards={"code": code}))
    assert here("verifier", run.config).differences() == [], "it has the run's reward"
    assert here("explorer", other).differences() == [], "it scores nothing"
    assert strict.differences() is None
    waiting = here("evaluator", other)
    for _ in range(3):
        assert waiting.differences() is None
    log = SyntheticLog(run.transport)
    log.trained[4] = 4
    log.step(4)
    assert waiting.differences() is None, "the trainer of before is still at work"
    assert [line.partition("the run: ")[2].partition("; ")[0] for line in said] == [
        "rewards.code.tolerance unset -> 0.001",
        "tasksets.sums.reward 'exact' -> unset",
    ], "each says once what it waits for"
    with pytest.raises(ConfigError, match=r"sums: .* score otherwise than the run: tasksets\.sums\.reward 'exact' ->"):
        waiting.refuse()
    log.step(4, epoch=2, resumed=True, config=loader.to_toml(other))
    assert waiting.differences() == []
    waiting.refuse()
    assert here("verifier", run.config).differences() is None
    assert "reward unset -> 'exact'" in said.pop()


def test_a_worker_that_plays_another_environment_waits_for_a_trainer_with_it(run: OpenRun, tmp_path: Path) -> None:
    def here(role: str, **settings: object) -> list[str] | None:
        return FilesHere(role, run.transport, config_of(tmp_path, 9, **settings), "sums", said.append).differences()

    said: list[str] = []
    easy = {"environments": {"attempts": {"max_attempts": 9}}}
    assert here("verifier", **easy) == [], "it plays nothing"
    assert here("explorer", environments={"hosted": {"python": "/opt/here"}}) == [], "which is this host's own"
    assert here("explorer", tasksets__sums__passes=3) == []
    assert here("explorer", **easy) is here("evaluator", **easy) is None
    assert here("explorer", tasksets__sums__environment="attempts") is None
    assert here("explorer", environments={"games:Safe": {"guesses": 4}}) is None
    assert "play otherwise than the run: environments.attempts.max_attempts unset -> 9; this explorer waits" in said[0]
    assert "tasksets.sums.environment 'single_turn' -> 'attempts'" in said[2]


def test_a_worker_that_scores_leaves_what_a_new_trainer_scores_otherwise(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run was resumed elsewhere with another reward: what scores here would go on with the old one in silence."""
    monkeypatch.setattr(host, "calm_collector", lambda: None)
    caplog.set_level("INFO", "rftstream")
    (file := tmp_path / "run.toml").write_text(loader.to_toml(config_of(tmp_path, 9)))
    begun: list[str] = []
    monkeypatch.setattr(host, "begin_anew", lambda: begun.append(file.read_text()))
    worker = host.Worker(config=config_of(tmp_path, 9), folder=run.folder, role="verifier", process="verifier-B",
                         device=None, stop=lambda: False, deadline_s=9.0, wait_s=60.0, parent=None,
                         as_read=FilesAsRead([file]))  # fmt: skip
    run.folder.logs.mkdir()
    log = SyntheticLog(run.transport)

    def begin(epoch: int, **settings: object) -> None:
        text = loader.to_toml(config_of(tmp_path, 9, **settings))
        log.put("control", Claim(role="trainer", epoch=epoch, host="A", pid=1, process="t", claimed_at=time.time()))
        log.step(3, epoch=epoch, resumed=True, config=text)

    def said(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    log.trained[3] = 3
    with ThreadPoolExecutor() as threads:
        working = threads.submit(worker.run, None)
        try:
            wait_until(lambda: working.done() or said("started") == 1)
            begin(2, trainer__lr=0.5)
            begin(3, tasksets__sums__reward=[{"name": "well_formed"}])
            wait_until(lambda: working.done() or said("waiting for a trainer with the rewards"))
            assert said("score otherwise than the run: tasksets.sums.reward unset -> 'exact'") == 1
            assert not begun
            assert worker.health.report()[1]["state"] == "waiting for a trainer with the rewards of these run files"
            file.write_text("half of a chan")
            file.write_text(loader.to_toml(config_of(tmp_path, 9, trainer__lr=0.5)))
            wait_until(lambda: working.done() or begun)
            begin(4)
            wait_until(lambda: working.done() or said("started") == 2)
        finally:
            log.put(
                "control",
                RunFinished(reason="steps", name=VersionName(trainer_epoch=4, version=3), finished_at=time.time()),
            )
        working.result(30)
    assert said("left: the run is finished") == 1
    worker.parent = os.getppid()
    with pytest.raises(RftError, match="the run files have changed"):
        worker._begin_anew("the run files have changed")
    assert set(begun) == {loader.to_toml(config_of(tmp_path, 9, trainer__lr=0.5))}


def test_files_that_cannot_be_read_begin_nothing_and_a_mended_one_the_same_command(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(loader.to_toml(config_of(tmp_path, 9)))
    as_read = FilesAsRead([file])
    assert not as_read.have_changed()
    file.write_text("[run")
    assert not as_read.have_changed()
    file.write_text(loader.to_toml(config_of(tmp_path, 8)))
    assert as_read.have_changed()
    (script := tmp_path / "script.py").write_text(
        "import os, sys\nfrom rftstream.launch.host import begin_anew\nprint(os.getpid(), sys.argv[1:], flush=True)\n"
        "if os.environ.setdefault('BEGUN', '0') == '0':\n    os.environ['BEGUN'] = '1'\n    begin_anew()\n"
    )
    done = subprocess.run([sys.executable, script, "--wait-s", "9"], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == second and first.endswith("['--wait-s', '9']")


def test_who_supervises_says_once_what_a_trainer_elsewhere_does_otherwise(tmp_path: Path) -> None:
    here = config_of(tmp_path, 9, trainer__lr=0.1)
    elsewhere = TrainersElsewhere(here, "")
    assert elsewhere.news("") == elsewhere.news(loader.to_toml(here)) == []
    other = loader.to_toml(config_of(tmp_path / "there", 9, trainer__lr=0.5, trainer__device="cuda:1"))
    (line,) = elsewhere.news(other)
    assert line.startswith("changed: trainer.lr 0.1 -> 0.5 (")
    assert elsewhere.news(other) == []
    assert elsewhere.news(loader.to_toml(here)) == ["changed: the trainer works by the settings of this host again"]
    assert TrainersElsewhere(here, other).news(other) == [], "a session that begins goes on with its own settings"


def test_a_resume_by_files_changes_only_what_set_gives(run: OpenRun, tmp_path: Path) -> None:
    for files in (run.config, config_of(tmp_path, None)):
        with pytest.raises(ConfigError, match=r"sums: its log says other settings .*run\.steps 9 -> .*--set"):
            check_resumed(run.transport, files, "sums", ["trainer.lr=0.1", "run.hours=9"])
    here = config_of(tmp_path / "here", 20)
    before = check_resumed(run.transport, here, "sums", ["run.steps=20"])
    assert before is not None and (before.steps, before.base) == (9, str(tmp_path / "here")), (
        "what it shows as changed is against the log"
    )
    check_resumed(run.transport, config_of(tmp_path, 9, trainer__colocate=False), "sums", [])
    other = config_of(tmp_path, 9, weights__store="file:///mnt/other")
    with pytest.raises(ConfigError, match=r"weights\.store 'file://weights' -> 'file:///mnt/other'; give each"):
        check_resumed(run.transport, other, "sums", [])  # the run's checkpoints are not there
    check_resumed(run.transport, other, "sums", ["weights.store=file:///mnt/other"])


def test_the_status_has_the_steps_of_the_log_and_proposes_what_works_here(run: OpenRun) -> None:
    assert read_status(run).num_steps == 9
    assert "resume` of its run files" in read_status(run).to_text()
    run.folder.config_file.touch()
    assert f"`rftstream resume {run.folder.path}` goes on" in read_status(run).to_text()


def test_the_steps_of_a_trainer_on_another_host_count_where_the_run_was_made(run: OpenRun, tmp_path: Path) -> None:
    log = SyntheticLog(run.transport)
    run.folder.config_file.touch()
    settings = loader.to_toml(config_of(tmp_path, 5))
    log.trained[3] = 3
    log.step(3, epoch=2, resumed=True, config=settings)
    assert read_status(run).num_steps == 2, "as its own config.toml says"
    for epoch, of_host, steps in ((2, socket.gethostname(), 2), (3, "gpu-2", 5)):
        claim = Claim(role="trainer", epoch=epoch, host=of_host, pid=2**30, process="trainer-0", claimed_at=time.time())
        log.put("control", claim)
        found = read_status(run)
        assert (found.num_steps, steps_followed(run.config, found.control, settings)) == (steps, steps)


def test_who_resumes_is_told_of_roles_that_another_host_holds(run: OpenRun) -> None:
    log, host = SyntheticLog(run.transport), socket.gethostname()

    def claim(of_host: str, epoch: int, role: str = "feeder") -> None:
        claimed = Claim(role=role, epoch=epoch, host=of_host, pid=2**30, process="feeder-0", claimed_at=time.time())
        log.put("control", claimed)

    claim(host, 1)
    assert held_elsewhere(run.config, run.transport) == [], "that process has ended"
    claim("gpu-2", 1, "evaluator")
    assert held_elsewhere(run.config, run.transport) == [], "this machine starts none: it stays there"
    claim("gpu-1", 2)
    (line,) = held_elsewhere(run.config, run.transport)
    assert "workers on gpu-1 (newest record 0 s ago)" in line and "Stop the `run`" in line
    run.folder.config_file.touch()
    with pytest.raises(ConfigError, match=r"may be at work elsewhere: workers on gpu-1, gpu-2 .*; join.*take it over"):
        folder_choice.choose_folder(run.config, run.folder.path)
    run.folder.config_file.unlink()
    claim("gpu-1", 3)
    later = time.time() + 7300
    rows = read_status(run, now=later).to_text(later).splitlines()
    (row,) = (line for line in rows if line.startswith("  feeder "))
    assert row.endswith("2 h 1 min ago"), "its last record"
    log.put("control", RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=3), finished_at=1.0))
    assert held_elsewhere(run.config, run.transport) == []


def test_who_waits_for_explorers_of_other_hosts_is_told_that_these_cannot_reach_the_weights(run: OpenRun) -> None:
    def said(**more: object) -> list[str]:
        found = {"transport__kind": "kafka", "transport__servers": "b:9092", "explorer__count": 0, **more}
        return reached_here_alone(loader.replace(run.config, **found), run.folder)

    (line,) = said()
    assert line.startswith("weights.store: 'file://weights' lies in the run folder")
    assert said(explorer__count=1) == said(weights__store="file:///mnt/{run}") == said(transport__kind="embedded") == []
    assert said(weights__store="s3://models/{run}") == []


def test_who_resumes_is_told_which_workers_left(run: OpenRun, tmp_path: Path) -> None:
    assert nobody_at_work(run.config, run.transport) == []
    away = config_of(tmp_path, 9, explorer__count=0)
    (line,) = nobody_at_work(away, run.transport)
    assert line.startswith("no explorer is at work: this machine starts none") and "--role explorer`" in line
    member = run.transport.member("explorer", ["tasks"], name="explorer-far")
    member.poll()
    assert nobody_at_work(away, run.transport) == []
    member.close()


def test_two_workers_of_a_host_have_two_names(tmp_path: Path) -> None:
    held = hold_names(tmp_path, ["explorer-gpu-1-0", "verifier-gpu-1-0"])
    with pytest.raises(ConfigError, match=r"--name: verifier-gpu-1-0 is at work here already"):
        hold_names(tmp_path, ["explorer-gpu-1-1", "verifier-gpu-1-0"])
    hold_names(tmp_path, ["explorer-gpu-1-1", "verifier-pool-0"]).close()
    held.close()
    hold_names(tmp_path, ["verifier-gpu-1-0"]).close()


def test_workers_of_other_hosts_are_listed_beside_the_supervisors_own(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = {"explorer": ["explorer-0 at 10.0.0.1", "explorer-b-0 at 10.0.0.2"], "verifier": ["verifier-b-0 at far"]}
    monkeypatch.setattr(elsewhere, "read_members", lambda transport: heard)
    with run.folder.held():
        found = read_status(run)
    said = re.findall(r"\n  (\S+ at \S+) +one of the (\w+)s that the log hears", found.to_text())
    assert said == [("explorer-b-0 at 10.0.0.2", "explorer"), ("verifier-b-0 at far", "verifier")]
    assert (found.state, found.elsewhere) == ("running", None), "explorer-0 is this host's, and listed once"
