"""The supervisor: which exits are followed by what, deadlines, and that no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.contracts.control import Claim, RunFinished, TasksEnded
from rftstream.contracts.versions import VersionName
from rftstream.launch import supervisor as supervisors
from rftstream.launch.processes import Child, PlainSpawner, WorkerCommand
from rftstream.launch.supervisor import HoldingProcess, Supervisor, worker_commands
from rftstream.launch.zygote import ZygoteSpawner, is_supported
from rftstream.process_state import is_alive, process_state
from rftstream.runs.folder import RunFolder
from rftstream.service.control_view import ControlView
from tests.configs import small_run
from tests.waiting import wait_until


class StandInChild:
    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send(self, signum: int) -> None:
        self.signals.append(signum)


class StandInSpawner:
    def __init__(self) -> None:
        self.children: dict[str, list[StandInChild]] = {}

    def warm(self) -> None:
        pass

    def spawn(self, command: WorkerCommand) -> Child:
        child = StandInChild()
        self.children.setdefault(command.process, []).append(child)
        return child

    def newest(self, process: str) -> StandInChild:
        return self.children[process][-1]

    def close(self) -> None:
        pass


class Stage:
    """A supervisor over stand-ins, with a clock of its own."""

    def __init__(
        self, tmp_path: Path, roles: Sequence[str], *, lock_holder: Callable[[], HoldingProcess] | None = None
    ):
        self.now = 1000.0
        self.control = ControlView()
        self.version = 0
        self.said: list[str] = []
        self.spawner = StandInSpawner()
        self.folder = tmp_path
        self.commands = [
            (role, WorkerCommand(process=f"{role}-0", arguments=(), log=tmp_path / f"{role}-0.log")) for role in roles
        ]
        self.supervisor = Supervisor(self.spawner, report=self.said.append, deadline_s=30, clock=lambda: self.now)
        self.supervisor.start(self.commands, lock_holder=lock_holder)
        self.poll()

    def poll(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.supervisor.poll(self.control, self.version)

    def exit(self, process: str, code: int, *, saying: str = "") -> None:
        if saying:
            (self.folder / f"{process}.log").write_text(f"2026-01-01 00:00:00.000 ERROR   {process} {saying}\n")
        self.spawner.newest(process).code = code
        self.poll()

    def starts(self, process: str) -> int:
        return len(self.spawner.children[process])

    def finish(self, exit_code: int = 0) -> None:
        name = VersionName(trainer_epoch=1, version=3)
        self.control.finished = RunFinished(reason="steps", name=name, finished_at=0.0, exit_code=exit_code)
        self.poll()


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, -signal.SIGSEGV])
def test_what_died_is_started_again_after_a_pause(tmp_path: Path, code: int) -> None:
    stage = Stage(tmp_path, ["trainer"])
    stage.exit("trainer-0", code)
    assert stage.starts("trainer-0") == 1
    stage.poll(0.1)
    assert stage.starts("trainer-0") == 1
    stage.poll(0.11)
    assert stage.starts("trainer-0") == 2
    assert stage.supervisor.slots[0].restarts == 1
    assert "trainer-0 ended" in stage.said[0]


def test_pauses_double_up_to_a_limit_and_start_afresh_after_a_healthy_minute(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["explorer"])
    pauses = []
    for step in range(9):
        stage.version = step  # a step in between: the run goes on, only this process does not
        stage.exit("explorer-0", 1)
        pauses.append(round(stage.supervisor.slots[0].start_at - stage.now, 6))
        stage.poll(pauses[-1])
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]
    stage.poll(61)
    stage.exit("explorer-0", 1)
    assert round(stage.supervisor.slots[0].start_at - stage.now, 6) == 0.2


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_these_exits_end_the_run_with_the_role_s_own_words(tmp_path: Path, code: int) -> None:
    stage = Stage(tmp_path, ["feeder", "verifier"])
    stage.exit("feeder-0", code, saying="tasksets.sums: no problems")
    failure = stage.supervisor.failure
    assert failure is not None
    assert (failure.exit_code, failure.text) == (code, "feeder-0: tasksets.sums: no problems")
    assert stage.spawner.newest("verifier-0").signals == [signal.SIGTERM]
    stage.exit("verifier-0", 0)
    assert stage.supervisor.all_left
    assert stage.starts("feeder-0") == 1


def test_too_many_crashes_without_a_step_end_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["buffer"])
    for _ in range(supervisors.MAX_CRASHES):
        stage.exit("buffer-0", 1)
        stage.poll(10)
    assert stage.supervisor.failure is None
    stage.exit("buffer-0", 1, saying="the store: cannot be reached")
    failure = stage.supervisor.failure
    assert failure is not None
    assert failure.exit_code == 1
    assert "died 11 times in a row" in failure.text
    assert "the store: cannot be reached" in failure.text
    assert stage.supervisor.all_left


def test_exit_0_is_final_for_shared_roles_and_for_all_once_the_run_is_over(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["feeder", "explorer"])
    stage.exit("explorer-0", 0)
    stage.poll(60)
    assert stage.starts("explorer-0") == 1
    stage.exit("feeder-0", 0)
    stage.poll(1)
    assert stage.starts("feeder-0") == 2, "nobody else does its work, and the run goes on"
    stage.control.ended = TasksEnded(admitted=3, reason="steps")
    stage.exit("feeder-0", 0)
    stage.poll(60)
    assert stage.starts("feeder-0") == 2
    assert stage.supervisor.all_left


def test_after_the_end_only_those_with_something_left_to_do_are_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["explorer", "trainer"])
    stage.finish()
    stage.exit("explorer-0", -signal.SIGKILL)
    stage.exit("trainer-0", -signal.SIGKILL)
    stage.poll(1)
    assert (stage.starts("explorer-0"), stage.starts("trainer-0")) == (1, 2)
    stage.exit("trainer-0", 0)
    assert stage.supervisor.all_left
    assert stage.supervisor.failure is None


def test_who_does_not_leave_after_the_end_is_asked_then_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["explorer", "evaluator"])
    stage.finish()
    stage.poll(29)
    assert stage.spawner.newest("explorer-0").signals == []
    stage.poll(2)
    assert stage.spawner.newest("explorer-0").signals == [signal.SIGTERM]
    stage.poll(31)
    assert stage.spawner.newest("explorer-0").signals == [signal.SIGTERM, signal.SIGKILL]
    assert stage.spawner.newest("evaluator-0").signals == [], "its last evaluation may take long"


def test_stop_asks_and_kills_after_the_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["explorer", "trainer"])
    stage.exit("trainer-0", 1)
    stage.supervisor.stop()
    stage.poll(1)
    assert stage.starts("trainer-0") == 1, "what waits for its restart stays away"
    assert stage.spawner.newest("explorer-0").signals == [signal.SIGTERM]
    stage.poll(30)
    stage.poll(1)
    assert stage.spawner.newest("explorer-0").signals == [signal.SIGTERM, signal.SIGKILL]
    stage.exit("explorer-0", -signal.SIGKILL)
    assert stage.supervisor.all_left


def test_fenced_is_left_alone_while_the_successor_lives(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["trainer"])
    successor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stage.control.claims["trainer"] = Claim(
        role="trainer", epoch=2, host=socket.gethostname(), pid=successor.pid, process="trainer-by-hand", claimed_at=0.0
    )
    stage.exit("trainer-0", 5, saying="trainer: trainer-by-hand took over")
    stage.poll(100)
    assert stage.starts("trainer-0") == 1
    assert "trainer-by-hand took over; left alone" in stage.said[0]
    stage.finish()
    assert not stage.supervisor.all_left, "the successor may still be writing final/"
    successor.communicate(b"\n")
    stage.poll(2)
    stage.poll()
    assert stage.starts("trainer-0") == 2, "to see whether anything is left to do"
    stage.exit("trainer-0", 0)
    assert stage.supervisor.all_left


def test_a_successor_on_another_machine_is_not_waited_for_after_the_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["buffer"])
    stage.control.claims["buffer"] = Claim(role="buffer", epoch=2, host="elsewhere", pid=1, process="b", claimed_at=0.0)
    stage.exit("buffer-0", 5)
    stage.poll(100)
    assert not stage.supervisor.all_left
    (said,) = (text for text in stage.said if "cannot be seen from here" in text)
    assert "buffer-0: b has the role, on elsewhere," in said
    assert "`rftstream worker --role buffer` here takes it back" in said
    stage.finish()
    stage.poll(2)
    assert stage.supervisor.all_left
    assert stage.starts("buffer-0") == 1


def test_a_stopped_process_that_holds_the_write_lock_is_ended(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 19)"])
    try:
        wait_until(lambda: process_state(holder.pid) == "T")
        stage = Stage(tmp_path, ["trainer"], lock_holder=lambda: holder)
        stage.poll(9)
        assert process_state(holder.pid) == "T"
        stage.poll(2)
        assert holder.wait(120) == -signal.SIGKILL
        assert f"process {holder.pid} has been stopped" in stage.said[0]
    finally:
        holder.kill()
        holder.wait()


def test_warnings_of_workers_are_passed_on_and_last_words_only_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["buffer"])
    log = tmp_path / "buffer-0.log"
    log.write_text("2026-01-01 00:00:00.000 WARNING buffer-0 no room on the disk\n")
    stage.poll(1)
    assert stage.said == ["buffer-0: no room on the disk"]
    stage.exit("buffer-0", 1, saying="something else broke, at length")
    stage.poll(1)
    assert stage.said[1:] == ["buffer-0 ended (exit 1): something else broke, at length; starting again in 0.2 s"]


def test_who_starts_again_with_other_code_is_told_once(tmp_path: Path) -> None:
    stage, changes = Stage(tmp_path, ["verifier"]), ["changed: the code of mine"]
    stage.supervisor.start(stage.commands, changes=lambda: changes)
    for _ in range(2):
        stage.poll(20)
        stage.exit("verifier-0", -9)
        stage.poll(1)
    assert [line.partition(" (")[0] for line in stage.said] == ["verifier-0 ended", *changes, "verifier-0 ended"]


# ------------------------------------------------------------------------------------------------ real processes

STAND_IN = """
import os, signal, subprocess, sys, time
kind = sys.argv[1]
print("hello from", kind, flush=True)
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "parent":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if kind.startswith("exit"):
    sys.exit(int(kind[4:]))
time.sleep(600)
"""


def stand_in(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", STAND_IN, *arguments]


def command(tmp_path: Path, kind: str) -> WorkerCommand:
    return WorkerCommand(process=kind, arguments=(kind,), log=tmp_path / f"{kind}.log")


def test_a_plain_process_reports_its_code_and_its_words(tmp_path: Path) -> None:
    child = PlainSpawner(stand_in).spawn(command(tmp_path, "exit6"))
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == 6
    assert (tmp_path / "exit6.log").read_text() == "hello from exit6\n"


def test_children_of_a_dead_worker_are_ended_with_it(tmp_path: Path) -> None:
    child = PlainSpawner(stand_in).spawn(command(tmp_path, "parent"))
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == -signal.SIGKILL
    grandchild = int((tmp_path / "parent.log").read_text().split()[-1])
    wait_until(lambda: not is_alive(grandchild))


@pytest.mark.slow
def test_who_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor(PlainSpawner(stand_in), report=lambda text: None, deadline_s=0.3)
    supervisor.start([("explorer", command(tmp_path, "stubborn"))])
    supervisor.poll(ControlView(), 0)
    wait_until(lambda: "hello" in (tmp_path / "stubborn.log").read_text())
    pid = supervisor.slots[0].child.pid if supervisor.slots[0].child else None
    assert pid is not None
    supervisor.stop()

    def left() -> bool:
        supervisor.poll(ControlView(), 0)
        return supervisor.all_left

    wait_until(left)
    assert not is_alive(pid)


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[ZygoteSpawner]:
    if not is_supported():
        pytest.skip("forking workers is for Linux")
    spawner = ZygoteSpawner(tmp_path / "zygote.log")
    yield spawner
    spawner.close()


def rftstream(tmp_path: Path, name: str, *arguments: str, preload: tuple[str, ...] = ()) -> WorkerCommand:
    return WorkerCommand(process=name, arguments=arguments, log=tmp_path / f"{name}.log", preload=preload)


WAITING = ("worker", "--role", "feeder", "--run-dir", "/nonexistent/run")
"""A worker that waits for a run that never comes."""


@pytest.mark.slow
def test_the_zygote_forks_workers_that_are_the_same_commands(tmp_path: Path, zygote: ZygoteSpawner) -> None:
    unknown = zygote.spawn(rftstream(tmp_path, "unknown", "worker", "--role", "feedr", "--run-dir", str(tmp_path)))
    waiting = zygote.spawn(rftstream(tmp_path, "waiting", *WAITING))
    wait_until(lambda: unknown.poll() is not None)
    assert unknown.poll() == 2
    assert "did you mean 'feeder'?" in (tmp_path / "unknown.log").read_text()
    assert waiting.poll() is None
    assert waiting.pid is not None
    wait_until(lambda: b"--role\0feeder" in Path(f"/proc/{waiting.pid}/cmdline").read_bytes())
    assert os.getsid(waiting.pid) == waiting.pid, "ctrl-C does not reach it"
    waiting.send(signal.SIGTERM)
    wait_until(lambda: waiting.poll() is not None)
    assert waiting.poll() in (0, -signal.SIGTERM), "stopped before or after it could say how"


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_its_fork_has_left_and_never_works(
    tmp_path: Path, zygote: ZygoteSpawner
) -> None:
    """The zygote may import for a minute, for which nobody who stops a run waits."""
    late = zygote.spawn(rftstream(tmp_path, "late", *WAITING))
    late.send(signal.SIGTERM)
    assert late.poll() == 0
    other = zygote.spawn(rftstream(tmp_path, "other", *WAITING))
    wait_until(lambda: other.poll() is None and other.pid is not None)
    assert late.pid is not None
    wait_until(lambda: not is_alive(late.pid))
    assert is_alive(other.pid)


@pytest.mark.slow
def test_a_worker_that_ends_when_told_to_is_seen_while_the_zygote_imports_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, twice, waited for torch's import: the zygote reaps nobody meanwhile."""
    if not is_supported():
        pytest.skip("forking workers is for Linux")
    (tmp_path / "imports_for_ever.py").write_text("import time\n\nopen('begun', 'w').close()\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spawner = ZygoteSpawner(tmp_path / "zygote.log")
    try:
        child = spawner.spawn(rftstream(tmp_path, "child", *WAITING))
        wait_until(lambda: child.poll() is None and child.pid is not None)
        spawner.spawn(rftstream(tmp_path, "other", *WAITING, preload=("imports_for_ever",)))
        wait_until((tmp_path / "begun").exists)
        child.send(signal.SIGKILL)
        wait_until(lambda: child.poll() is not None)
        assert child.poll() == -signal.SIGKILL
    finally:
        spawner.close()


@pytest.mark.slow
def test_workers_of_a_dead_zygote_are_dead_and_the_next_ones_get_another(tmp_path: Path, zygote: ZygoteSpawner) -> None:
    first = zygote.spawn(rftstream(tmp_path, "first", *WAITING))
    wait_until(lambda: first.poll() is None and first.pid is not None)
    pid = first.pid
    assert pid is not None
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: first.poll() is not None)
    assert first.poll() == -signal.SIGKILL
    wait_until(lambda: not is_alive(pid))
    second = zygote.spawn(rftstream(tmp_path, "second", "worker", "--role", "feedr"))
    wait_until(lambda: second.poll() is not None)
    assert second.poll() == 2


def test_requests_wait_for_a_zygote_that_takes_none_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing while it imports, and its buffer is full after some hundred requests."""
    channels: list[socket.socket] = []

    class Importing:
        pid = 1

        def kill(self) -> None:
            pass

        def wait(self) -> int:
            return 0

    def start(channel: socket.socket, log: int) -> Importing:
        channels.append(channel.dup())
        return Importing()

    monkeypatch.setattr("rftstream.launch.zygote.start_process", start)
    spawner = ZygoteSpawner(tmp_path / "zygote.log")
    children = [spawner.spawn(rftstream(tmp_path, f"w{number}", "x" * 500)) for number in range(2000)]
    assert children[-1].poll() is None
    with channels[0] as channel:
        channel.setblocking(False)
        taken = b""
        while taken.count(b"\n") < len(children):
            with contextlib.suppress(BlockingIOError):
                taken += channel.recv(1 << 20)
            assert children[0].poll() is None
        requests = [json.loads(line) for line in taken.splitlines()]
        assert [one["process"] for one in requests] == [f"w{number}" for number in range(2000)]
        channel.sendall(b'{"ended": 2000, "number": 2000, "code": 3}\n')
        assert children[-1].poll() == 3
    spawner.close()


@pytest.mark.slow
def test_a_zygote_with_threads_leaves_forking_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    said: list[str] = []
    spawner = ZygoteSpawner(tmp_path / "zygote.log", fallback=PlainSpawner(stand_in), report=said.append)
    try:
        child = spawner.spawn(rftstream(tmp_path, "threads", "exit3", preload=("starts_a_thread",)))
        wait_until(lambda: child.poll() is not None)
        assert child.poll() == 3
        assert said == ["threads: started without the warm interpreter: an import started 1 threads"]
    finally:
        spawner.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "zygote"])
def test_workers_end_with_a_supervisor_that_was_killed(tmp_path: Path, kind: str) -> None:
    if kind == "zygote" and not is_supported():
        pytest.skip("forking workers is for Linux")
    script = f"""
import sys, time
from pathlib import Path
from rftstream.launch.processes import PlainSpawner, WorkerCommand
from rftstream.launch.zygote import ZygoteSpawner
log = Path({str(tmp_path)!r}) / "worker.log"
spawner = PlainSpawner() if {kind!r} == "plain" else ZygoteSpawner(log.with_name("zygote.log"))
child = spawner.spawn(WorkerCommand(process="worker", arguments={WAITING!r}, log=log))
while child.poll() is None and child.pid is None:
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        worker = int(supervisor.stdout.readline())
        assert is_alive(worker)
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: not is_alive(worker))


# ------------------------------------------------------------------------------------------------ what is started


def test_the_workers_of_a_run_file(tmp_path: Path) -> None:
    config = small_run(
        run={"name": "r", "steps": 1},
        explorer={"count": 3, "policy": "fake", "devices": ["cuda:0", "cuda:1"], "threads": 2}, verifier={"count": 0},
        trainer={"backend": "fake"},
    )  # fmt: skip
    commands = {command.process: command for _, command in worker_commands(config, RunFolder(tmp_path), model=None)}
    assert sorted(commands) == ["buffer-0", "explorer-0", "explorer-1", "explorer-2", "feeder-0", "trainer-0"]
    devices = [commands[f"explorer-{i}"].arguments[-1] for i in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]
    assert commands["explorer-0"].threads == 2
    parts = ("rftstream.backends.fake", "rftstream.algorithms.grpo")
    assert commands["trainer-0"].preload == ("workers.trainer", "rftstream.transport.embedded.transport", *parts)
    on_kafka = loader.replace(config, transport__kind="kafka", transport__servers="localhost:9092")
    commands = {command.process: command for _, command in worker_commands(on_kafka, RunFolder(tmp_path), model=None)}
    assert commands["trainer-0"].preload == ("workers.trainer", "rftstream.transport.kafka.transport", *parts)


def test_what_parts_import_late_is_imported_before_workers_are_forked(tmp_path: Path) -> None:
    config = small_run(run={"name": "r", "steps": 1}, explorer={"policy": "hf"}, trainer={"backend": "torch"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shared = ("torch", "transformers", "transformers.models.llama.modeling_llama",
              "transformers.models.auto.modeling_auto")  # fmt: skip
    wanted = {
        "explorer-0": ("rftstream.policies.hf.policy", *shared,
                       "rftstream.policies.hf.attention", "rftstream.policies.hf.batch"),
        "trainer-0": ("rftstream.backends.torch.backend", "rftstream.algorithms.grpo", *shared,
                      "rftstream.backends.torch.critic", "rftstream.backends.torch.lora",
                      "rftstream.backends.torch.scorer"),
        "feeder-0": (),
    }  # fmt: skip
    commands = {command.process: command for _, command in worker_commands(config, RunFolder(tmp_path), model=tmp_path)}
    for process, modules in wanted.items():
        worker = f"workers.{process.removesuffix('-0')}"
        assert commands[process].preload == (worker, "rftstream.transport.embedded.transport", *modules)
    commands = {command.process: command for _, command in worker_commands(config, RunFolder(tmp_path), model=None)}
    assert not [module for module in commands["trainer-0"].preload if module.startswith("transformers.models.llama")]


def test_a_process_without_a_word_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "trainer-0.log"
    assert supervisors._silence(log) == f"no word in {log}"
    monkeypatch.setattr(supervisors, "FULL_BYTES", 1 << 62)
    assert "whose disk is full" in supervisors._silence(log)
    stage = Stage(tmp_path, ["buffer"])
    for _ in range(supervisors.MAX_CRASHES + 1):
        stage.exit("buffer-0", 1)
        stage.poll(10)
    assert stage.supervisor.failure is not None and stage.supervisor.failure.exit_code == 3
    assert supervisors._silence(tmp_path / "gone" / "trainer-0.log").startswith("no word in ")
