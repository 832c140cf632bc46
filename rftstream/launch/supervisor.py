"""Starts the roles of a run as processes, watches them, and starts again what died (PROTOCOL "Exits").

exit 0              done; not started again (a single role that leaves before the end of the run is)
exit 1, signal      passing: started again, after a pause that grows from 0.2 to 10 s
exit 2, 3, 4, 6     permanent, or waited for long enough: the run ends at once, with this exit code
exit 5              another took the role over: left alone while that one lives
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rftstream.config import registry
from rftstream.config.sections import RunConfig
from rftstream.errors import ENDS_THE_RUN
from rftstream.launch import logging as logs
from rftstream.launch.processes import (
    Child,
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
"""Alive for so long, a process starts afresh with the shortest pause."""
MAX_CRASHES = 10
"""Of one process in a row, without a step of the run in between; then the run ends."""
STOPPED_HOLDER_S = 10.0
"""A stopped process that holds the write lock of the log blocks everybody; past this it is ended."""
LOOK_EVERY_S = 1.0

IMPORTED_LATER = {
    "hf": ("transformers.models.auto.modeling_auto", "rftstream.policies.attention", "rftstream.policies.batch"),
    "torch": (
        "transformers.models.auto.modeling_auto",
        "rftstream.backends.torch.critic",
        "rftstream.backends.torch.lora",
    ),
}
"""Part -> what is imported when it is built: its module is light, since others ask it for its settings."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run could not go on."""

    exit_code: int
    text: str


@dataclass(slots=True)
class Slot:
    """One worker that there should be, and the process that is it now."""

    role: str
    command: WorkerCommand
    child: Child | None = None
    state: str = "to start"
    """to start, running, left, fenced, failed."""
    start_at: float = 0.0
    started_at: float = 0.0
    restarts: int = 0
    pauses: int = 0
    crashes: int = 0
    log_offset: int = 0
    """Where the log of this process begins in its file."""

    @property
    def process(self) -> str:
        return self.command.process


class Supervisor:
    def __init__(
        self,
        commands: Iterable[tuple[str, WorkerCommand]],
        spawner: Spawner,
        *,
        report: Callable[[str], None],
        deadline_s: float = 30.0,
        lock_holder: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = [Slot(role, command) for role, command in commands]
        self.failure: Failure | None = None
        self.killed = False
        self._spawner = spawner
        self._report = report
        self._deadline_s = deadline_s
        self._lock_holder = lock_holder
        self._clock = clock
        self._control = ControlView()
        self._version = 0
        self._troubles = {slot.process: logs.Troubles(slot.command.log, clock=clock) for slot in self.slots}
        self._stop_by: float | None = None
        self._leave_by: float | None = None
        self._stopped_holder: tuple[int, float] | None = None
        self._look_at = 0.0

    @property
    def all_left(self) -> bool:
        return all(slot.child is None and slot.state not in ("to start", "fenced") for slot in self.slots)

    @property
    def stopping(self) -> bool:
        return self._stop_by is not None

    def poll(self, control: ControlView, version: int) -> None:
        """One look at everything, given what the log says. Never waits."""
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
            self._end_stopped_holder(now)
            self._pass_troubles_on()
        self._keep_deadlines(now)

    def stop(self) -> None:
        """Everybody finishes what is in hand and leaves; who has not left after the deadline is ended."""
        if self._stop_by is None:
            self._stop_by = self._clock() + self._deadline_s
            self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        self.killed = True
        self._stop_by = self._clock()
        for slot in self.slots:
            slot.state = "killed" if slot.child is not None else slot.state
        self._signal_all(signal.SIGKILL)

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
            self._start(slot, now)
        elif slot.state == "fenced" and now >= slot.start_at:
            slot.start_at = now + LOOK_EVERY_S
            self._look_at_successor(slot, now)

    def _start(self, slot: Slot, now: float) -> None:
        log = slot.command.log
        slot.log_offset = log.stat().st_size if log.exists() else 0
        slot.child = self._spawner.spawn(slot.command)
        slot.started_at = now
        slot.state = "running"

    def _ended(self, slot: Slot, code: int, now: float) -> None:
        slot.child = None
        slot.command.log.with_suffix(".port").unlink(missing_ok=True)
        if self.stopping or (code == 0 and self._may_leave(slot)):
            slot.state = "left"
        elif code in ENDS_THE_RUN:
            slot.state = "failed"
            self._give_up(code, f"{slot.process}: {self._error(slot)}")
        elif code == 5:
            slot.state = "fenced"
            self._report(f"{slot.process}: {self._error(slot)}; left alone while that one lives")
        else:
            self._start_again(slot, code, now)

    def _may_leave(self, slot: Slot) -> bool:
        """Whether an exit 0 is in order."""
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
                code if code > 0 else 1,
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

    def _nobody_is_needed(self, slot: Slot) -> bool:
        return self.stopping or (self._control.finished is not None and not role_spec(slot.role).outlives_the_run)

    def _look_at_successor(self, slot: Slot, now: float) -> None:
        """Of a role that another took over. When the run is finished, that one may still be at its last work."""
        claim = self._control.claims.get(slot.role)
        if claim is not None and claim.host != socket.gethostname():
            slot.state = "left" if self._control.finished is not None else slot.state
        elif claim is None or not is_alive(claim.pid):
            if not self._nobody_is_needed(slot):
                self._report(f"{slot.process}: who had taken the role over is gone; started again")
            slot.state = "to start"
            slot.start_at = now

    def _error(self, slot: Slot) -> str:
        text = logs.last_error(slot.command.log, since=slot.log_offset) or f"no word in {slot.command.log}"
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
        """Asked, and after another deadline no more."""
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

    def _pass_troubles_on(self) -> None:
        """Warnings in the logs of workers: a run that stands still says why."""
        for slot in self.slots:
            for text in self._troubles[slot.process].new():
                self._report(f"{slot.process}: {text}")

    def _end_stopped_holder(self, now: float) -> None:
        pid = self._lock_holder() if self._lock_holder is not None else None
        if pid is None or process_state(pid) != "T":
            self._stopped_holder = None
        elif self._stopped_holder is None or self._stopped_holder[0] != pid:
            self._stopped_holder = (pid, now)
        elif now - self._stopped_holder[1] >= STOPPED_HOLDER_S:
            self._report(
                f"process {pid} has been stopped (SIGSTOP or ctrl-Z) for {STOPPED_HOLDER_S:g} s while it held the "
                "write lock of the log, which blocks everybody: killed; what it had begun is rolled back"
            )
            self._stopped_holder = None
            send_signal(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ what to start


def worker_commands(config: RunConfig, folder: RunFolder, model: Path | None = None) -> list[tuple[str, WorkerCommand]]:
    """The workers of a run on this machine, with their role: those that are quick to start first."""
    specs = sorted(role_specs(), key=lambda spec: bool(spec.parts(config)))
    return [
        (spec.name, _worker_command(config, folder, spec, index, model))
        for spec in specs
        for index in range(spec.count(config))
    ]


def _worker_command(
    config: RunConfig, folder: RunFolder, spec: RoleSpec, index: int, model: Path | None
) -> WorkerCommand:
    process = f"{spec.name}-{index}"
    devices = spec.devices(config)
    device = devices[index % len(devices)] if devices else None
    return WorkerCommand(
        process=process,
        arguments=(
            "worker",
            str(folder.config_file),
            "--role",
            spec.name,
            "--run-dir",
            str(folder.path),
            "--process",
            process,
            "--metrics-port",
            "0",
            *(("--device", device) if device else ()),
        ),
        log=folder.logs / f"{process}.log",
        threads=getattr(getattr(config, spec.name, None), "threads", 1),
        preload=_preload(config, spec, model),
    )


def _preload(config: RunConfig, spec: RoleSpec, model: Path | None) -> tuple[str, ...]:
    """Modules of built-in parts that are slow to import."""
    parts = (("transport", config.transport.kind), *spec.parts(config))
    modules = [registry.table(kind)[name].partition(":")[0] for kind, name in parts if name in registry.table(kind)]
    if any(name in ("hf", "vllm", "torch") for _, name in parts):
        modules += ["torch", "transformers", *_architecture(model)]
    modules += [module for _, name in parts for module in IMPORTED_LATER.get(name, ())]
    return (spec.build.partition(":")[0], *modules)


def _architecture(model: Path | None) -> tuple[str, ...]:
    """The module of transformers that the model needs."""
    try:
        kind = json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"] if model else None
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    return (f"transformers.models.{kind}.modeling_{kind}",) if kind else ()
