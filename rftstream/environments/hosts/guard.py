"""The guard of a host: `PYTHON -I -S guard.py SETTINGS`, run by rftstream's interpreter with the standard library.

A guard starts one host and ends with it. It runs between the host and the explorer for two reasons. First, it owns all
processes of the host: on Linux, processes that the host leaves behind become the guard's children, even if they moved
to their own session. Second, it outlives both sides: when the explorer dies, the host dies, or stdin ends, it kills all
remaining processes, writes how the host ended to stdout, and exits.

It also writes the output of the host and its children to a log of bounded size.

`PYTHON -I -S guard.py --command OWNER PROGRAM ...` guards any other program in the same way. The program has the
guard's stdin, stdout and stderr, so its callers do not notice the guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 1
LOOK_S = 1.0
"""Seconds between two checks that the owner lives, on systems that do not report its death."""
TAIL_BYTES = 2000
"""Number of bytes of the last output that the explorer gets."""
READ_BYTES = 1 << 16
KILL_S = 10.0
"""Largest number of seconds for killing the remaining processes."""
TAG = "RFTSTREAM_HOST"
"""Environment variable of the host and its children, with a unique value for each host. A sweep recognises the
processes by it."""
NOT_FOR_HOSTS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Environment variables of rftstream's own interpreter."""


class OutputLog:
    """Keeps a host's output: in a file that restarts when it is full, or on stderr up to a limit."""

    def __init__(self, path: str, max_bytes: int, name: str) -> None:
        self.tail = b""
        self._path = path
        self._max_bytes = max_bytes
        self._name = name
        self._num_bytes = 0
        self._at_line_start = True
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115  (it lives as long as the guard)
        if self._file:
            self._num_bytes = self._file.tell()

    def write(self, data: bytes) -> None:
        """Keep `data`. If the log cannot be written, the data is lost, and the host does not notice."""
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        with contextlib.suppress(OSError):
            if self._file:
                self._write_file(data)
            else:
                self._write_stderr(data)

    def _write_file(self, data: bytes) -> None:
        if self._num_bytes + len(data) > self._max_bytes and self._num_bytes:
            assert self._file
            self._file.close()
            os.replace(self._path, self._path + ".1")
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._num_bytes = 0
        assert self._file
        self._num_bytes += self._file.write(data[-self._max_bytes :])

    def _write_stderr(self, data: bytes) -> None:
        room = self._max_bytes - self._num_bytes
        if room <= 0:
            return
        self._num_bytes += len(data)
        label = f"[{self._name}] ".encode()
        lines = data[:room].splitlines(keepends=True)
        text = b"".join((label if number or self._at_line_start else b"") + line for number, line in enumerate(lines))
        self._at_line_start = text.endswith(b"\n")
        os.write(2, text)
        if len(data) >= room:
            os.write(2, b"\n" + label + b"prints too much; the rest is not kept\n")


class Guard:
    """One program and all processes that it starts. `main` makes it, starts the program, and calls `watch` and then
    `end`."""

    def __init__(self, owner: int) -> None:
        self.exit_code: int | None = None
        """The program's exit code in the shell's form; None while it runs."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._owner = owner
        self._worker = 0
        self._selector = selectors.DefaultSelector()
        self._look_s: float | None = LOOK_S
        self._is_told_to_end = False
        wake, wake_end = os.pipe()
        for descriptor in (wake, wake_end):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._selector.register(wake, selectors.EVENT_READ, "signal")
        if hasattr(os, "pidfd_open"):
            try:
                self._selector.register(os.pidfd_open(owner), selectors.EVENT_READ, "owner")
            except ProcessLookupError:
                self._is_told_to_end = True
            except OSError:
                pass  # without pidfd: checks of the parent's id, or the end of stdin, have to do

    def _on_term(self, number: int, frame: object) -> None:
        self._is_told_to_end = True

    def start(self, command: list[str], **settings: Any) -> None:
        """Start the program."""
        process = subprocess.Popen(command, **settings)
        process.returncode = 0  # `_reap` waits for it, not subprocess
        self._worker = process.pid

    def watch(self) -> None:
        """Return when the program has ended, or has to be ended."""
        while self.exit_code is None and not self._is_told_to_end:
            for key, _ in self._selector.select(self._look_s):
                if key.data == "signal":
                    os.read(key.fd, READ_BYTES)
                    self._reap()
                elif key.data == "owner" or self._is_end(key.data, key.fd):
                    return
            if self._look_s is not None and os.getppid() != self._owner:
                return

    def _is_end(self, what: str, descriptor: int) -> bool:
        """Handle input from a descriptor of a subclass. Return whether the program has to be ended."""
        raise NotImplementedError

    def end(self) -> None:
        """Kill all remaining processes."""
        deadline = time.monotonic() + KILL_S
        while self._reap() and time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def _reap(self) -> bool:
        """Record which children have ended. Return whether others remain."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._worker:
                    code = os.waitstatus_to_exitcode(status)
                    self.exit_code = code if code >= 0 else 128 - code
        except ChildProcessError:
            return False


class HostGuard(Guard):
    """The guard of a host. It also ends when its stdin ends, and keeps the host's output."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings["owner"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._look_s = None
        self._log = OutputLog(settings["log"], settings["log_bytes"], settings["name"])
        self._output, output_end = os.pipe()
        os.set_blocking(self._output, False)
        self._selector.register(0, selectors.EVENT_READ, "lifeline")
        self._selector.register(self._output, selectors.EVENT_READ, "output")
        variables = {name: value for name, value in os.environ.items() if name not in NOT_FOR_HOSTS}
        for_runner = {key: settings[key] for key in ("descriptors", "path", "max_frame_bytes", "close_s")}
        self.start(
            [settings["python"], "-u", settings["runner"], json.dumps({**for_runner, "parent": os.getpid()})],
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            pass_fds=settings["descriptors"],
            start_new_session=True,
            env={**variables, TAG: settings["tag"]},
        )
        for descriptor in (output_end, *settings["descriptors"]):
            os.close(descriptor)

    def _is_end(self, what: str, descriptor: int) -> bool:
        if what == "output":
            self._take_output()
            return False
        return not os.read(descriptor, READ_BYTES)

    def end(self) -> None:
        """Kill the host and all processes that it started, and read the last output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker, signal.SIGKILL)
        super().end()
        self._take_output()

    @property
    def tail(self) -> str:
        """Return the end of the host's output."""
        return self._log.tail.decode("utf-8", "replace")

    def _take_output(self) -> None:
        for _ in range(64):  # a host that prints without end must not block the rest
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                if self._output in self._selector.get_map():
                    self._selector.unregister(self._output)
                return
            self._log.write(data)


def guard_command(owner: int, command: list[str]) -> int:
    """Run a program until it ends, SIGTERM comes or the owner is gone; kill all remaining processes; return its exit
    code."""
    guard = Guard(owner)
    try:
        guard.start(command, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"{command[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 127
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # these ends belong to the program alone
        os.dup2(nowhere, descriptor)
    guard.watch()
    code = guard.exit_code
    guard.end()
    return 1 if code is None else code


def _die_with_parent() -> None:
    """Have the kernel kill this process when its guard dies, since nobody else would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parents() -> Iterator[tuple[int, int, int]]:
    """Yield the id, the parent and the session of every process of this machine, if the system lists them."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in filter(str.isdigit, names):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            yield int(name), int(fields[1]), int(fields[3])


def descendants(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, parent, _ in parents():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, ()) if child not in found]
        found.update(new)
    return found


def sweep(tag: str, sessions: set[int]) -> None:
    """Kill the remaining processes of a host whose guard was killed: those in its sessions, and those with its tag."""
    wanted = f"{TAG}={tag}".encode()
    for _ in range(3):  # processes that start while the list is read are found in the next round
        found = {pid for pid, _, session in parents() if session in sessions or wanted in _variables_of(pid)}
        for pid in found - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _variables_of(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def main() -> None:
    """Start the host, wait until it ends, and report how it ended."""
    if sys.argv[1] == "--command":
        sys.exit(guard_command(int(sys.argv[2]), sys.argv[3:]))
    try:
        guard = HostGuard(json.loads(sys.argv[1]))
    except OSError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    guard.watch()
    ended_by_itself = guard.exit_code is not None
    guard.end()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"code": guard.exit_code if ended_by_itself else None, "tail": guard.tail}), flush=True)


if __name__ == "__main__":
    main()
