"""A folder of run files and the processes that a test starts there: rftstream as people use it, by its command.

Whatever a test starts carries the folder's name in its environment, and its own children inherit that; so all of
them are found and ended by their process ids when the test is over, whether it passed or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.balance import AuditReport
from rftstream.runs.folder import RunFolder, open_run
from rftstream.runs.observer import Curve, Observer
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.role import Log
from tests import warm
from tests.warm import MARK

COMMAND = str(Path(sys.executable).with_name("rftstream"))
EXAMPLES = Path(__file__).parents[2] / "examples"

LONG_S = 240.0
"""For what takes seconds, on a machine that has much else to do."""
LOOK_S = 0.03

FAKE = """
[run]
name = "tiny"
steps = 6
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 8
[feeder]
groups_per_batch = 2
group_size = 3
max_staleness = 1
[explorer]
policy = "fake"
[trainer]
backend = "fake"
checkpoint_every = 2
[transport]
partitions = 4
"""
"""A run without a model: starts in a second, and takes no longer than it is told to."""

_Told = TypeVar("_Told")


def sets(*assignments: str) -> list[str]:
    """`--set` before each."""
    return [word for assignment in assignments for word in ("--set", assignment)]


@dataclass(frozen=True)
class Finished:
    """A command that has come to its end."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The object that the last line on stdout is."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def lines(self) -> list[Any]:
        """One JSON object a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Process:
    """A command that runs. What it writes goes to files, so that it never waits for the test."""

    def __init__(self, popen: subprocess.Popen[bytes] | warm.Forked, out: Path, err: Path) -> None:
        self._popen = popen
        self._out, self._err = out, err
        self.pid = popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    def send(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def finish(self, timeout_s: float = LONG_S) -> Finished:
        """Waits for its end."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s:g} s\n{self.out}\n{self.err}") from None
        return Finished(code, self.out, self.err)


class RunView:
    """A run folder, looked at from outside while its processes work or afterwards."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        run = open_run(path)
        self.config = run.config
        self.transport = run.transport
        self._observer = Observer(self.transport)
        self.is_closed = False

    def close(self) -> None:
        """A client of Kafka that is asked something afterwards is never closed: `Workplace.view` makes a new view."""
        self.is_closed = True
        self.transport.close()

    def curve(self) -> Curve:
        self._observer.poll()
        return self._observer.curve

    def control(self) -> ControlView:
        return read_control(self.transport)

    def stop(self, pid: int) -> None:
        """SIGSTOP, but not while it has the log's write lock: the supervisor would kill it for that."""
        while True:
            os.kill(pid, signal.SIGSTOP)
            holder = self.transport.lock_holder()  # type: ignore[attr-defined]
            if holder is None or holder.pid != pid:
                return
            os.kill(pid, signal.SIGCONT)
            time.sleep(LOOK_S)

    def records(self, topic: str) -> list[Record]:
        return list(Log(self.transport).read(topic))

    def messages(self, topic: str) -> list[Message]:
        """Of all records that are of a contract of the topic."""
        return [one.message for one in Log(self.transport).messages(topic) if one.message is not None]

    def rollouts(self) -> list[Rollout]:
        return [one for one in self.messages("rollouts") if isinstance(one, Rollout)]

    def verified(self) -> list[VerifiedRollout]:
        return [one for one in self.messages("verified") if isinstance(one, VerifiedRollout)]

    def outcomes(self) -> list[GroupOutcome]:
        return [one for one in self.messages("outcomes") if isinstance(one, GroupOutcome)]

    def experiences(self) -> list[Experience]:
        return [one for one in self.messages("batches") if isinstance(one, Experience)]

    def manifests(self) -> list[BatchManifest]:
        return [one for one in self.messages("batches") if isinstance(one, BatchManifest)]

    def steps(self) -> list[StepRecord]:
        """Trained ones, of all trainer epochs."""
        return [one for one in self.messages("steps") if isinstance(one, StepRecord) and not one.resumed]

    def dead(self) -> list[DeadLetter]:
        return [one for one in self.messages("dead") if isinstance(one, DeadLetter)]

    def put(self, *records: NewRecord) -> None:
        """In one transaction, by somebody who has nothing to do with the run."""
        producer = self.transport.producer("somebody-else")
        producer.start()
        producer.commit(records)
        producer.close()

    def put_message(self, topic: str, message: Message, *, writer_epoch: int = 0) -> None:
        """Write as a role does under this epoch of its; 0: as a role that shares its work."""
        self.put(codec.to_record(message, topic, 0, run=self.folder.run_id, writer_epoch=writer_epoch))

    def audit(self) -> AuditReport:
        return audit(self.transport)

    def assert_nothing_lost(self, *, is_alone: bool = True) -> AuditReport:
        """The law of conservation, without a twin. `is_alone`: nobody but the run's roles wrote on its log, so a record
        that stands there twice to the byte is a twin as well."""
        report = self.audit()
        assert report.balanced, report.to_text()
        assert not any(report.twins.values()), report.to_text()
        assert not (is_alone and report.foreign), report.to_text()
        return report

    def log_of(self, process: str) -> str:
        try:
            return (self.folder.logs / f"{process}.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""


class Workplace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outputs = folder / ".outputs"
        self._outputs.mkdir(parents=True)
        self._started: list[Process] = []
        self._views: dict[Path, RunView] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # ------------------------------------------------------------------------------------------ files

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write_lines(self, name: str, rows: Sequence[dict[str, Any]]) -> Path:
        return self.write(name, "".join(f"{json.dumps(row)}\n" for row in rows))

    def view(self, run_dir: str | Path) -> RunView:
        """Of a run folder here; waits until it is there."""
        path = self.folder / run_dir
        if path not in self._views or self._views[path].is_closed:
            self.wait_for(RunFolder(path).exists, f"the run {run_dir}")
            self._views[path] = RunView(path)
        return self._views[path]

    # ------------------------------------------------------------------------------------------ processes

    def start(
        self,
        *arguments: str | Path,
        command: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Process:
        """`rftstream ARGUMENTS`, here: a fork of the warm interpreter, unless there is a command that starts it, or
        `more`, which goes to Popen."""
        number = len(self._started)
        out, err = (self._outputs / f"{number}.{name}" for name in ("out", "err"))
        words, environment = [str(argument) for argument in arguments], self._environment(env or {})
        popen: subprocess.Popen[bytes] | warm.Forked
        with out.open("wb") as stdout, err.open("wb") as stderr, open(os.devnull, "rb") as stdin:
            streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            if command is None and not more and warm.is_possible(env or {}):
                descriptors = {name: stream.fileno() for name, stream in streams.items()}
                popen = warm.start(words, cwd=self.folder, env=environment, **descriptors)
            else:
                popen = subprocess.Popen(
                    [*(command or (COMMAND,)), *words], cwd=self.folder, env=environment, start_new_session=True,
                    **{**streams, **more},
                )  # fmt: skip
        process = Process(popen, out, err)
        self._started.append(process)
        return process

    def call(self, *arguments: str | Path, timeout_s: float = LONG_S, **more: Any) -> Finished:
        """As `start`, to its end."""
        return self.start(*arguments, **more).finish(timeout_s)

    def look(self, *arguments: str | Path) -> Finished:
        """As `call`, for commands that start nothing: in this process, which has everything imported already."""
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Finished(done.exit_code, done.stdout, done.stderr)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """All that live and come from here; with `word` only those who have it as an argument."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) != str(self.folder) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if not word or word in process.cmdline():
                    found.append(process)
        return found

    def worker(self, name: str) -> psutil.Process | None:
        """The process of a worker by its name in the logs; None while there is none."""
        found = self.processes(name)
        return found[0] if found else None

    def kill_worker(self, name: str) -> int:
        """SIGKILL; the process id that it had."""
        process = self.wait_for(lambda: self.worker(name), f"a process {name}")
        assert process is not None
        process.kill()
        return int(process.pid)

    def assert_nobody_left(self, within_s: float = 120.0) -> None:
        self.wait_for(lambda: not self.processes(), "the end of every process", within_s)

    def wait_for(self, condition: Callable[[], _Told], what: str, timeout_s: float = LONG_S) -> _Told:
        """What the condition says once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (told := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s in vain for {what}\n{self.report()}")
            time.sleep(LOOK_S)
        return told

    def report(self) -> str:
        """For whoever has to find out why a test failed: the ends of all logs."""
        texts = [f"processes: {[' '.join(one.cmdline()) for one in self.processes()]}"]
        for path in [*sorted(self.folder.rglob("logs/*.log")), *sorted(self._outputs.iterdir())]:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            texts += [f"--- {path.relative_to(self.folder)}", *lines[-15:]]
        return "\n".join(texts)

    def end(self) -> None:
        """Ends whatever is left, each by its process id; nothing of it is left then."""
        for view in self._views.values():
            view.close()
        deadline = time.monotonic() + 120
        while left := self.processes():
            assert time.monotonic() < deadline, f"cannot be ended: {left}"
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(LOOK_S)
        for one in self._started:
            one.finish()

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RFTSTREAM")}
        return {**inherited, MARK: str(self.folder), **env}
