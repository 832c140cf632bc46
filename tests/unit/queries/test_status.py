"""What `status` and `list runs` say, and which steps are in force."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.loader import from_dict
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Claim, DesiredState, RunFinished, RunState, TasksEnded
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.launch.health import Health, HealthServer
from rftstream.launch.session import notes_file
from rftstream.queries.curves.history import read_history
from rftstream.queries.records.dead import error_kinds, read_letters
from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.queries.state.status import Status
from rftstream.queries.state.status_reading import read_status
from rftstream.queries.state.workers import health_sentence, worker_sentence
from rftstream.replay.recorded import read_recorded
from rftstream.runs.ending import noting_failure
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.observer import Observer
from rftstream.service.role import Log
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.grown import announced
from tests.unit.synthetic import SyntheticLog

CONFIG = {
    "run": {"name": "demo", "steps": 8},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
}


@pytest.fixture
def log() -> SyntheticLog:
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)
    return log


def config() -> RunConfig:
    return from_dict(CONFIG)


def status(log: SyntheticLog, folder: Path) -> Status:
    return read_status(OpenRun(RunFolder(folder), config(), log.transport))


def train(log: SyntheticLog, *rewards: float, epoch: int = 1, start: int = 0) -> None:
    for version, reward in enumerate(rewards, start=start + 1):
        log.trained[version] = version
        log.step(version, epoch=epoch, at=100.0 + version, metrics={"reward": reward})


def evaluation(version: int, mean: float, *, epoch: int = 1) -> EvalResult:
    return EvalResult(evaluation="held-out", name=VersionName(trainer_epoch=epoch, version=version), num_tasks=5,
                      num_samples=1, num_unscored=0, metrics={"mean": mean}, generations=None)  # fmt: skip


# --------------------------------------------------------------------------------------------- history


def test_only_steps_in_force_count(log: SyntheticLog) -> None:
    train(log, 0.1, 0.2, 0.3, 0.4)
    log.step(2, epoch=2, resumed=True)
    train(log, 0.9, epoch=2, start=2)
    train(log, 0.5, epoch=1, start=4)  # a zombie
    log.put("evals", evaluation(1, 0.2), evaluation(4, 0.4), evaluation(3, 0.8, epoch=2))
    history = read_history(Log(log.transport))
    assert history.rewards() == [0.1, 0.2, 0.9]
    assert [step.name for step in history.steps][-1] == VersionName(trainer_epoch=2, version=3)
    assert [record.name.version for record in history.resumes] == [2]
    assert [result.metrics["mean"] for result in history.evaluations] == [0.2, 0.8]
    assert (history.version, history.again) == (3, "batches up to version 4 are trained again")
    train(log, 0.5, epoch=2, start=3)
    assert read_history(Log(log.transport)).again == ""


def test_a_newer_trainer_whose_start_was_not_said_counts_the_same_for_all_who_look(log: SyntheticLog) -> None:
    train(log, 0.1, 0.2, 0.3)
    train(log, 0.9, epoch=2, start=1)
    observer = Observer(log.transport)
    observer.catch_up()
    looked = {
        "history": list(read_history(Log(log.transport)).steps),
        "recorded": [step for _, step in sorted(read_recorded(Log(log.transport)).steps.items())],
        "observer": observer.curve.steps(),
    }
    observer.close()
    names = [VersionName(trainer_epoch=1, version=1), VersionName(trainer_epoch=2, version=2)]
    assert {who: [step.name for step in steps] for who, steps in looked.items()} == dict.fromkeys(looked, names)


def test_a_pause_is_longer_than_any_step(log: SyntheticLog) -> None:
    log.trained |= dict.fromkeys(range(9), 0)
    for version, at in ((1, 100.0), (2, 400.0)):
        log.step(version, at=at)
    log.step(2, epoch=2, resumed=True, at=690.0)  # it was started again
    log.step(3, epoch=2, at=700.0)
    log.step(3, epoch=3, resumed=True, at=5000.0)
    log.step(4, epoch=3, at=5010.0)
    history = read_history(Log(log.transport))
    assert history.pauses == ((700.0, 5000.0),)
    assert [history.at_work_s(at) for at in (400.0, 700.0, 3000.0, 5000.0, 5010.0)] == [400, 700, 700, 700, 710]


def test_a_trainer_that_only_started(log: SyntheticLog) -> None:
    history = read_history(Log(log.transport))
    assert (history.version, history.steps, history.resumes) == (0, (), ())


def test_records_that_cannot_be_decoded_are_left_out(log: SyntheticLog) -> None:
    train(log, 0.1)
    log.put_raw(NewRecord("steps", 0, b"?", b"?", (("contract", b"step_record"),)))
    assert read_history(Log(log.transport)).rewards() == [0.1]


# --------------------------------------------------------------------------------------------- status


def test_it_says_what_rollouts_died_of(log: SyntheticLog, tmp_path: Path) -> None:
    def letter(offset: int, reason: str, detail: str) -> DeadLetter:
        return DeadLetter(topic="rollouts", partition=0, offset=offset, key=None, value=None, headers=(),
                          role="verifier", reason=reason, detail=detail, tries=3)  # fmt: skip

    tracebacks = [f"Traceback:\n  in score\nValueError: cannot judge {number}" for number in range(3)]
    log.put("dead", *(letter(offset, "error", detail) for offset, detail in enumerate(tracebacks)))
    log.put("dead", letter(2, "error", tracebacks[2]))  # a twin
    log.put("dead", letter(3, "failed", "environment mine:Shop: reply: KeyError('price')"))
    for place in range(9):  # what they quote is data
        log.put("dead", letter(10 + place, "error", f"ValueError: no int with base 10: '{'a' * place}7'"))
    for place, column in enumerate(("unit", "level", "name", "name")):  # and here names
        log.put("dead", letter(30 + place, "invalid", f"KeyError: '{column}'"))
    kinds = [(kind.reason, kind.error, kind.count) for kind in error_kinds(read_letters(Log(log.transport)))]
    assert kinds == [
        ("error", "ValueError: no int with base 10: '...'", 9),
        ("error", "ValueError: cannot judge N", 3),
        ("invalid", "KeyError: 'name'", 2),
        ("failed", "environment mine:Shop: reply: KeyError('price')", 1),
        ("invalid", "KeyError: 'unit'", 1),
        ("invalid", "KeyError: 'level'", 1),
    ]
    found = status(log, tmp_path)
    assert [kind["count"] for kind in found.to_json()["dead_errors"]] == [9, 3, 2, 1, 1]
    assert found.to_json()["dead_errors"][1] == {"reason": "error", "error": "ValueError: cannot judge N", "count": 3}
    lines = [line.strip() for line in found.to_text().splitlines()]
    assert "died of       ValueError: cannot judge N (3 error)" in lines
    assert "died of       something else (1): `rftstream dead list RUN`" in lines


def test_a_run_in_the_middle(log: SyntheticLog, tmp_path: Path) -> None:
    log.flow(0, 1, 2)
    log.admit(3)
    log.batch(0, [0])
    log.batch(1, [1])
    log.decide(2, GroupResult.filtered)
    log.step(1, metrics={"reward": 0.25})
    log.put("evals", evaluation(0, 0.5), evaluation(1, 0.4))
    first = Claim(role="trainer", epoch=1, host="h", pid=1, process="trainer-0", claimed_at=0.0)
    log.put("control", first, replace(first, epoch=2, pid=2, process="trainer-1", claimed_at=1.0))
    log.put("dead", DeadLetter(topic="rollouts", partition=0, offset=0, key=None, value=None, headers=(),
                               role="verifier", reason="timeout", detail="", tries=3))  # fmt: skip
    log.passed("feeder", "steps", 1, metadata=json.dumps({"admitted": 4, "left_out": {"sums": 2}}))
    found = status(log, tmp_path).to_json()
    assert [found[name] for name in ("state", "version", "step", "steps")] == ["stopped", 1, 1, 8]
    assert found["reward"] == {"last": 0.25, "mean_10": 0.25}
    assert "of the last" not in status(log, tmp_path).to_text()
    log.trained[2] = 2
    log.step(2, metrics={"reward": 0.75})
    text = status(log, tmp_path).to_text()
    assert "0.750, mean of the last 2 steps 0.500" in text and "up to 8 on tasks, 6 on" in text
    assert "; 1 group without an outcome, and `rftstream audit` says" in text
    assert found["groups"] == {"admitted": 4, "trained": 1, "batched": 2, "filtered": 1, "expired": 0, "dead": 0}
    assert found["lag"] == {"tasks": 8, "rollouts": 6, "verified": 6, "batches": 1}
    assert (found["dead_letters"], found["left_out"]) == ({"timeout": 1}, 2)
    assert found["evaluations"]["held-out"]["newest"]["version"] == 1
    assert found["evaluations"]["held-out"]["best"] == {
        "version": 0, "num_tasks": 5, "num_samples": 1, "num_unscored": 0, "mean": 0.5,
    }  # fmt: skip
    assert [(claim["process"], claim["epoch"]) for claim in found["claims"]] == [
        ("trainer-1", 2), ("played-feeder", 1), ("played-buffer", 1), ("played-evaluator", 1),
    ]  # fmt: skip


def test_why_most_groups_were_filtered(log: SyntheticLog, tmp_path: Path) -> None:
    log.flow(0, 1, 2, 3)
    log.batch(0, [0])
    for group in (1, 2, 3):
        log.decide(group, GroupResult.filtered, reason="zero_variance" if group < 3 else "overlong")
    found = status(log, tmp_path)
    assert found.to_json()["filtered"] == {"zero_variance": 2, "overlong": 1}
    lines = [re.sub(" +", " ", line.strip()) for line in found.to_text().splitlines()]
    assert "filtered 75% of the decided groups; of the newest of these 67% zero_variance, 33% overlong" in lines
    assert any(line.startswith("look at zero_variance: all rewards of a group were equal") for line in lines)
    (trouble,) = what_is_wrong(found, now=0.0)
    assert (trouble.title, trouble.severe) == (
        "much is filtered",
        False,
    ) and "75% of the decided groups" in trouble.text


def test_what_judges_cost_is_summed_over_steps(log: SyntheticLog, tmp_path: Path) -> None:
    assert "for the rollouts of batches" not in status(log, tmp_path).to_text()
    for version, requests in enumerate([8.0, 1200.0], start=1):
        log.trained[version] = version
        log.step(version, metrics={"reward": 0.5, "spent/requests": requests, "spent/money": 0.25})
    told = status(log, tmp_path)
    assert told.to_json()["spent"] == {"requests": 1208.0, "money": 0.5}
    assert re.search(r"judges +0\.500 money, 1,208 requests for the rollouts of batches\n", told.to_text())


def test_what_was_trained_is_told_by_its_age(log: SyntheticLog, tmp_path: Path) -> None:
    assert "of trained tokens" not in status(log, tmp_path).to_text()
    for version, staleness in enumerate([((1200,), (4,)), ((412, 0, 96), (3, 0, 1))], start=1):
        log.trained[version] = version
        log.step(version, staleness=staleness)
    told = status(log, tmp_path)
    assert told.to_json()["staleness"] == {"tokens": [1612, 0, 96], "groups": [7, 0, 1]}
    assert re.search(r"staleness +of trained tokens: 1,612 at 0, 96 at 2\n", told.to_text())


def test_states(log: SyntheticLog, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.held():
        assert status(log, tmp_path).state == "running"
        log.put("control", RunState(state=DesiredState.paused, by="me", reason="lunch"))
        assert status(log, tmp_path).state == "paused"
        assert "paused" in status(log, tmp_path).to_text()
    log.put("control", RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=8), finished_at=5.0))
    assert status(log, tmp_path).state == "finished"
    assert ": steps" in status(log, tmp_path).to_text()
    log.put_raw(NewRecord("control", 0, b"finished", None), NewRecord("control", 0, b"state", None))
    assert status(log, tmp_path).state == "stopped"
    assert "rftstream resume" in status(log, tmp_path).to_text()


NOTES = """2026-01-31 11:00:00.000 INFO    run begins pid=1
2026-01-31 11:30:00.000 INFO    run ended by=SIGTERM
2026-01-31 12:00:00.000 INFO    run begins pid=2
2026-01-31 12:10:00.000 WARNING run trainer-0 ended (killed by SIGKILL); starting again in 0.2 s
"""


def noted(folder: Path, *lines: str) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "run.log").write_text("\n".join([*NOTES.splitlines(), *lines, ""]))


@pytest.mark.parametrize(
    ("line", "by", "said"),
    [
        (None, "kill", "a kill: no word of its end in logs/run.log"),
        ("INFO    run ended by=SIGINT", "SIGINT", "ctrl-C, 2026-01-31 12:30:00"),
        ("INFO    run ended by=SIGTERM", "SIGTERM", "SIGTERM, 2026-01-31 12:30:00"),
        ('ERROR   run ended by=error error="trainer-0: \\"x\\" is gone"', "error",
         'an error, 2026-01-31 12:30:00: trainer-0: "x" is gone'),
        ('ERROR   run ended by=error exit_code=2 error="put it back, or begin a new run"', "error",
         "an error, 2026-01-31 12:30:00: put it back, or begin a new run"),
        ('ERROR   run ended by=error exit_code=7 error="tasks: is gone"', "error",
         "an error, 2026-01-31 12:30:00: tasks: is gone"),
    ],
)  # fmt: skip
def test_what_stopped_a_run(log: SyntheticLog, tmp_path: Path, line: str | None, by: str, said: str) -> None:
    assert status(log, tmp_path).stopped is None, "nobody has begun it here"
    noted(tmp_path, *(() if line is None else (f"2026-01-31 12:30:00.000 {line}",)))
    found = status(log, tmp_path)
    assert found.to_json()["stopped"]["by"] == by
    assert found.failed is (by == "error"), "only that pages somebody"
    assert f"stopped by    {said}" in found.to_text()
    assert ("`rftstream resume" in found.to_text()) is ("exit_code=7" not in str(line))
    with RunFolder(tmp_path).held():
        assert status(log, tmp_path).stopped is None
    log.put("control", RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=8), finished_at=5.0))
    assert status(log, tmp_path).stopped is None


def test_an_error_is_noted_in_one_line_without_its_secrets(
    log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "open-sesame")
    notes = notes_file(RunFolder(tmp_path))
    notes.warning("changed: trainer.lr 1 -> 2")
    with pytest.raises(OSError, match="sesame"), noting_failure(notes):
        raise OSError("a\nlong story\nkafka://me:hush@host refused open-sesame")
    for handler in notes.handlers:
        handler.close()
    kept = (tmp_path / "logs" / "run.log").read_text()
    state = status(log, tmp_path)
    assert re.search(r"changed +\d.*: trainer.lr 1 -> 2\n", state.to_text()), "what `resume` changed"
    assert (found := state.stopped) is not None
    assert found.error == "kafka://***@host refused ***"
    assert not {"hush", "sesame"} & set(re.findall(r"\w+", kept)), kept


def test_workers_are_asked_and_ghosts_are_named(log: SyntheticLog, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    health = Health()
    health.update({"role": "explorer", "process": "explorer-0", "state": "running"})
    server = HealthServer(health, port=0, host="127.0.0.1", file=logs / "explorer-0.port")
    beyond = Health()
    beyond.update({"role": "trainer", "process": "trainer-1", "state": "running"})
    reachable = HealthServer(beyond, port=0, file=logs / "trainer-1.port")
    port, _, who = (logs / "trainer-1.port").read_text().split()
    try:
        (logs / "trainer-1.port").write_text(
            f"{port} localhost {who}\n"
        )  # as one on another host, which lets others ask
        (logs / "ghost.port").write_text("1\n")
        (logs / "torn.port").write_text("")
        (logs / "far.port").write_text(f"{server.port} another-host\n")
        (logs / "other.port").write_text(f"{server.port}\n")  # the port is somebody else's by now
        found = {worker.process: worker for worker in status(log, tmp_path).workers}
    finally:
        server.close()
        reachable.close()
    assert set(found) == {"explorer-0", "ghost", "other", "far", "trainer-1"}
    said = [worker_sentence(found[name], 0.0).partition(":")[0] for name in ("ghost", "other")]
    assert said == ["gone", "does not answer"], "who was killed does not hang"
    assert (found["trainer-1"].host, worker_sentence(found["trainer-1"], 0.0)) == ("localhost", "running")
    far = "on another-host, which is not asked from here"
    assert worker_sentence(found["far"], 0.0) == worker_sentence(found["far"], 0.0, {}) == far
    explorer = replace(found["far"], process="explorer-7")
    assert replace(explorer, process="explorer-gpu-2-0").role == explorer.role == "explorer"
    assert worker_sentence(explorer, 0.0, {"explorer": ["explorer-8"]}) == f"{far}; the log does not hear it"
    assert worker_sentence(explorer, 0.0, {"explorer": ["explorer-7 at x"]}) == f"{far}; the log hears it"
    assert found["explorer-0"].health is not None
    assert found["explorer-0"].health["state"] == "running"
    assert found["ghost"].health is None
    assert found["other"].health is None
    assert {name for name, worker in found.items() if not worker.asked} == {"far"}


def test_workers_that_are_still_to_come_are_listed(log: SyntheticLog, tmp_path: Path) -> None:
    """Of a run that begins, one answers and loads, and those without a port start. At its end nobody starts."""
    loading = HealthServer(Health(), port=0, host="127.0.0.1", file=tmp_path / "logs" / "explorer-0.port")
    others = {f"{role}-0" for role in ("feeder", "verifier", "buffer", "trainer")}
    try:
        with RunFolder(tmp_path).held():
            begun = status(log, tmp_path)
            log.put("control", TasksEnded(admitted=3, reason="steps"))
            ended = status(log, tmp_path)
    finally:
        loading.close()
    said = {worker.process: worker_sentence(worker, 0.0) for worker in begun.workers}
    assert said.pop("explorer-0").startswith("loading for ")
    assert said == dict.fromkeys(others, "starting")
    assert re.search(r"\n  trainer-0 +starting\n", begun.to_text())
    assert "no answer" not in [trouble.title for trouble in what_is_wrong(begun, now=0.0)]
    assert [worker.process for worker in ended.workers] == ["explorer-0"]


@pytest.mark.parametrize(
    ("host", "pid", "later_s", "state", "says"),
    [
        ("n1", 7, 4.0, "running", "running by workers on n1 (newest record 4 s ago); no `run` or `resume` supervises"),
        ("n1", 7, 1800.0, "stopped", "by workers on n1 (newest record 30 min ago); if they have ended, start them"),
        ("here", 0, 4.0, "running", "running by workers on "),
        ("here", 2**22 + 1, 4.0, "stopped", "supervises it here; `rftstream resume` of its run files"),
    ],
    ids=["elsewhere", "elsewhere and silent", "this process", "a process that is gone"],
)
def test_a_run_goes_on_by_workers_that_somebody_else_started(
    log: SyntheticLog, tmp_path: Path, host: str, pid: int, later_s: float, state: str, says: str
) -> None:
    host, pid = socket.gethostname() if host == "here" else host, pid or os.getpid()
    log.put("control", Claim(role="trainer", epoch=2, host=host, pid=pid, process="trainer-n1", claimed_at=time.time()))
    written = max(record.timestamp_s for record in Log(log.transport).read("control"))
    run = OpenRun(RunFolder(tmp_path), config(), log.transport)
    found = read_status(run, now=written + later_s)
    assert found.state == state
    assert says in found.to_text(now=written + later_s)


def test_what_a_worker_is_at_is_told_in_words() -> None:
    common = {"role": "explorer", "process": "explorer-0", "last_progress_at": 90.0, "failures_in_a_row": 0}
    explorer = {**common, "ok": True, "silent_s": 0.01, "state": "running", "version": 1200, "in_hand": 40,
                "sampling": 1, "waiting": 0, "paused": 0}  # fmt: skip
    said = "version 1,200, 40 records in hand, samples 1 rollout, 0 rollouts waiting"
    assert health_sentence(explorer, 100.0) == said
    assert health_sentence({**explorer, "last_progress_at": 100.0}, 400.0) == f"{said}, nothing done for 5 min"
    failing = {**explorer, "state": "draining", "failures_in_a_row": 2, "failure": "no room", "paused": 3,
               "own_field": 7}  # fmt: skip
    assert health_sentence(failing, 100.0) == (
        f"draining, {said}, 3 rollouts set aside, 2 failures in a row, no room, own field 7"
    )
    stuck = health_sentence({**explorer, "ok": False, "silent_s": 200.0}, 100.0)
    assert stuck == f"STUCK: its loop has not come round for 3 min; {said}"
    assert health_sentence({**common, "role": "evaluator", "evaluating": None}, 100.0) == "nothing to evaluate"
    assert health_sentence(None, 100.0) == "does not answer"


def test_who_has_a_workers_port_by_now_may_speak_anything(log: SyntheticLog, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-mine\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (tmp_path / "logs" / "explorer-0.port").write_text(str(server.getsockname()[1]))
        (worker,) = status(log, tmp_path).workers
        thread.join()
    assert (worker.process, worker.health) == ("explorer-0", None)


def test_workers_are_not_asked_by_way_of_a_proxy(
    log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(urllib.request, "_opener", None)
    server = HealthServer(Health(), port=0, host="127.0.0.1", file=tmp_path / "logs" / "explorer-0.port")
    try:
        (worker,) = status(log, tmp_path).workers
    finally:
        server.close()
    assert worker.health is not None


def test_the_best_version_is_named_with_its_weights_until_they_are_deleted(log: SyntheticLog, tmp_path: Path) -> None:
    log.put("weights", *map(announced, range(3)))
    train(log, 0.0, 0.0, 0.0)
    log.put("evals", evaluation(1, 0.5), evaluation(2, 0.75), replace(evaluation(2, 0.25), evaluation="other"))
    (best,) = status(log, tmp_path).to_json()["best"]
    assert (best["version"], best["means"]) == (2, {"held-out": 0.75, "other": 0.25})
    assert best["weights"] == f"{tmp_path}/weights/o2"
    assert best["export"] == "rftstream weights export RUN --version 2", "this host has no folder of the run"
    shown = " ".join(status(log, tmp_path).to_text().split())
    assert f"best version 2 (held-out 0.750, other 0.250) in {tmp_path}/weights/o2: `{best['export']}`" in shown
    log.put("weights", replace(announced(3), gone=tuple(announced(version).name for version in range(3))))
    assert status(log, tmp_path).best[0].weights is None
    assert "version 2 (held-out 0.750, other 0.250), whose weights are deleted" in status(log, tmp_path).to_text()
    log.put("evals", evaluation(3, 0.9))
    (tmp_path / "final").mkdir()
    log.put("evals", *(replace(evaluation(version, 0.5), evaluation="equal") for version in range(3)))
    assert [(one.version, one.weights) for one in status(log, tmp_path).best] == [(2, None), (3, f"{tmp_path}/final")]
    assert "0.500 at version 2, the same for all 3 versions, so none is best" in status(log, tmp_path).to_text()


def test_the_best_of_rewards_below_0_is_not_a_version_without_any(log: SyntheticLog, tmp_path: Path) -> None:
    train(log, 0.0, 0.0)
    unscored = replace(evaluation(0, 0.0), metrics={"length_mean": 3.0}, num_unscored=5)
    log.put("evals", unscored, evaluation(1, -0.5), evaluation(2, -0.75))
    text = status(log, tmp_path).to_text()
    assert "eval held-out  -0.750 at version 2, best -0.500 at version 1; 5 problems\n" in text and "speed" not in text
    log.put("evals", replace(evaluation(2, 1.0), num_unscored=4))
    text = status(log, tmp_path).to_text()
    assert "1 (4 of 5 samples unscored) at version 2, best 1 (4 of 5 samples unscored) at version 2" in text
    log.put("evals", replace(evaluation(2, 0.2), metrics={"mean": 0.2, "pass@1": 0.2}))
    log.trained[3] = 3
    log.step(3, at=103.0, metrics={"wait_s": 3.0, "step_s": 1.0, "rollouts": 16.0, "tokens": 64.0})
    text = status(log, tmp_path).to_text()
    assert "best 0.200 at version 2; 5 problems: standard error 0.179\n" in text
    assert "the trainer waits for batches 75% of its time, trains 25%, publishes 0% (last 3 steps)\n" in text
    assert re.search(r"speed +8 rollouts/s, 32 trained tokens/s \(last 2 s of steps\)\n", text)


def test_a_folder_that_is_deleted_meanwhile_is_passed_over(
    log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trainer deletes its old checkpoints."""
    (tmp_path / "weights" / "gone").mkdir(parents=True)
    (tmp_path / "config.toml").write_bytes(b"x")
    look = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path).name == "gone":
            Path(path).rmdir()
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert status(log, tmp_path).disk_bytes == {"other": 1}


def test_disk_by_folder(log: SyntheticLog, tmp_path: Path) -> None:
    (tmp_path / "weights" / "deep").mkdir(parents=True)
    (tmp_path / "weights" / "deep" / "a").write_bytes(b"x" * 1_500)
    (tmp_path / "config.toml").write_bytes(b"x")
    found = status(log, tmp_path)
    assert found.disk_bytes == {"other": 1, "weights": 1_500}
    assert "1.5 kB (other 1 B, weights 1.5 kB)" in found.to_text()


@pytest.mark.parametrize(
    ("free_bytes", "told"),
    [
        (72_000_000_000, None),
        (30_000_000_000, "30.0 GB on the disk of the run folder, enough for about 30.0 h of this run"),
        (4_000_000_000, "4.0 GB on the disk of the run folder, enough for about 4.0 h of this run"),
    ],
)
def test_a_disk_that_will_be_full_is_told_ahead(
    log: SyntheticLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, told: str | None
) -> None:
    """This run has written 1 GB in an hour; its model was there before."""
    for name, num_bytes in (("log", 900_000_000), ("weights", 100_000_000), ("model", 5_000_000_000)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "file").open("wb") as file:
            file.truncate(num_bytes)
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert status(log, tmp_path).to_json()["disk_room"] == {"free_bytes": free_bytes, "hours_left": None}
    log.flow(0, 1)
    log.flow(1, 1)
    for batch in range(2):
        log.flow(batch)
        log.batch(batch, [batch])
        log.step(batch + 1, at=1000.0 + 3600.0 * batch)
    found = replace(status(log, tmp_path), num_steps=None)
    assert found.to_json()["disk_room"] == {"free_bytes": free_bytes, "hours_left": pytest.approx(free_bytes / 1e9)}
    assert (told is None) is ("on the disk of the run folder" not in found.to_text())
    near_the_end = replace(found, num_steps=4).to_text()
    assert ("on the disk" in near_the_end) is (free_bytes < 5e9), "two more steps of 1 GB each"
    for batch in (2, 3, 4):
        log.trained[batch + 1] = 2
        log.step(batch + 1, at=1_000_000.0 + 3600.0 * batch)  # after a pause of days
    paused = status(log, tmp_path).to_json()["disk_room"]["hours_left"]
    assert paused == pytest.approx(4 * free_bytes / 1e9), "four hours of steps for the same bytes"
    if told is not None:
        assert told in found.to_text()


# --------------------------------------------------------------------------------------------- what does not go on


def test_a_live_run_in_which_nothing_moves_says_for_what_it_waits(log: SyntheticLog, tmp_path: Path) -> None:
    log.admit(0, 1)
    run = OpenRun(RunFolder(tmp_path), config(), log.transport)
    assert read_status(run, now=240.0).standstill is None, "nobody is at work here"
    with RunFolder(tmp_path).held():
        assert read_status(run, now=100.0).standstill is None
        found = read_status(run, now=240.0)
        log.put("control", RunState(state=DesiredState.paused, by="me", reason="lunch"))
        assert read_status(run, now=999.0).standstill is None
    said = found.to_json()["standstill"]
    assert (said["still_s"], said["published"], said["taken"], said["behind_s"]) == (240.0, None, None, None)
    assert said["waits_for"][0] == "4 tasks wait for an explorer, and no explorer is alive"
    assert "stands still  nothing has moved for 4 min: 4 tasks wait for an explorer, and no" in found.to_text()


def test_versions_that_explorers_do_not_take_over(log: SyntheticLog, tmp_path: Path) -> None:
    train(log, *[0.5] * 4)
    log.trained[5] = 5
    log.step(5, at=500.0)
    health = Health()
    health.update({"role": "explorer", "process": "explorer-0", "version": 2})
    server = HealthServer(health, port=0, host="127.0.0.1", file=tmp_path / "logs" / "explorer-0.port")
    try:
        found = read_status(OpenRun(RunFolder(tmp_path), config(), log.transport), now=520.0)
    finally:
        server.close()
    said = found.to_json()["standstill"]
    assert (said["still_s"], said["published"], said["taken"], said["behind_s"]) == (None, 5, 2, 417.0)
    assert "explorers are at 2 for 6 min" in found.to_text()


def test_steps_without_signal_are_told_with_their_likely_causes(log: SyntheticLog, tmp_path: Path) -> None:
    train(log, 0.0)
    assert status(log, tmp_path).to_json()["no_signal"] is None
    log.trained[2] = 2
    log.step(2, metrics={"reward": 0.0, "reward_std": 0.0, "truncated_share": 0.9, "steps_without_signal": 12.0})
    found = status(log, tmp_path)
    assert found.to_json()["no_signal"]["steps"] == 12
    text = " ".join(found.to_text().split())
    assert "no signal for 12 steps: every reward is 0. Likely causes: the reward never matches" in text
    assert [sign.kind for sign in found.training_signs] == ["truncated"]
    assert "look at completions truncated: 90% of the newest completions" in text
    titles = [one.title for one in what_is_wrong(found, now=0.0)]
    assert titles[:2] == ["no learning signal", "truncated: completions"], "in the studio"


def test_what_others_deleted_is_said(log: SyntheticLog, tmp_path: Path) -> None:
    assert status(log, tmp_path).lost == {}
    log.flow(0)
    log.transport.admin.delete_before({TopicPartition("verified", 0): 2})
    found = status(log, tmp_path)
    assert found.to_json()["lost"] == {"verified": 2}
    assert "lost          offsets 2 of verified were deleted, and not by the run" in found.to_text()
