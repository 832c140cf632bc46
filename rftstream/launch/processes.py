"""Starts, watches and ends the processes of workers, and makes sure that none outlives its supervisor.

Each worker leads a session and process group of its own. So ctrl-C reaches only the supervisor, and the children of a
dead worker (processes that compute rewards) are ended with its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rftstream.threads import thread_limits

_PR_SET_PDEATHSIG = 1

WORKER_ENTRY = "rftstream.commands:main"
"""The function that a forked worker runs with its arguments, the same as for `python -m rftstream`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """The command of one worker: `rftstream` with these arguments. The supervisor passes it to a Spawner."""

    process: str
    arguments: tuple[str, ...]
    log: Path
    """File for the worker's stdout and stderr."""
    threads: int = 1
    preload: tuple[str, ...] = ()
    """Modules that the worker will need and that are slow to import."""


class Child(Protocol):
    """A worker's process, as its supervisor sees it. A Spawner makes it; the supervisor polls it until it has ended."""

    @property
    def pid(self) -> int | None:
        """Return the process id, or None while the process is being started."""

    def poll(self) -> int | None:
        """Return None while the process runs; then its exit code, or the negative number of the signal that killed
        it."""

    def send(self, signum: int) -> None:
        """Send a signal to the worker process only. Do nothing if it has ended."""


class Spawner(Protocol):
    """Starts processes of workers. The supervisor calls `warm` first, `spawn` for each worker, and `close` at last."""

    def warm(self) -> None:
        """Prepare for the first worker, and return at once."""

    def spawn(self, command: WorkerCommand) -> Child:
        """Start a worker. Create its log file and the file's folder if they are missing."""

    def close(self) -> None:
        """Stop the spawner's own process, if it has one."""


def rftstream_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs `rftstream` with these arguments."""
    return [sys.executable, "-m", "rftstream", *arguments]


class PlainSpawner:
    """A Spawner that starts each worker as a new interpreter."""

    def __init__(self, command: Callable[[Sequence[str]], list[str]] = rftstream_command) -> None:
        self._command = command

    def warm(self) -> None:
        """Do nothing: no preparation is needed."""

    def spawn(self, command: WorkerCommand) -> Child:
        """Start an interpreter for the worker."""
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = subprocess.Popen(
                self._command([*command.arguments, "--parent", str(os.getpid())]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **thread_limits(command.threads)},
                start_new_session=True,
            )
        return PlainChild(process)

    def close(self) -> None:
        """Do nothing: there is no process beside the workers."""


class PlainChild:
    """A Child that is a new interpreter. `PlainSpawner` makes it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        """Return the process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code or None. Once the process has ended, end the rest of its group."""
        if self._process.returncode is None and has_ended(self._process.pid):
            end_group(self._process.pid)
        return self._process.poll()

    def send(self, signum: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(signum)


def die_with_parent(parent: int) -> None:
    """End this process when `parent` is gone. The kernel does this where it can (Linux); elsewhere see `is_orphan`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if is_orphan(parent):  # the parent died before the kernel knew
        os._exit(1)


def is_orphan(parent: int | None) -> bool:
    """Return whether this process has another parent than the given `parent`. False without a `parent`."""
    return parent is not None and os.getppid() != parent


def has_ended(pid: int) -> bool:
    """Return whether a child has ended. The child stays a zombie, so that its pid and group remain reserved."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def end_group(leader: int) -> None:
    """Kill all processes that are left in a worker's group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process. Do nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def describe_exit(code: int) -> str:
    """Return an exit code in words, with the name of the signal if there was one."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
