"""Cgroups around sandboxes: they bound the memory, the processes and the processors of all that is in one, which
rlimits cannot.

Both versions are used as they are found, without rights beyond those that the process has. The name of our folder
carries the id and the start time of its owner. So the next start can remove what is left where both the owner and the
keeper of its place (inside/launch.py) were killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
QUOTA_US = 110_000
"""Processor time in a period for all processes of a box: one processor for the program, and some for its keeper. With
less than one, what waits for it would look like a program that others hold up."""
"""Microseconds over which the kernel counts processor time."""
SLACK_BYTES = 4 << 20
"""Distance from a limit of memory that counts as the limit reached: the kernel gives memory in pieces."""
BUSY_S = 1.0
"""Most seconds in which a limit of memory is tried to be lowered. The memory of an ended program is freed later."""
PREFIX = "rftstream-sandbox-"


def start_time(pid: int) -> str | None:
    """Return when a process began, in the kernel's own count, or None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Parents:
    """The folders under which cgroups can be made. `find_parents` makes it."""

    is_v2: bool
    by_controller: dict[str, Path]
    """memory, pids, cpu -> folder. With version 2 they are the same folder."""


def find_parents() -> Parents | None:
    """Return where cgroups can be made here, or None."""
    unified = (ROOT / "cgroup.controllers").exists()
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    own = {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}
    if unified:
        return _find_v2(ROOT / own.get("", "/").lstrip("/"))
    found: dict[str, Path] = {}
    for controller in CONTROLLERS:
        folder = ROOT / controller / own.get(controller, "/").lstrip("/")
        if not (folder / "cgroup.procs").exists():
            folder = ROOT / controller  # in a container the path is that of the host
        if (folder / "cgroup.procs").exists() and _can_make(folder):
            found[controller] = folder
    return Parents(False, found) if found else None


def _find_v2(folder: Path) -> Parents | None:
    """Return the folder if its children can have controllers. A folder with processes in it, other than the root, can
    not."""
    try:
        for name in CONTROLLERS:
            with contextlib.suppress(OSError):
                (folder / "cgroup.subtree_control").write_text(f"+{name}", encoding="ascii")
        given = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return None
    found: dict[str, Path] = {name: folder for name in CONTROLLERS if name in given}
    return Parents(True, found) if found and _can_make(folder) else None


def _can_make(folder: Path) -> bool:
    probe = folder / f"{PREFIX}probe-{os.getpid()}"
    try:
        probe.mkdir()
    except FileExistsError:
        return True
    except OSError:
        return False
    with contextlib.suppress(OSError):
        probe.rmdir()
    return True


class MemoryEvents(NamedTuple):
    """How often the kernel killed a process of a cgroup for want of memory, and how often its own limit was reached. If
    the first grows and the second does not, it was the machine that had no memory left."""

    kills: int
    hits: int


class SandboxCgroup:
    """The cgroups of one place for programs. The keeper of the place makes their folders, so that none is made which
    nobody would remove. A SandboxPlace names them, sets their limits, and removes them at its end."""

    def __init__(self, parents: Parents, name: str) -> None:
        self._is_v2 = parents.is_v2
        owner = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"
        self._folders = {controller: folder / f"{owner}-{name}" for controller, folder in parents.by_controller.items()}
        self._memory_bytes = 0

    @property
    def folders(self) -> list[str]:
        """Return its folders. A process joins by its id, written to `cgroup.procs` of each."""
        return [str(folder) for folder in dict.fromkeys(self._folders.values())]

    @property
    def bounds_memory(self) -> bool:
        """Return whether it bounds memory."""
        return "memory" in self._folders

    def bound(self, *, memory_bytes: int, processes: int) -> None:
        """Set the limits for the next program. OSError if one cannot be set: nothing is run with weaker ones."""
        if (folder := self._folders.get("pids")) is not None:
            _write(folder / "pids.max", processes)
        if (folder := self._folders.get("cpu")) is not None:
            file, text = ("cpu.max", f"{QUOTA_US} {PERIOD_US}") if self._is_v2 else ("cpu.cfs_quota_us", QUOTA_US)
            _write(folder / file, text)
        if (folder := self._folders.get("memory")) is None:
            return
        _write(folder / "memory.max_usage_in_bytes", 0, may_lack=True)
        if memory_bytes == self._memory_bytes:
            return
        self._memory_bytes = 0
        if self._is_v2:
            _write(folder / "memory.swap.max", 0, may_lack=True)
            _write(folder / "memory.max", memory_bytes)
        else:
            with_swap = folder / "memory.memsw.limit_in_bytes"
            _write(with_swap, -1, may_lack=True)  # it may never be below the other
            _write(folder / "memory.limit_in_bytes", memory_bytes)
            _write(with_swap, memory_bytes, may_lack=True)
        self._memory_bytes = memory_bytes

    def memory_events(self) -> MemoryEvents:
        """Return what has happened so far for want of memory."""
        if (folder := self._folders.get("memory")) is None:
            return MemoryEvents(0, 0)
        if self._is_v2:
            events = _counts(folder / "memory.events")
            return MemoryEvents(events.get("oom_kill", 0), events.get("max", 0) + events.get("oom", 0))
        kills = _counts(folder / "memory.oom_control").get("oom_kill", 0)
        most = _count(folder / "memory.max_usage_in_bytes")  # memory.failcnt stays 0 in newer kernels
        return MemoryEvents(kills, int(most > self._memory_bytes - SLACK_BYTES))

    def remove(self) -> None:
        """Kill what is in it, and remove it."""
        for folder in dict.fromkeys(self._folders.values()):
            remove(folder)


def sweep(parents: Parents) -> int:
    """Remove the cgroups of owners that are gone, with their processes. Return how many there were."""
    count = 0
    for parent in dict.fromkeys(parents.by_controller.values()):
        for folder in parent.glob(f"{PREFIX}*-*-*"):
            pid, began, _ = folder.name.removeprefix(PREFIX).split("-", 2)
            if pid.isdigit() and start_time(int(pid)) != began:
                remove(folder)
                count += 1
    return count


def sweep_all() -> int:
    """Remove the cgroups of owners that are gone, wherever cgroups can be made here. Return how many there were."""
    parents = find_parents() if sys.platform == "linux" else None
    return 0 if parents is None else sweep(parents)


def remove(folder: Path, patience_s: float = 10.0) -> None:
    """Kill what is in a cgroup, and remove it."""
    until = time.monotonic() + patience_s
    while folder.exists() and time.monotonic() < until:
        with contextlib.suppress(OSError):
            for line in (folder / "cgroup.procs").read_text(encoding="ascii").split():
                if line == "0":
                    continue  # a process of another PID namespace; to kill 0 would kill our own group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(line), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
        time.sleep(0.005)  # the kernel says nothing when the last process is gone


def _write(file: Path, value: int | str, *, may_lack: bool = False) -> None:
    """Write a limit. The kernel refuses a limit of memory as long as more than that is in use."""
    if may_lack and not file.exists():
        return
    until = time.monotonic() + BUSY_S
    while True:
        try:
            file.write_text(str(value), encoding="ascii")
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= until:
                raise
            time.sleep(0.005)
        else:
            return


def _counts(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(count) for name, _, count in (line.partition(" ") for line in lines) if count.isdigit()}


def _count(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
