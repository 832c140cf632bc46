"""Processes that tests start, forked from one interpreter that has torch and transformers imported already.

`start` asks the warm interpreter of this process of pytest, which it starts the first time, for `rftstream ARGUMENTS`:
a process with a session, a folder, an environment, streams and a command line of its own, as Popen would start it.
What such a process starts as its zygote is forked from the same interpreter, before which nothing has happened there
but imports. Everything else that it starts is started as always.

The kernel shows the environment with which a process was started, not the one that it has; so a fork writes the
variable by which a Workplace finds its processes into the place where the kernel looks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.backends import BACKENDS
from rftstream.launch import zygote
from rftstream.launch.processes import die_with_parent
from rftstream.policies import POLICIES

MARK = "RFTSTREAM_TEST_PLACE"
"""Names the Workplace that a process comes from."""
_ROOM = "." * 400
"""Value of MARK in the warm interpreter: room for those of its forks."""
_PARTS = (POLICIES["hf"], BACKENDS["torch"])
_MODULES = (
    *zygote.BASE,
    "rftstream.commands.manage",
    "rftstream.commands.views",
    *(module.format(kind="llama") for part in _PARTS for module in part.preload),
)
_AT_START = ("HF_", "LANG", "LC_", "LD_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""What names begin with that are only looked at when an interpreter starts, or a library is imported."""
_MESSAGE_BYTES = 1 << 20
_Role = Callable[[], None]

cpu_s = 0.0
"""Processor seconds of all that the warm interpreter of this process forked and that has ended."""


# ------------------------------------------------------------------------------------------------ whoever asks


class Forked:
    """A process that the warm interpreter forked; what Popen offers of it. It is a child of the interpreter."""

    def __init__(self, channel: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        socket.send_fds(channel, [json.dumps(request).encode()], descriptors)
        self.pid = int(channel.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. TimeoutExpired as Popen has it."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        global cpu_s
        with self._lock:
            if self.returncode is None and select.select([self._channel], [], [], timeout)[0]:
                code, _, used = self._channel.recv(64).partition(b" ")
                self.returncode = int(
                    code or -signal.SIGKILL
                )  # without a code the interpreter is gone, and they with it
                cpu_s = max(cpu_s, float(used or 0))
                self._channel.close()
            return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Interpreter:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = str(Path(self._folder.name) / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.address)
        listener.listen(64)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RFTSTREAM")}
        with listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(os.getpid()), zygote.TITLE_ROOM],
                stdin=subprocess.DEVNULL, env={**environment, MARK: _ROOM, **zygote.ENVIRONMENT},
                cwd=Path(__file__).parents[1], pass_fds=(listener.fileno(),), start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_interpreter: _Interpreter | None = None


def is_possible(env: Mapping[str, str]) -> bool:
    """Return whether a fork would take these variables as an interpreter does that starts with them."""
    return not any(name.startswith(_AT_START) for name in env)


def start(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: int, stdout: int, stderr: int
) -> Forked:
    """Start `rftstream ARGUMENTS`. The streams are file descriptors."""
    global _interpreter
    if _interpreter is None or _interpreter.has_ended():  # one that was killed fails one test, not all that follow
        _interpreter = _Interpreter()
    request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "address": _interpreter.address}
    return _ask(_interpreter.address, request, [stdin, stdout, stderr])


def _ask(address: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> Forked:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    return Forked(channel, request, descriptors)


# ------------------------------------------------------------------------------------------------ the interpreter


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._asked: dict[int, tuple[socket.socket, int]] = {}
        """pidfd -> who asked for the process, and its pid."""
        self._cpu_s = 0.0

    def serve(self) -> _Role:
        """Fork for whoever asks, for ever. Return in each fork what it is to do."""
        while True:
            ready, _, _ = select.select([self._listener, *self._asked], [], [])
            for source in ready:
                if source is not self._listener:
                    self._reap(source)
                elif (role := self._fork()) is not None:
                    return role

    def _fork(self) -> _Role | None:
        channel, _ = self._listener.accept()
        told, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 4)
        if not told:  # whoever connected was killed before it asked
            channel.close()
            return None
        parent, pid = os.getpid(), os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # whoever asked may be gone
                channel.send(str(pid).encode())
            self._asked[os.pidfd_open(pid)] = (channel, pid)
            return None
        os.setsid()
        die_with_parent(parent)
        for held in [self._listener, channel, *(asker for asker, _ in self._asked.values())]:
            held.close()
        for pidfd in self._asked:
            os.close(pidfd)
        request = json.loads(told)
        return lambda: (_be_zygote if "zygote" in request else _be_command)(request, descriptors)

    def _reap(self, pidfd: int) -> None:
        asker, pid = self._asked.pop(pidfd)
        os.close(pidfd)
        _, status, used = os.wait4(pid, 0)
        self._cpu_s += used.ru_utime + used.ru_stime
        with asker, contextlib.suppress(OSError):  # whoever asked may be gone
            asker.send(f"{os.waitstatus_to_exitcode(status)} {self._cpu_s}".encode())


def _be_command(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    from rftstream.commands import main

    arguments: list[str] = request["arguments"]
    _take_over(request, descriptors, ["-m", "rftstream", *arguments])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["rftstream", *arguments]
    zygote.start_process = lambda channel, log: _start_zygote(request["address"], channel, log)
    main()


def _be_zygote(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    channel, output = descriptors
    with open(os.devnull, "rb") as nothing:
        _take_over(request, [nothing.fileno(), output, os.dup(output)], ["-m", "rftstream.launch.zygote"])
    zygote.Server(socket.socket(fileno=channel)).serve()


def _take_over(request: Mapping[str, Any], streams: Sequence[int], title: Sequence[str]) -> None:
    """Make environment, folder, streams and command line this process's own."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    for descriptor in streams[1:]:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=os.isatty(stream.fileno()), encoding="utf-8")  # type: ignore[union-attr]
    zygote.set_title(request.get("zygote", "rftstream"), list(title))
    _show_mark(os.environ.get(MARK, ""))


def _start_zygote(address: str, channel: socket.socket, log: int) -> Forked:
    """Start the zygote of a run, in place of an interpreter of its own."""
    request = {"zygote": "zygote", "cwd": os.getcwd(), "env": {**os.environ, **zygote.ENVIRONMENT}}
    return _ask(address, request, [channel.fileno(), log])


def _show_mark(value: str) -> None:
    """Write a value of MARK where the kernel looks for this process's environment."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end
    wanted = f"{MARK}={_ROOM}".encode()
    place = ctypes.string_at(start, end - start).find(wanted)
    shown = f"{MARK}={value}".encode()
    if place < 0 or len(shown) > len(wanted):
        raise AssertionError(f"{MARK}: {value} has no room in the environment of the warm interpreter")
    ctypes.memmove(start + place, shown.ljust(len(wanted), b"\0"), len(wanted))


def _serve() -> None:
    listener, pytest_process = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(pytest_process)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in _MODULES:
        importlib.import_module(module)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "an import started a thread"
    gc.collect()
    gc.freeze()
    _Server(listener).serve()()


if __name__ == "__main__":
    _serve()
