"""Starts the roles of a run as processes, watches them, and starts again what died (docs/operations.md, "Exit codes").

exit 0              done; not started again (a single role that leaves before the end of the run is)
exit 1, signal      passing: started again, after a pause that grows from 0.2 to 10 s
exit 2, 3, 4, 6     permanent, or waited for long enough: the run ends at once, with this exit code
exit 5              another took the role over: left alone while that one lives
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import ARCHITECTURE
from rftstream.config.sections import RunConfig
from rftstream.errors import ENDS_THE_RUN, TransportError
from rftstream.launch import logging as logs
from rftstream.launch import zygote
from rftstream.launch.processes import (
    Child,
    PlainSpawner,
    Spawner,
    WorkerCommand,
    describe_exit,
    send_signal,
)
from rftstream.process_state import is_alive, process_state
from rftstream.roles import role_spec, role_specs
from rftstream.runs.folder import RunFolder
from rftstream.service.control_view import ControlView
from rftstream.service.role_spec import RoleKind, RoleSpec

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
HEALTHY_AFTER_S = 60.0
"""Seconds alive after which a process that dies is restarted with the shortest pause."""
FULL_BYTES = 1 << 16
"""Free bytes below which a process may die without writing an error to its log."""
MAX_CRASHES = 10
"""Crashes in a row of one process, without a step of the run in between, that end the run."""
STOPPED_HOLDER_S = 10.0
"""Seconds after which a stopped process is killed if it holds the write lock of the log, which blocks all others."""
LOOK_EVERY_S = 1.0


class HoldingProcess(Protocol):
    """The process that holds the write lock of a log. The transport returns it."""

    @property
    def pid(self) -> int:
        """Return the process id."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ended the run. A Supervisor makes it."""

    exit_code: int
    text: str


@dataclass(slots=True)
class Slot:
    """A worker that the run should have, with its current process. A Supervisor makes and changes it."""

    role: str
    command: WorkerCommand
    child: Child | None = None
    state: str = "to start"
    """One of: to start, running, left, fenced, failed, killed."""
    start_at: float = 0.0
    started_at: float = 0.0
    restarts: int = 0
    pauses: int = 0
    crashes: int = 0
    log_offset: int = 0
    """Byte of the log file at which the output of this process begins."""

    @property
    def process(self) -> str:
        """Return the name of the worker's process."""
        return self.command.process


class Supervisor:
    """The workers of a run on this machine, from their first start until the last of them has left.

    A session makes it first, so that the spawner gets ready while model and log are made. `start` passes it the
    workers. From then on the session calls `poll` until `all_left`. It calls `stop` or `kill` if the run should end
    early, and `close` last.
    """

    def __init__(
        self,
        spawner: Spawner,
        *,
        report: Callable[[str], None],
        deadline_s: float = 30.0,
        ends_the_run: Collection[int] = ENDS_THE_RUN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots: list[Slot] = []
        self.failure: Failure | None = None
        self.killed = False
        self._spawner = spawner
        self._report = report
        self._deadline_s = deadline_s
        self._ends_the_run = ends_the_run
        self._clock = clock
        self._control = ControlView()
        self._version = 0
        self._troubles: dict[str, logs.Troubles] = {}
        self._stop_by: float | None = None
        self._leave_by: float | None = None
        self._stopped_holder: StoppedHolder | None = None
        self._look_at = 0.0
        self._changes: Callable[[], Sequence[str]] = lambda: ()
        self._said_changes: set[str] = set()
        self._said_claims: set[tuple[str, int]] = set()
        spawner.warm()

    def start(
        self,
        commands: Iterable[tuple[str, WorkerCommand]],
        *,
        lock_holder: Callable[[], HoldingProcess | None] | None = None,
        changes: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """Set the workers, each with its role. The next `poll` starts their processes.

        `lock_holder` returns the process that holds the write lock of the log, `changes` a line for each of the user's
        modules that has other code now than when the run was started: a process that starts again takes it.
        """
        self._changes = changes
        self.slots = [Slot(role, command) for role, command in commands]
        self._troubles = {slot.process: logs.Troubles(slot.command.log, clock=self._clock) for slot in self.slots}
        if lock_holder is not None:
            self._stopped_holder = StoppedHolder(lock_holder, self._report)

    @property
    def all_left(self) -> bool:
        """Return whether no worker runs and none is to be restarted."""
        return all(slot.child is None and slot.state not in ("to start", "fenced") for slot in self.slots)

    @property
    def stopping(self) -> bool:
        """Return whether the workers were told to leave."""
        return self._stop_by is not None

    def poll(self, control: ControlView, version: int) -> None:
        """Check all workers once against the state of the log, and start or end those that are due. Never waits."""
        now = self._clock()
        self._control = control
        if version > self._version:
            self._version = version
            for slot in self.slots:
                slot.crashes = 0
        for slot in self.slots:
            self._look_at_slot(slot, now)
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if self._stopped_holder is not None:
                self._stopped_holder.look(now)
            for slot in self.slots:  # a run that stands still reports why
                for text in self._troubles[slot.process].new():
                    self._report(f"{slot.process}: {text}")
        self._keep_deadlines(now)

    def stop(self) -> None:
        """Tell all workers to finish their work in progress and leave. Those that are still alive after the deadline
        are killed."""
        if self._stop_by is None:
            self._stop_by = self._clock() + self._deadline_s
            self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all workers at once."""
        self.killed = True
        self._stop_by = self._clock()
        for slot in self.slots:
            slot.state = "killed" if slot.child is not None else slot.state
        self._signal_all(signal.SIGKILL)

    def close(self) -> None:
        """Close the spawner, which ends its workers."""
        self._spawner.close()

    # ------------------------------------------------------------------------------------------ one worker

    def _look_at_slot(self, slot: Slot, now: float) -> None:
        if slot.child is not None:
            if (code := slot.child.poll()) is not None:
                self._ended(slot, code, now)
            elif now - slot.started_at > HEALTHY_AFTER_S:
                slot.pauses = 0
        elif slot.state == "to start" and self._nobody_is_needed(slot):
            slot.state = "left"
        elif slot.state == "to start" and now >= slot.start_at:
            self._spawn(slot, now)
        elif slot.state == "fenced" and now >= slot.start_at:
            slot.start_at = now + LOOK_EVERY_S
            self._look_at_successor(slot, now)

    def _spawn(self, slot: Slot, now: float) -> None:
        log = slot.command.log
        slot.log_offset = log.stat().st_size if log.exists() else 0
        log.with_suffix(".port").unlink(missing_ok=True)  # of one that was killed with its supervisor
        slot.child = self._spawner.spawn(slot.command)
        slot.started_at = now
        slot.state = "running"

    def _ended(self, slot: Slot, code: int, now: float) -> None:
        slot.child = None
        slot.command.log.with_suffix(".port").unlink(missing_ok=True)
        if self.stopping or (code == 0 and self._may_leave(slot)):
            slot.state = "left"
        elif code in self._ends_the_run:
            slot.state = "failed"
            self._give_up(code, f"{slot.process}: {self._error(slot)}")
        elif code == 5:
            slot.state = "fenced"
            self._report(f"{slot.process}: {self._error(slot)}; left alone while that one lives")
        else:
            self._start_again(slot, code, now)

    def _may_leave(self, slot: Slot) -> bool:
        """Return whether the worker may leave with exit 0."""
        if self._control.finished is not None or self._control.ended is not None:
            return True
        if role_spec(slot.role).kind is not RoleKind.single:
            left = sum(other.role == slot.role and other.child is not None for other in self.slots)
            self._report(f"{slot.process} left, {left} of its role remain here; `rftstream worker` adds more")
            return True
        return False

    def _start_again(self, slot: Slot, code: int, now: float) -> None:
        error = "" if code <= 0 else f": {self._error(slot)}"
        slot.crashes += 1
        if slot.crashes > MAX_CRASHES:
            slot.state = "failed"
            self._give_up(
                TransportError.exit_code if _is_full(slot.command.log) else max(code, 1),
                f"{slot.process}: died {slot.crashes} times in a row without a step in between "
                f"({describe_exit(code)}){error}; see {slot.command.log}",
            )
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**slot.pauses)
        slot.pauses += 1
        slot.restarts += 1
        slot.state = "to start"
        slot.start_at = now + pause_s
        if not self._nobody_is_needed(slot):
            self._report(f"{slot.process} ended ({describe_exit(code)}){error}; starting again in {pause_s:.1f} s")
            for line in self._changes():
                if line not in self._said_changes:
                    self._said_changes.add(line)
                    self._report(line)

    def _nobody_is_needed(self, slot: Slot) -> bool:
        return self.stopping or (self._control.finished is not None and not role_spec(slot.role).outlives_the_run)

    def _look_at_successor(self, slot: Slot, now: float) -> None:
        """Watch a role that another process has taken over. If the run is finished, that process may still do its last
        work."""
        claim = self._control.claims.get(slot.role)
        if claim is not None and claim.host != socket.gethostname():
            slot.state = "left" if self._control.finished is not None else slot.state
            if slot.state == "fenced" and (slot.process, claim.epoch) not in self._said_claims:
                self._said_claims.add((slot.process, claim.epoch))
                self._report(
                    f"{slot.process}: {claim.process} has the role, on {claim.host}, and whether it lives cannot be "
                    f"seen from here; if that host is lost, `rftstream worker --role {slot.role}` here takes it back"
                )
        elif claim is None or not is_alive(claim.pid):
            if not self._nobody_is_needed(slot):
                self._report(f"{slot.process}: who had taken the role over is gone; started again")
            slot.state = "to start"
            slot.start_at = now

    def _error(self, slot: Slot) -> str:
        text = logs.last_error(slot.command.log, since=slot.log_offset) or _silence(slot.command.log)
        self._troubles[slot.process].said(text)
        return text

    def _give_up(self, exit_code: int, text: str) -> None:
        self.failure = self.failure or Failure(exit_code, text)
        self.stop()

    # ------------------------------------------------------------------------------------------ all of them

    def _keep_deadlines(self, now: float) -> None:
        if self._control.finished is not None and not self.stopping:
            self._leave_by = self._leave_by or now + self._deadline_s
            if now > self._leave_by:
                late = [
                    slot for slot in self.slots if not role_spec(slot.role).outlives_the_run and slot.child is not None
                ]
                for slot in late:
                    self._end_late(slot, now - self._leave_by > self._deadline_s)
        if self._stop_by is not None and now > self._stop_by:
            for slot in self.slots:
                if slot.child is not None:
                    self._end_late(slot, True)

    def _end_late(self, slot: Slot, for_good: bool) -> None:
        """End a worker that leaves too late: first by a signal, and after another deadline by a kill."""
        state = "killed" if for_good else "asked to leave"
        if slot.child is not None and slot.state != state:
            slot.state = state
            self._report(f"{slot.process} has not left within {self._deadline_s:g} s: {state}")
            slot.child.send(signal.SIGKILL if for_good else signal.SIGTERM)

    def _signal_all(self, signum: int) -> None:
        for slot in self.slots:
            if slot.child is not None:
                slot.child.send(signum)
            elif slot.state in ("to start", "fenced"):
                slot.state = "left"


class StoppedHolder:
    """Kills a stopped process that holds the write lock of the log. The supervisor calls `look` every second."""

    def __init__(self, ask: Callable[[], HoldingProcess | None], report: Callable[[str], None]) -> None:
        self._ask = ask
        self._report = report
        self._seen: tuple[int, float] | None = None
        """The process that was stopped at the last check, and the time since when."""

    def look(self, now: float) -> None:
        """Check the holder once, and kill it if it has been stopped for STOPPED_HOLDER_S."""
        holder = self._ask()
        pid = None if holder is None else holder.pid
        if pid is None or process_state(pid) != "T":
            self._seen = None
        elif self._seen is None or self._seen[0] != pid:
            self._seen = (pid, now)
        elif now - self._seen[1] >= STOPPED_HOLDER_S:
            self._report(
                f"process {pid} has been stopped (SIGSTOP or ctrl-Z) for {STOPPED_HOLDER_S:g} s while it held the "
                "write lock of the log, which blocks everybody: killed; what it had begun is rolled back"
            )
            self._seen = None
            send_signal(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ which workers


def default_spawner(logs_folder: Path, report: Callable[[str], None]) -> Spawner:
    """Return the spawner that forks workers if the system supports it, else one that starts an interpreter for each."""
    if zygote.is_supported():
        return zygote.ZygoteSpawner(logs_folder / "zygote.log", report=report)
    return PlainSpawner()


def worker_commands(
    config: RunConfig,
    folder: RunFolder,
    model: Path | None = None,
    *,
    counts: Mapping[str, int] | None = None,
    host: str = "",
    files: Sequence[Path] = (),
) -> list[tuple[str, WorkerCommand]]:
    """Return the workers of a run on this machine, each with its role. Those that start quickly come first.

    `counts`: role -> number of workers, by default all that the run has. `host` goes into the names of the workers.
    `files`: the run files, for a machine that does not have the run folder.
    """
    specs = sorted(role_specs(), key=lambda spec: bool(spec.parts(config)))
    named = f"-{host}-" if host else "-"
    run = [str(folder.config_file), "--run-dir", str(folder.path)]
    if files and not folder.exists():
        run = list(map(str, files))
    return [
        (spec.name, _worker_command(config, folder, spec, index, model, run, f"{spec.name}{named}{index}"))
        for spec in specs
        for index in range(spec.count(config) if counts is None else counts.get(spec.name, 0))
    ]


def _worker_command(
    config: RunConfig,
    folder: RunFolder,
    spec: RoleSpec,
    index: int,
    model: Path | None,
    run: Sequence[str],
    process: str,
) -> WorkerCommand:
    devices = spec.devices(config)
    device = devices[index % len(devices)] if devices else None
    options = {"--role": spec.name, "--process": process, "--metrics-port": "0"}
    if device:
        options["--device"] = device
    return WorkerCommand(
        process=process,
        arguments=("worker", *run, *(word for option in options.items() for word in option)),
        log=folder.logs / f"{process}.log",
        threads=getattr(getattr(config, spec.name, None), "threads", 1),
        preload=_preload(config, spec, model),
    )


def _preload(config: RunConfig, spec: RoleSpec, model: Path | None) -> tuple[str, ...]:
    """Return the modules of built-in parts that are slow to import."""
    named = (("transport", config.transport.kind), *spec.parts(config))
    parts = [registry.table(kind)[name] for kind, name in named if name in registry.table(kind)]
    modules = [part.path.partition(":")[0] for part in parts]
    for module in (module for part in parts for module in part.preload):
        modules += _architecture(model) if module == ARCHITECTURE else [module]
    return (spec.build.partition(":")[0], *modules)


def _architecture(model: Path | None) -> list[str]:
    """Return the module of transformers that the model needs, as a list."""
    try:
        kind = json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"] if model else None
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    return [ARCHITECTURE.format(kind=kind)] if kind else []


def _silence(log: Path) -> str:
    """Return the message for a process without an error in its log. On a full disk it could not write one."""
    return f"no word in {log}{', whose disk is full; make room' if _is_full(log) else ''}"


def _is_full(log: Path) -> bool:
    return log.parent.is_dir() and shutil.disk_usage(log.parent).free < FULL_BYTES
