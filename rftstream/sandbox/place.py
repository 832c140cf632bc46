"""A place for programs: one bubblewrap sandbox with a warm interpreter, which makes a box for each program."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftstream.sandbox import cgroups, layers
from rftstream.sandbox.base import MIB, Isolation, Limits, SandboxError
from rftstream.sandbox.inside import wire
from rftstream.sandbox.inside.confine import HOME, OUTER_PROC

START_S = 60.0
"""Largest number of seconds for the warm interpreter to start, or to make a box."""
END_S = 10.0
"""Largest number of seconds for the processes of a box to end."""
OWN_BYTES = 64 * MIB
"""Memory for the warm interpreter and process 1 of a box, in addition to the program's."""
OWN_PROCESSES = 8

_INSIDE = Path(__file__).parent / "inside"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("ld.so.cache", "alternatives", "java-*", "nsswitch.conf", "localtime")
_START = "import sys; sys.path.insert(0, {root!r}); from rftstream.sandbox.inside.{module} import main; main()"


class _Starter:
    """Starts processes from one thread that lives as long as this process. The kernel would otherwise kill a process
    that is set to die with its parent when the starting thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function in the thread, and return its result."""
        with self._lock:
            if self._pid != os.getpid():
                asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(asked,), name="sandbox-starter", daemon=True).start()
                self._pid, self._asked = os.getpid(), asked  # only now: threads may be exhausted on this machine
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((function, answer))
        found = answer.get()
        if isinstance(found, BaseException):
            raise found
        return found

    @staticmethod
    def _work(asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]) -> None:
        while True:
            function, answer = asked.get()
            try:
                answer.put(function())
            except BaseException as error:
                answer.put(error)


_starter = _Starter()


class SandboxPlace:
    """The processes of one place, and its cgroup. A LocalBackend makes it when it needs one more.

    `make_box` is called for one box after the other, never for two at once. A place whose box does not end, or whose
    interpreter died, is closed and not used again.
    """

    def __init__(
        self,
        number: int,
        *,
        parents: cgroups.Parents | None,
        isolation: Isolation = Isolation.full,
    ) -> None:
        self._cgroup = cgroups.SandboxCgroup(parents, str(number)) if parents else None
        try:
            self._control, theirs = socket.socketpair()
            self._errors = os.memfd_create("sandbox-errors")
        except OSError as error:
            raise SandboxError(f"sandbox: no place can be made: {error}") from None
        self._control.settimeout(START_S)
        uid = layers.own_uid(number) if layers.drops_user(isolation) else None
        try:
            with theirs:
                self._process: subprocess.Popen[bytes] = _starter.call(lambda: self._start(theirs, uid))
            self._hello()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | RuntimeError):  # no process or thread can be started
                raise SandboxError(f"sandbox: no place can be made: {error}") from None
            raise

    @property
    def polls(self) -> bool:
        """Return whether memory has to be checked from inside, since no cgroup limits it."""
        return self._cgroup is None or not self._cgroup.bounds_memory

    def make_box(self, disk_bytes: int) -> tuple[socket.socket, int]:
        """Return the socket of a new box, and the descriptor of its process 1. SandboxError if no box can be made."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"sandbox: no box can be made: {error}") from None
        ours.settimeout(START_S)
        descriptors: list[int] = []
        try:
            with theirs:
                wire.send(self._control, {"disk_bytes": disk_bytes}, descriptors=[theirs.fileno()])
            head, _, descriptors = wire.receive(self._control)
            if "error" in head:
                raise SandboxError(f"sandbox: no box can be made: {head['error']}")
            made, _, _ = wire.receive(ours)
            if "error" in made:
                raise SandboxError(f"sandbox: {made['error']}")
        except BaseException as error:
            ours.close()
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox: the warm interpreter is gone: {error}") from None
            raise
        return ours, descriptors[0]

    def bound(self, limits: Limits) -> None:
        """Set the cgroup limits for the next program. SandboxError if they cannot be set."""
        if self._cgroup is None:
            return
        try:
            self._cgroup.bound(memory_bytes=limits.memory_bytes + OWN_BYTES, processes=limits.processes + OWN_PROCESSES)
        except OSError as error:
            raise SandboxError(f"sandbox: a limit of the cgroup cannot be set: {error}") from None

    def memory_events(self) -> cgroups.MemoryEvents:
        """Return the place's counts of out-of-memory events so far."""
        return cgroups.MemoryEvents(0, 0) if self._cgroup is None else self._cgroup.memory_events()

    def close(self) -> None:
        """End all processes of the place, and remove its cgroup."""
        self._control.close()
        if (process := getattr(self, "_process", None)) is not None:
            process.kill()
            process.wait()
        if self._cgroup is not None:
            self._cgroup.remove()
        with contextlib.suppress(OSError):
            os.close(self._errors)

    def _start(self, theirs: socket.socket, uid: int | None) -> subprocess.Popen[bytes]:
        python = _interpreter()
        shown = [_prefix(python), str(_INSIDE)]
        plan = {
            "owner": os.getpid(),
            "cgroups": self._cgroup.folders if self._cgroup else [],
            "uid": uid,
            "shown": [path for path in shown if path],
            "command": [
                *_bubblewrap(python, as_root=uid is None and os.geteuid() == 0),
                *_inner(python, theirs.fileno()),
            ],
        }
        root = str(_INSIDE.parents[2])
        return subprocess.Popen(
            [python, "-I", "-S", "-B", "-c", _START.format(root=root, module="launch"), json.dumps(plan)],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(theirs.fileno(),),
            env={},
            cwd="/",
            start_new_session=True,
        )

    def _hello(self) -> None:
        try:
            head, _, _ = wire.receive(self._control)
        except OSError as error:
            said = os.pread(self._errors, 4000, 0).decode(errors="replace").strip()
            raise SandboxError(f"sandbox: it does not start: {said or error}") from None
        assert head["ready"]
        if self._process.poll() is not None:  # bubblewrap missed the death of its parent
            raise SandboxError("sandbox: it does not start: its keeper was killed")


def _interpreter() -> str:
    """Return the real interpreter, not the link in a virtual environment, which the sandbox does not show."""
    base = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    return str(base.resolve() if base.exists() else Path(sys.executable).resolve())


def _prefix(python: str) -> str:
    """Return the folder of the interpreter and its library; empty if they are in the system's folders."""
    prefix = os.path.realpath(sys.base_prefix)
    return "" if prefix == "/usr" or prefix.startswith("/usr/") else prefix


def _bubblewrap(python: str, *, as_root: bool) -> list[str]:
    path = layers.find_bwrap()
    if path is None:
        layers.find_layers.cache_clear()  # it was there before
        raise SandboxError(layers.missing_text() or "sandbox: bubblewrap: not found")
    command = [path, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    command += ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    for pattern in _ETC:
        for found in sorted(Path("/etc").glob(pattern)):
            command += ["--ro-bind", str(found), str(found)]
    if prefix := _prefix(python):
        command += ["--ro-bind", prefix, prefix]
    command += ["--ro-bind", str(_INSIDE), "/sandbox/rftstream/sandbox/inside"]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", HOME, "--dir", "/tmp", "--chdir", "/"]
    if as_root:
        command += ["--bind", "/proc", OUTER_PROC]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    path_of_programs = f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"
    for name, value in {
        "PATH": path_of_programs,
        "HOME": HOME,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }.items():
        command += ["--setenv", name, value]
    return command


def _inner(python: str, control: int) -> list[str]:
    chosen = json.dumps({"seccomp": layers.has("seccomp"), "landlock": layers.has("landlock")})
    return [python, "-s", "-P", "-c", _START.format(root="/sandbox", module="zygote"), str(control), chosen]


def end_box(channel: socket.socket, pidfd: int) -> bool:
    """End a box through its process 1, and return whether all its processes are gone."""
    channel.close()
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if poller.poll(50):  # it ends when its socket is closed
            return True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(poller.poll(END_S * 1000))
    finally:
        os.close(pidfd)
