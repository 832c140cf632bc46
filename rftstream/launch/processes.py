"""Processes of workers: how one is started, watched and ended, and how none outlives its supervisor.

Each worker leads a session and process group of its own: ctrl-C reaches only the supervisor, and what a dead worker
leaves behind (children that compute rewards) is ended with its group.
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

_PR_SET_PDEATHSIG = 1

WORKER_ENTRY = "rftstream.commands:main"
"""The function that a forked worker runs with its arguments: the same as `python -m rftstream` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """One worker to start: `rftstream` with these arguments."""

    process: str
    arguments: tuple[str, ...]
    log: Path
    """Gets what it writes to stdout and stderr."""
    threads: int = 1
    preload: tuple[str, ...] = ()
    """Modules that are slow to import and that it will need."""


class Child(Protocol):
    @property
    def pid(self) -> int | None:
        """None while it is on its way."""

    def poll(self) -> int | None:
        """None while it runs; then its exit code, or minus the signal that killed it."""

    def send(self, signum: int) -> None:
        """To the worker alone; nothing if it has ended."""


class Spawner(Protocol):
    def spawn(self, command: WorkerCommand) -> Child: ...

    def close(self) -> None:
        """Ends what is left of it."""


def rftstream_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "rftstream", *arguments]


class PlainSpawner:
    """Every worker is an interpreter of its own."""

    def __init__(self, command: Callable[[Sequence[str]], list[str]] = rftstream_command) -> None:
        self._command = command

    def spawn(self, command: WorkerCommand) -> Child:
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
        pass


class PlainChild:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        if self._process.returncode is None and has_ended(self._process.pid):
            end_group(self._process.pid)
        return self._process.poll()

    def send(self, signum: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signum)


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that limits array libraries which are not loaded yet."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def limit_threads(threads: int) -> None:
    """Of array libraries in this process, loaded or not."""
    os.environ.update(thread_limits(threads))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def die_with_parent(parent: int) -> None:
    """Ends this process when `parent` is gone: by the kernel where it can (Linux); else see `is_orphan`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if is_orphan(parent):  # it died before the kernel was told
        os._exit(1)


def is_orphan(parent: int | None) -> bool:
    return parent is not None and os.getppid() != parent


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie, so that its pid and group are still its own."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def end_group(leader: int) -> None:
    """Kills what a worker left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> None:
    """Nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
