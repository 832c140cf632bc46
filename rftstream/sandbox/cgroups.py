"""Cgroups around sandboxes. They limit the memory, processes and processors of everything in a sandbox, which rlimits
cannot do.

Both versions of cgroups are used as they are set up, with only the rights that this process has. The name of our folder
contains the id and start time of its owner. So the next start can remove folders whose owner and place keeper
(inside/launch.py) were both killed.
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
"""Length of the period, in microseconds, over which the kernel counts processor time."""
QUOTA_US = 110_000
"""Processor time, in microseconds of a period, for all processes of a box: one processor for the program, and some for
its keeper. With less than one processor, waiting would look like delays by other programs."""
SLACK_BYTES = 4 << 20
"""Number of bytes below a memory limit that counts as reaching it: the kernel allocates memory in pieces."""
BUSY_S = 1.0
"""Largest number of seconds for retries to lower a memory limit. The memory of an ended program is freed later."""
PREFIX = "rftstream-sandbox-"


def start_time(pid: int) -> str | None:
    """Return the start time of a process in the kernel's own units, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Parents:
    """The folders in which cgroups can be made. `find_parents` makes it."""

    is_v2: bool
    by_controller: dict[str, Path]
    """Controller (memory, pids, cpu) -> folder. In version 2 all have the same folder."""


def find_parents() -> Parents | None:
    """Return the folders in which cgroups can be made here, or None."""
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
    """Return the folder if its children can have controllers. A folder that contains processes cannot, unless it is the
    root."""
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
    """How often the kernel killed a process of a cgroup because memory ran out, and how often the cgroup's own limit
    was reached. If only the first number grows, the machine itself ran out of memory."""

    kills: int
    hits: int


class SandboxCgroup:
    """The cgroups of one place for programs. The keeper of the place makes their folders, so that each folder has
    somebody to remove it. A SandboxPlace names the cgroups, sets their limits, and removes them at its end."""

    def __init__(self, parents: Parents, name: str) -> None:
        self._is_v2 = parents.is_v2
        owner = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"
        self._folders = {controller: folder / f"{owner}-{name}" for controller, folder in parents.by_controller.items()}
        self._memory_bytes = 0

    @property
    def folders(self) -> list[str]:
        """Return the cgroups' folders. A process joins by writing its id to `cgroup.procs` in each."""
        return [str(folder) for folder in dict.fromkeys(self._folders.values())]

    @property
    def bounds_memory(self) -> bool:
        """Return whether the cgroups limit memory."""
        return "memory" in self._folders

    def bound(self, *, memory_bytes: int, processes: int, quota_us: int = QUOTA_US) -> None:
        """Set the limits for the next program. OSError if a limit cannot be set: no program may run with weaker
        limits."""
        if (folder := self._folders.get("pids")) is not None:
            _write(folder / "pids.max", processes)
        if (folder := self._folders.get("cpu")) is not None:
            file, text = ("cpu.max", f"{quota_us} {PERIOD_US}") if self._is_v2 else ("cpu.cfs_quota_us", quota_us)
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
            _write(with_swap, -1, may_lack=True)  # this limit may never be below the other
            _write(folder / "memory.limit_in_bytes", memory_bytes)
            _write(with_swap, memory_bytes, may_lack=True)
        self._memory_bytes = memory_bytes

    def memory_events(self) -> MemoryEvents:
        """Return the counts of out-of-memory events so far."""
        if (folder := self._folders.get("memory")) is None:
            return MemoryEvents(0, 0)
        if self._is_v2:
            events = _counts(folder / "memory.events")
            return MemoryEvents(events.get("oom_kill", 0), events.get("max", 0) + events.get("oom", 0))
        kills = _counts(folder / "memory.oom_control").get("oom_kill", 0)
        most = _count(folder / "memory.max_usage_in_bytes")  # memory.failcnt stays 0 in newer kernels
        return MemoryEvents(kills, int(most > self._memory_bytes - SLACK_BYTES))

    def remove(self) -> None:
        """Kill all processes in the cgroups, and remove the cgroups."""
        for folder in dict.fromkeys(self._folders.values()):
            remove(folder)


def sweep(parents: Parents) -> int:
    """Remove the cgroups of dead owners, and kill their processes. Return the number of removed cgroups."""
    count = 0
    for parent in dict.fromkeys(parents.by_controller.values()):
        for folder in parent.glob(f"{PREFIX}*-*-*"):
            pid, began, _ = folder.name.removeprefix(PREFIX).split("-", 2)
            if pid.isdigit() and start_time(int(pid)) != began:
                remove(folder)
                count += 1
    return count


def sweep_all() -> int:
    """Do the same wherever cgroups can be made here. Return the number of removed cgroups."""
    parents = find_parents() if sys.platform == "linux" else None
    return 0 if parents is None else sweep(parents)


def remove(folder: Path, patience_s: float = 10.0) -> None:
    """Kill all processes in a cgroup, and remove the cgroup."""
    until = time.monotonic() + patience_s
    while folder.exists() and time.monotonic() < until:
        with contextlib.suppress(OSError):
            for line in (folder / "cgroup.procs").read_text(encoding="ascii").split():
                if line == "0":
                    continue  # a process of another PID namespace: kill(0) would kill our own process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(line), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
        time.sleep(0.005)  # the kernel gives no notice when the last process is gone


def _write(file: Path, value: int | str, *, may_lack: bool = False) -> None:
    """Write a limit. The kernel refuses a memory limit below the memory in use."""
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
