"""A worker process: waiting for its run, signals, health, logs."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, TransportError
from rftstream.launch import host, joining
from rftstream.launch import logging as logs
from rftstream.launch.health import Health, HealthServer, trained_again
from rftstream.models.device_lock import FileLock
from rftstream.models.folders.folder import prepare_model
from rftstream.preflight.plan import Purpose, plan
from rftstream.runs.folder import RunFolder, open_transport
from rftstream.runs.making.create import write_config
from rftstream.runs.manifest import check_worker, data_digests, digests_for, make_manifest
from rftstream.sandbox.local import LocalBackend
from rftstream.sandbox.server import SandboxServer
from rftstream.testing.played import played_records
from tests.suite.each import each
from tests.unit.tiny_run import make_run, write_run_file
from tests.waiting import wait_until


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


@pytest.fixture
def restored_signals() -> object:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def start_worker(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rftstream", "worker", *arguments], stderr=subprocess.PIPE, text=True
    )


# ------------------------------------------------------------------------------------------------ a worker by hand


@pytest.mark.slow
def test_a_worker_waits_for_its_run_works_and_leaves_on_sigterm(run_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "tiny")
    worker = start_worker(str(run_file), "--role", "feeder", "--process", "mine", "--metrics-port", "0")
    assert worker.stderr is not None
    with worker.stderr:
        make_run(folder, run_file)
        log = folder.logs / "mine.log"
        wait_until(lambda: log.exists() and "in force" in log.read_text())
        port = int((folder.logs / "mine.port").read_text().partition(" ")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"rftstream_records_out_total" in answer.read()

        def working() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                values = json.loads(answer.read())
            return bool(values["ok"] and values.get("role") == "feeder" and values.get("epoch") == 1)

        wait_until(working)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(120) == 0
        assert "mine left: stopped" in worker.stderr.read()
        assert "mine left: stopped" in log.read_text()
    assert not (folder.logs / "mine.port").exists()


@pytest.mark.slow
def test_a_worker_waits_no_longer_than_it_was_told(run_file: Path, tmp_path: Path) -> None:
    worker = start_worker(str(run_file), "--role", "trainer", "--wait-s", "0.2")
    _, error = worker.communicate(timeout=120)
    assert worker.returncode == 3
    assert error.startswith("rftstream: waited 0.2 s for a run of ")


@pytest.mark.slow
def test_other_roles_wait_for_the_first_record_of_the_run(run_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "tiny")
    make_run(folder, run_file)
    worker = start_worker("--run-dir", str(folder.path), "--role", "buffer", "--wait-s", "0.3")
    _, error = worker.communicate(timeout=120)
    assert worker.returncode == 3
    assert "is a feeder alive?" in error


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("verifier", {"trainer__shares": 2, "run__seed": 7}, "trainer.shares 1 -> 2; run.seed 0 -> 7; start it with"),
        ("buffer", {"tasksets": {"others": {"source": "arithmetic"}}}, "tasksets ['sums'] -> ['others']"),
        ("trainer", {"model__dtype": "float32"}, "model.dtype 'bfloat16' -> 'float32'"),
        ("trainer", {"model__make__width": 32}, "another model: model.make.width 16 -> 32"),
        ("explorer", {"model__make__characters": "0123456789+-*/= ."}, "another tokenizer: model.make.characters"),
        (
            "evaluator",
            {"model__chat_template": "{{ messages }}"},
            "another chat_template: model.chat_template unset",
        ),
        ("explorer", {"tasksets__sums__chat_template": "{{ 1 }}"}, "another chat_template.sums: tasksets.sums.chat_te"),
        ("explorer", {"explorer__max_concurrent": 3, "trainer__lr": 1.0, "model__make__width": 32}, ""),
    ],
)
def test_a_worker_with_another_run_file_than_the_run_is_refused(
    tmp_path: Path, role: str, change: dict[str, object], said: str
) -> None:
    """As on a host that has a run file of its own."""
    run = loader.from_dict({
        "run": {"name": "run", "steps": 3}, "model": {"make": {"layers": 1, "width": 16, "heads": 2}},
        "tasksets": {"sums": {"source": "arithmetic", "chat_template": "{{ 0 }}"}},
    })  # fmt: skip
    digests = data_digests(run, prepare_model(run.model, tmp_path / "model", 0))
    manifest = make_manifest(run, "run", digests, 1.0)
    theirs = loader.replace(run, **change)

    def check() -> None:
        used = digests_for(role, theirs, lambda: prepare_model(theirs.model, tmp_path / "there", theirs.run.seed))
        check_worker(manifest, theirs, used)

    if not said:
        check()  # what may differ: weights are announced to an explorer
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        check()


@pytest.mark.slow
def test_a_refused_worker_says_why_and_exits_2(run_file: Path, tmp_path: Path) -> None:
    config, folder = loader.load([run_file], env={}), RunFolder(tmp_path / "run")
    make_run(folder, config)
    transport = open_transport(config, folder)
    producer = transport.producer("feeder")
    producer.start()
    digests = data_digests(config, prepare_model(config.model, folder.model, 0))
    producer.commit([codec.to_record(make_manifest(config, "run", digests, 1.0), "control", 0, run="run")])
    producer.close()
    transport.close()
    write_config(loader.replace(config, run__seed=7), folder)
    worker = start_worker("--run-dir", str(folder.path), "--role", "trainer")
    _, told = worker.communicate(timeout=120)
    assert worker.returncode == 2, told
    assert "this worker was given other settings than the run was started with: run.seed 0 -> 7" in told


@pytest.mark.slow
def test_a_second_signal_ends_a_worker_at_once(run_file: Path, tmp_path: Path) -> None:
    """The first one is remembered while the worker hangs in a slice of work. One that came twice by two ways is one."""
    script = """
import os, signal
from rftstream.launch.host import Stop
stop = Stop()
os.kill(os.getpid(), signal.SIGTERM)
assert stop()
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGINT)
raise SystemExit("still there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"goes on\n", b"")


@pytest.mark.slow
def test_a_signal_ends_a_worker_that_still_loads_at_once(run_file: Path, tmp_path: Path) -> None:
    """Its modules and model take minutes on a busy machine, longer than a supervisor waits for those who leave."""
    make_run(folder := RunFolder(tmp_path / "runs" / "tiny"), run_file)
    script = f"""
import os, signal
from pathlib import Path
from rftstream.launch import host, joining
def plan(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit("still there")
host.plan = plan
host.run_worker([], Path({str(folder.path)!r}), "verifier", say=print)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, text=True)
    assert done.returncode == 0 and "left: stopped while it was loading" in done.stderr, done.stderr


# ------------------------------------------------------------------------------------------------ which run


def test_join_waits_until_there_is_a_run(run_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "tiny")

    def stop() -> bool:
        """Is asked after each look that found no run."""
        make_run(folder, run_file)
        return False

    _, found = joining.join([run_file], None, role="feeder", wait_s=300.0, stop=stop, say=lambda text: None)
    assert found == folder


def test_join_takes_the_newest_run_that_is_not_finished(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_signals: object
) -> None:
    config = loader.load([run_file])
    said: list[str] = []

    def join() -> RunFolder:
        _, folder = joining.join([run_file], None, role="explorer", wait_s=0.1, stop=host.Stop(), say=said.append)
        return folder

    first = RunFolder(tmp_path / "runs" / "tiny")
    make_run(first, config)
    assert join() == first
    own, stop = first.path / "config.toml", host.Stop()
    _, found = joining.join([own], None, role="explorer", wait_s=0.1, stop=stop, say=said.append)
    assert found == first, "the run's own config means the run"
    transport = open_transport(config, first)
    finished = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=3), finished_at=0.0)
    producer = transport.producer("test")
    producer.start()
    producer.commit(played_records(transport, "tiny", [("control", 0, finished)]))
    transport.close()
    with pytest.raises(
        TransportError, match=r"waited 0\.1 s for a run of .* under .*/runs \(embedded log\) \(tiny has ended, "
    ):
        join()
    with monkeypatch.context() as patch:
        patch.setattr(joining, "names_on_log", lambda config, user: {"sums", "other"})
        patch.setattr(joining, "candidates", lambda config, user: [])
        with pytest.raises(TransportError, match=r"\(none is called 'tiny'; runs there: other, sums\)"):
            join()
    with first.held():
        assert join() == first, "somebody is just bringing it to its end"
    second = RunFolder(tmp_path / "runs" / "tiny-2")
    make_run(second, config)
    assert join() == second


def test_join_reads_the_run_s_own_config(run_file: Path, tmp_path: Path, restored_signals: object) -> None:
    folder = RunFolder(tmp_path / "elsewhere")
    make_run(folder, loader.load([run_file], sets=["trainer.lr=0.5"]))
    config, _ = joining.join([], folder.path, role="explorer", wait_s=0.1, stop=host.Stop(), say=lambda text: None)
    assert config.trainer.lr == 0.5


# ------------------------------------------------------------------------------------------------ health


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_health_turns_bad_when_the_loop_hangs(tmp_path: Path) -> None:
    now = 0.0
    health = Health(stuck_after_s=60.0, clock=lambda: now)
    server = HealthServer(health, port=0, host="127.0.0.1")
    try:
        health.update({"role": "trainer", "version": 7})
        health.beat()
        status, body = get(server.port, "/health")
        assert (status, json.loads(body)["version"]) == (200, 7)
        now = 61.0
        assert get(server.port, "/health")[0] == 503
        health.beat()
        assert get(server.port, "/health")[0] == 200
        assert get(server.port, "/nothing")[0] == 404
        with pytest.raises(ConfigError, match=f"--metrics-port {server.port}: .*take another port"):
            HealthServer(health, port=server.port, host="127.0.0.1")
    finally:
        server.close()


def test_a_closed_server_answers_nobody_and_leaves_no_thread() -> None:
    """One whose listening socket is closed under it would go round without end when somebody calls."""
    server = HealthServer(Health(), port=0, host="127.0.0.1")
    server.close()
    assert not any(thread.name == "health" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.parametrize("kind", ["health", "sandbox"])
def test_a_client_that_hangs_up_leaves_no_traceback(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    server: HealthServer | SandboxServer
    if kind == "health":
        server = HealthServer(Health(), port=0, host="127.0.0.1")
    else:
        server = SandboxServer(("127.0.0.1", 0), LocalBackend(slots=1))
    client = socket.create_connection(("127.0.0.1", server.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(b"GET /heal")
    wait_until(lambda: len(server._listener._connections) == 1)
    client.close()
    wait_until(lambda: not server._listener._connections)
    server.close()
    assert capsys.readouterr().err == ""


@each(("values", "said"), [
    ({}, "it has not begun"),
    ({"version": None, "partitions": 4}, "it has no weights yet"),
    ({"version": 3, "partitions": 0}, "it owns no partitions"),
    ({"version": 3, "partitions": 4}, "ready"),
    ({"epoch": 1}, "ready"),
])  # fmt: skip
def test_a_worker_is_ready_when_it_does_its_work(values: dict[str, object], said: str) -> None:
    health = Health()
    health.update(values)
    server = HealthServer(health, port=0, host="127.0.0.1")
    try:
        assert get(server.port, "/readyz") == (200 if said == "ready" else 503, f"{said}\n".encode())
        assert get(server.port, "/livez")[0] == 200, "it is not started anew for that"
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------ logs


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("rftstream.x", logging.ERROR, "x.py", 1, message, None, None)
    vars(made).update(fields)
    return made


def test_what_a_successor_trains_again_is_told() -> None:
    said = ", and trains again what came after version 4 (trainer.checkpoint_every)"
    for health, expected in (
        ({"version": 7, "saved": 4}, said),
        ({"version": 4, "saved": 4}, ""),
        ({"version": 7}, ""),
    ):
        assert trained_again(health) == expected, health


def test_text_lines_carry_fields_and_no_secrets() -> None:
    line = logs.TextFormatter("trainer-0").format(
        record(
            "trained at https://me:hunter2@host/x and s3://hunter2@host",
            version=3, loss=0.123456789, path="a b", sasl_password="hunter2", token="hunter2", num_tokens=5,
        )
    )  # fmt: skip
    assert "hunter2" not in line
    assert line.endswith(
        " ERROR   trainer-0 trained at https://***@host/x and s3://***@host version=3 loss=0.123457 "
        'path="a b" sasl_password=*** token=*** num_tokens=5'
    )


def test_json_lines_are_objects() -> None:
    made = record("trained", version=3, api_key="hunter2", auth_token="hunter2", tokens=5, url="http://hunter2@host")
    try:
        raise OSError("no http://me:hunter2@host")
    except OSError:
        made.exc_info = sys.exc_info()
    line = json.loads(logs.JsonFormatter("trainer-0").format(made))
    assert line.pop("time") > 0 and line.pop("exception").endswith("OSError: no http://***@host")
    assert line == {
        "level": "error", "process": "trainer-0", "message": "trained", "version": 3, "api_key": "***",
        "auth_token": "***", "tokens": 5, "url": "http://***@host",
    }  # fmt: skip


def test_the_last_error_of_a_log_is_found_in_either_form(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("2026-01-01 00:00:00.000 ERROR   x old\n")
    since = file.stat().st_size
    assert logs.last_error(file) == "old"
    assert logs.last_error(file, since=since) is None
    with file.open("a") as log:
        log.write("2026-01-01 00:00:01.000 INFO    x begun\n2026-01-01 00:00:01.000 ERROR   x no room\nTraceback\n")
    assert logs.last_error(file, since=since) == "no room"
    torn = "2026-01-01 00:00:02.000 WARNING x no roo"
    file.write_text(f"{torn}2026-01-01 00:00:03.000 ERROR   x full\n")
    assert logs.last_error(file) == "full"
    file.write_text(json.dumps({"level": "critical", "message": "gone"}) + "\n{not json\n")
    assert logs.last_error(file) == "gone"
    file.write_text("Fatal Python error: Segmentation fault\n\n")
    assert logs.last_error(file) == "Fatal Python error: Segmentation fault"
    assert logs.last_error(tmp_path / "none.log") is None


def test_what_a_client_says_again_and_again_is_said_once_in_a_while() -> None:
    now = 0.0
    thinned = logs.Thinned(every_s=10.0, clock=lambda: now)
    made = record("none")

    def said(text: str, *, by: str = "kafka.net.manager") -> str | None:
        nonlocal made
        made = logging.LogRecord(by, logging.WARNING, "x.py", 1, "%s", (text,), None)
        # A file and stderr ask.
        kept = {thinned.filter(made) for _ in range(2)}
        assert len(kept) == 1
        return made.getMessage() if kept == {True} else None

    assert said("node 1 at 0x7f01: refused") == "node 1 at 0x7f01: refused"
    assert made.levelname == "INFO", "a client's trouble is told by who uses it"
    assert [said(f"node {number} at 0x8e0{number}: refused") for number in range(3)] == [None] * 3
    assert said("node 1 is ready") == "node 1 is ready"
    assert [said("refused", by="rftstream.transport") for _ in range(2)] == ["refused"] * 2
    assert (said("careful", by="torch"), made.levelname) == ("careful", "WARNING")
    now = 10.5
    assert said("node 4 at 0x9a: refused") == "node 4 at 0x9a: refused (and 3 more since the last such line)"
    assert said("node 5 at 0x9a: refused") is None
    now = 21.0
    assert said("node 4 at 0x9a: refused") == "node 4 at 0x9a: refused (and 1 more since the last such line)"
    thinned = logs.Thinned(echoes=False)
    assert (said("node 1: refused"), said("careful", by="torch")) == (None, "careful")


def test_a_worker_logs_what_its_kafka_client_says_and_the_exporter_does_not() -> None:
    """A worker with a supervisor has no file of its own: its stderr is one."""
    asked = """if True:
        import logging, sys
        from rftstream.launch.logging import setup
        setup("explorer-0", level="info", form="text", stream=sys.stdout)
        logging.getLogger("kafka.net").warning("worker: refused")
        setup("exporter", level="info", form="text", stream=sys.stdout, echoes=False)
        logging.getLogger("kafka.net").warning("exporter: refused")
        """
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert "worker: refused" in done.stdout and "exporter: refused" not in done.stdout


def test_troubles_are_told_once_a_minute(tmp_path: Path) -> None:
    file, now = tmp_path / "x.log", 0.0
    file.write_text("2026-01-01 00:00:00.000 ERROR   x of an earlier start\n")
    troubles = logs.Troubles(file, clock=lambda: now)

    def write(*lines: str) -> None:
        with file.open("a") as log:
            log.writelines(f"2026-01-01 00:00:00.000 {line}\n" for line in lines)

    write("INFO    x fine", "WARNING x no room; again in 5 s (failure 1)", "ERROR   x broken")
    assert troubles.new() == ["no room; again in 5 s (failure 1)", "broken"]
    write("WARNING x no room; again in 5 s (failure 2)")
    assert troubles.new() == []
    now = 61.0
    write("WARNING x no room; again in 5 s (failure 9)")
    assert troubles.new() == ["no room; again in 5 s (failure 9)"]
    troubles.said("gone")
    write("ERROR   x gone")
    assert troubles.new() == []
    names = [f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(143)]
    write(*(f"WARNING x sums/0/{n}: cannot judge '{name}' in a user's row" for n, name in enumerate(names)))
    assert [line.split("'")[1] for line in troubles.new()] == names[:3]
    now = 122.0
    assert troubles.new() == [f"sums/0/142: cannot judge '{names[-1]}' in a user's row (and 139 more like it)"]
    assert troubles.new() == []


def test_threads_are_limited_for_libraries_loaded_later(monkeypatch: pytest.MonkeyPatch, run_file: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
                 "TOKENIZERS_PARALLELISM"):  # fmt: skip
        monkeypatch.setenv(name, "64")
    plan(loader.load([run_file], sets=["trainer.threads=3"]), Purpose.join, role="trainer")
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert str(run_file.parent) in sys.path


def test_who_waits_for_a_device_looks_whether_it_is_to_leave(
    tmp_path: Path, run_file: Path, restored_signals: object
) -> None:
    """Recovering and building wait for it, outside of the loop that looks at signals."""
    stop = host.Stop()
    worker = host.Worker(
        config=loader.load([run_file]), folder=RunFolder(tmp_path), role="trainer", process="trainer-0",
        device=None, stop=stop, deadline_s=1.0, wait_s=1.0, parent=None,
    )  # fmt: skip
    holder = FileLock("cpu", folder=tmp_path)
    waiting = FileLock("cpu", folder=tmp_path, look=worker._look)
    assert holder.share()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(joining.StoppedError):
        waiting.wait_taken()
    for one in (holder, waiting):
        one.close()
