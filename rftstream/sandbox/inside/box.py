"""Process 1 of a box: it mounts writable folders, starts one program after the other, and ends them.

The zygote forks it for each box; it serves one caller. It reads messages from its socket:

    put    {"files": [[name, bytes, mode], ...]} and their bytes: written below the home folder
    get    {"names": [...] or null, "max_bytes", "max_files"}: regular files below the home folder are sent back
    run    a job, with the descriptors of the program: the answer says how the program ended
    stop   while a program runs: it is killed

When the socket is closed, process 1 ends, and the kernel then kills all other processes of the box.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from rftstream.sandbox.inside import kernel, programs, wire
from rftstream.sandbox.inside.confine import HOME, OUTER_PROC, confine

POLL_S = 0.05
"""Seconds between two checks of the memory and processor time of a program's processes."""

OURS = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS)
"""File errors that are the machine's fault, not the writer's."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NUM_CPUS = os.cpu_count() or 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(
    channel: socket.socket, request: dict[str, Any], layers: dict[str, Any], program_filter: bytes | None
) -> NoReturn:
    """Make the box, and serve its caller until the socket is closed."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        _mount(request["disk_bytes"])
        kernel.drop_capabilities()
        os.umask(0o022)
        os.chdir(HOME)
        wire.send(channel, {"made": True})
    except OSError as error:
        _answer(channel, {"error": f"the box cannot be made: {error}"})
        os._exit(1)
    served = Box(channel, layers, program_filter)
    while True:
        try:
            served.serve_one()
        except OSError as error:
            _answer(channel, {"error": f"the box broke: {error}"})
            os._exit(0)


def _answer(channel: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    try:
        wire.send(channel, head, body)
    except OSError:
        os._exit(0)


def _mount(disk_bytes: int) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", HOME, "tmpfs", flags, f"size={disk_bytes},nr_inodes=16384,mode=755")
    for name, target in (("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"{HOME}/.{name}", 0o777)
        kernel.mount(f"{HOME}/.{name}", target, None, kernel.MS_BIND)
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    if os.path.isdir(OUTER_PROC):  # the program is root outside, whatever its name here
        for name in ("sys", "sysrq-trigger", "irq", "bus"):
            if os.path.exists(path := f"/proc/{name}"):
                kernel.mount(path, path, None, kernel.MS_BIND | kernel.MS_REC)
                kernel.mount("none", path, None, flags | kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
        kernel.mount("tmpfs", OUTER_PROC, "tmpfs", flags | kernel.MS_RDONLY | kernel.MS_NOEXEC, "size=4k,mode=0")


class Box:
    """The server of one box. `main` makes it and calls `serve_one` for each message."""

    def __init__(self, channel: socket.socket, layers: dict[str, Any], program_filter: bytes | None) -> None:
        self._channel, self._layers, self._filter = channel, layers, program_filter

    def serve_one(self) -> None:
        """Answer one message."""
        try:
            head, body, descriptors = wire.receive(self._channel)
        except wire.WireBroken:
            os._exit(0)
        match head["do"]:
            case "put":
                self._put(head["files"], body)
            case "get":
                self._get(head)
            case "run":
                self._run(head, descriptors)

    def _put(self, files: list[Any], body: bytes) -> None:
        position = 0
        try:
            for name, size, mode in files:
                os.makedirs(os.path.dirname(f"{HOME}/{name}"), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(f"{HOME}/{name}", flags, mode)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(body[position : position + size])
                position += size
        except OSError as error:
            kind = "error" if error.errno in OURS else "refused"
            _answer(self._channel, {kind: f"{error.strerror}: {error.filename or 'a file'}"})
        else:
            _answer(self._channel, {"done": True})

    def _get(self, head: dict[str, Any]) -> None:
        files: list[list[Any]] = []
        parts: list[bytes] = []
        left = head["max_bytes"]
        names = _found(HOME) if head["names"] is None else iter(head["names"])
        for name in names:
            data, mode = _regular(f"{HOME}/{name}", left)
            if data is None:
                continue
            left -= len(data)
            if left < 0 or len(files) >= head["max_files"]:
                _answer(self._channel, {"refused": "more files, or larger ones, than may be taken out"})
                return
            files.append([name, len(data), mode])
            parts.append(data)
        _answer(self._channel, {"files": files}, b"".join(parts))

    def _run(self, job: dict[str, Any], descriptors: list[int]) -> None:
        read, write = os.pipe()
        began = time.monotonic()
        cpu_before = _reaped_s()
        pid = os.fork()
        if pid == 0:
            self._become(job, descriptors, write)
        for descriptor in (*descriptors, write):
            os.close(descriptor)
        told = bytearray()
        while part := os.read(read, 1 << 16):  # closed when the program begins, or cannot begin
            told += part
        os.close(read)
        watch = _Watch(pid, began, cpu_before, job["limits"], polls=job["polls"])
        stopped = "error" if told else watch.wait(self._channel)
        status, usage = _end_all(pid)
        seen = watch.last if stopped else (0.0, 0.0)
        _answer(
            self._channel,
            {
                "exit": os.waitstatus_to_exitcode(status) if status is not None else None,
                "stopped": stopped,
                "error": told.decode(errors="replace"),
                "wall_s": time.monotonic() - began,
                "cpu_s": _reaped_s() - cpu_before,
                "delay_s": seen[1],
                "max_rss_bytes": usage.ru_maxrss * 1024 if usage is not None else 0,
            },
        )

    def _become(self, job: dict[str, Any], descriptors: list[int], write: int) -> NoReturn:
        """Become the program. Errors before its beginning are reported through the pipe, which is closed when the
        program begins."""
        try:
            self._channel.detach()
            status = os.dup2(write, 900, inheritable=False)
            os.closerange(901, 1 << 20)
            lifted = [os.dup(descriptor) for descriptor in descriptors]
            lifted = [os.dup2(one, 800 + place, inheritable=False) for place, one in enumerate(lifted)]
            for place, one in enumerate(lifted):
                os.dup2(one, place)
            os.closerange(len(descriptors), 900)
            if job["mode"] == "command" and "/" not in (command := job["argv"][0]) and shutil.which(command) is None:
                raise FileNotFoundError(f"the sandbox has no {command}; install it on the machine that runs programs")
            confine(job["limits"], self._layers, self._filter)
        except BaseException as error:
            os.write(900, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
        os.close(status)
        programs.become(job)


def _found(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(one for one in folders if not (place == folder and one in (".tmp", ".shm")))
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in sorted(names))


def _regular(path: str, most: int) -> tuple[bytes | None, int]:
    """Return the content of a regular file, and its mode. For links, pipes and devices the content is None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None, 0
    with os.fdopen(descriptor, "rb") as file:
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode):
            return None, 0
        return file.read(max(0, most) + 1), stat.S_IMODE(told.st_mode)


def _reaped_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_all(pid: int) -> tuple[int | None, resource.struct_rusage | None]:
    """Kill all other processes of the box. Return the exit status of `pid`, and its resource usage."""
    found: tuple[int | None, resource.struct_rusage | None] = (None, None)
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            ended, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return found
        if ended == pid:
            found = (status, usage)


class _Watch:
    """Waits for the end of a program, and decides when and why it has to be killed.

    Wall time does not count while the program is ready to run but other programs of the machine have the processor.
    That is the time that a thread spent in the run queue, less the time in which the program's own other threads ran.
    The kernel forgets the usage of processes that nobody waited for. So the last known usage is kept, and a process
    that ended between two checks is assumed to have used all of that time."""

    def __init__(self, pid: int, began: float, cpu_before: float, limits: dict[str, Any], *, polls: bool) -> None:
        self._pid, self._began, self._cpu_before, self._limits = pid, began, cpu_before, limits
        self._polls = polls
        self._ran_s: dict[tuple[int, str], float] = {}
        """Processor seconds of living processes at the last check, by id and start time."""
        self._gone_s = self._unseen_s = 0.0
        """Processor seconds of ended processes when last seen, and the largest time that they may have used unseen."""
        self._num_threads, self._last_id, self._looked = 1, _last_id() - 1, began
        self.last = (0.0, 0.0)
        """Processor seconds, and seconds in the run queue because of other programs, at the last check."""

    def wait(self, channel: socket.socket) -> str | None:
        """Return None when the program ends by itself, or the reason to kill it: wall, cpu, memory, overload, stop."""
        poller = select.poll()
        pidfd = os.pidfd_open(self._pid)
        poller.register(pidfd, select.POLLIN)
        poller.register(channel, select.POLLIN)
        pause_s = min(POLL_S, self._limits["wall_s"])
        try:
            while True:
                for descriptor, _ in poller.poll(max(1.0, pause_s * 1000)):
                    if descriptor == pidfd and self._has_ended():
                        return None
                    if descriptor != pidfd:
                        return self._asked(channel)
                if (why := self._why_end()) is not None:
                    return why
        finally:
            os.close(pidfd)

    def _has_ended(self) -> bool:
        """Return whether the program has ended, and reap other ended processes of the box."""
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _asked(self, channel: socket.socket) -> str:
        try:
            wire.receive(channel)
        except wire.WireBroken:
            os._exit(0)
        return "stop"

    def _why_end(self) -> str | None:
        wall_s = time.monotonic() - self._began
        cpu_s, delay_s, memory_bytes = self._look()
        self.last = (cpu_s, delay_s)
        if self._polls and memory_bytes > self._limits["memory_bytes"]:
            return "memory"
        if cpu_s >= self._limits["cpu_s"]:
            return "cpu"
        if wall_s - delay_s >= self._limits["wall_s"]:
            return "wall"
        return "overload" if wall_s >= self._limits["hard_s"] else None

    def _look(self) -> tuple[float, float, int]:
        """Return the processor seconds of all processes, the seconds of delay by other programs, and the memory in
        use."""
        _reap_others(self._pid)
        used_s, memory_bytes, num_threads = _reaped_s() - self._cpu_before, 0, 0
        ran_s: dict[tuple[int, str], float] = {}
        delays = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]:
            try:
                with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                used_s += sum(map(int, fields[11:15])) * _TICK_S
                ran_s[pid, fields[19]] = sum(map(int, fields[11:13])) * _TICK_S
                num_threads += int(fields[17])
                memory_bytes += int(fields[21]) * _PAGE_BYTES
                if int(fields[16]) <= 0 and not _has_low_priority_group(pid):  # else it delays itself
                    delays += _delays(pid)
            except (OSError, ValueError, IndexError):
                continue  # the process has ended meanwhile
        self._account(ran_s, num_threads)
        used_s = max(used_s, seen_s := sum(ran_s.values()) + self._gone_s)
        own_s = max(used_s, seen_s + self._unseen_s)
        foreign_s = max((delay - max(0.0, own_s - ran) for ran, delay in delays), default=0.0)
        return used_s, max(0.0, foreign_s), memory_bytes

    def _account(self, ran_s: dict[tuple[int, str], float], num_threads: int) -> None:
        """Record the processor time of living processes, and of those that ended since the last check."""
        now, last_id = time.monotonic(), _last_id()
        self._gone_s += sum(used for process, used in self._ran_s.items() if process not in ran_s)
        num_new = last_id - self._last_id if last_id >= self._last_id else _NUM_CPUS  # the kernel restarted its ids
        num_gone = max(0, self._num_threads + num_new - num_threads)
        self._unseen_s += (now - self._looked) * min(num_gone, _NUM_CPUS)
        self._ran_s, self._num_threads, self._last_id, self._looked = ran_s, num_threads, last_id, now


def _last_id() -> int:
    """Return the newest id of a process or thread in this box."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split()[4])


def _reap_others(pid: int) -> None:
    """Reap ended processes that lost their parent, so that dead processes do not fill the box."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, pid):
            continue
        try:
            os.waitpid(int(name), os.WNOHANG)
        except ChildProcessError:
            continue


def _has_low_priority_group(pid: int) -> bool:
    """Return whether a process has lowered the priority of its session's scheduling group. Landlock prevents that if
    the kernel has it."""
    try:
        with open(f"/proc/{pid}/autogroup", encoding="ascii") as file:
            return int(file.read().split()[-1]) > 0
    except (OSError, ValueError, IndexError):
        return False


def _delays(pid: int) -> list[tuple[float, float]]:
    """Return, for some threads of a process, the seconds that they ran and the seconds that they stood in the run
    queue."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task")[:64]:
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            ran, waited, _ = map(int, file.read().split())
        found.append((ran / 1e9, waited / 1e9))
    return found


assert sys.platform == "linux"
