"""A warm interpreter that forks workers: torch and transformers take seconds to import, a fork takes milliseconds.

The supervisor starts one zygote, and requests workers from it over a socket, each by its command line. The zygote
imports the modules that a worker will need, once, and forks. The worker then runs the same command as if it had been
started directly. The zygote does nothing but import: no thread, no array operation, no file of the run. If an import
starts a thread all the same, the zygote refuses all further requests, and workers are started as new interpreters.

Messages are JSON lines. To the zygote: {"number", "arguments", "log", "preload", "threads", "process"}. From it:
{"started": number, "pid"}, {"refused": number, "why"}, {"ended": number, "code"}.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rftstream.launch.processes import (
    WORKER_ENTRY,
    Child,
    PlainSpawner,
    WorkerCommand,
    die_with_parent,
    end_group,
    send_signal,
)
from rftstream.threads import limit_threads, thread_limits

BASE = (
    "rftstream.commands.run",
    "rftstream.launch.host",
    "rftstream.service.service",
    "rftstream.transport.embedded.transport",
)
"""Modules that every worker needs, imported before the first fork."""

MAX_DEATHS = 3
"""Times that a zygote may die before it is no longer restarted."""

TITLE_ROOM = "." * 800
"""A long argument of the zygote. In a fork, the worker's own command line overwrites it in memory, for `ps`."""

_PR_SET_NAME = 15
ENVIRONMENT = {**thread_limits(1), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of a zygote. In it, array libraries start no threads, and an import that asks for GPUs does not make
torch initialise CUDA, since a fork could not use CUDA then."""


def is_supported() -> bool:
    """Return whether forking after imports is safe here. It is safe on Linux; macOS's frameworks are not made for
    it."""
    return sys.platform == "linux"


# ------------------------------------------------------------------------------------------------ supervisor's side


class ZygoteSpawner:
    """A Spawner that forks workers from a zygote. If that fails, it uses `fallback`. `default_spawner` makes it."""

    def __init__(
        self, log: Path, *, fallback: PlainSpawner | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        self._log = log
        self._fallback = fallback or PlainSpawner()
        self._report = report
        self._zygote: Zygote | None = None
        self._deaths = 0

    def warm(self) -> None:
        """Start the zygote's interpreter, and return at once."""
        if self._zygote is not None and self._zygote.dead:
            self._deaths += 1
            self._zygote = None
        if self._zygote is None and self._deaths < MAX_DEATHS:
            self._zygote = Zygote(self._log)

    def spawn(self, command: WorkerCommand) -> Child:
        """Request a worker from the zygote, or from the fallback if there is no zygote."""
        command.log.parent.mkdir(parents=True, exist_ok=True)
        self.warm()
        if self._zygote is None:
            return self._fallback.spawn(command)
        return ForkedChild(self._zygote, command, self._plain)

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()

    def _plain(self, command: WorkerCommand, why: str) -> Child:
        if self._report is not None:
            self._report(f"{command.process}: started without the warm interpreter: {why}")
        self._deaths = MAX_DEATHS  # start no more zygotes; the one that lives stays, since its workers need it
        return self._fallback.spawn(command)


class ZygoteProcess(Protocol):
    """The process of a zygote, as `start_process` returns it: a Popen, or an object with the same methods."""

    @property
    def pid(self) -> int:
        """Return the process id."""

    def kill(self) -> None:
        """End the process."""

    def wait(self) -> int:
        """Wait for the end of the process."""


def _start_interpreter(channel: socket.socket, log: int) -> ZygoteProcess:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(channel.fileno()), str(os.getpid()), TITLE_ROOM],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **ENVIRONMENT},
        pass_fds=(channel.fileno(),),
        start_new_session=True,
    )


start_process: Callable[[socket.socket, int], ZygoteProcess] = _start_interpreter
"""Starts the process of a zygote, which serves the channel and writes to the log. A process that was itself forked from
a warm interpreter may replace this function, to fork the zygote from the same interpreter."""


class Zygote:
    """The zygote's process, from the supervisor's side. A ZygoteSpawner makes it, which starts the process."""

    def __init__(self, log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self._process = start_process(theirs, output.fileno())
        self._socket.setblocking(False)
        self._buffer = b""
        self._unsent = b""
        """Requests that the zygote has not read yet, since it reads none during imports."""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._unwanted: set[int] = set()
        """Requests of workers that were told to end before they were forked."""
        self.dead = False

    def ask(self, command: WorkerCommand) -> int:
        """Request a worker, and return the number of the request, which its answers carry."""
        self._number += 1
        request = {
            "number": self._number,
            "arguments": [*command.arguments, "--parent", str(self._process.pid)],
            "log": str(command.log),
            "preload": command.preload,
            "threads": command.threads,
            "process": command.process,
        }
        self._unsent += json.dumps(request).encode() + b"\n"
        self._send()
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        """Return all answers to a request so far."""
        self._send()
        while not self.dead:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lost()
                break
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if (asked := said.pop("number")) in self._unwanted and "pid" in said:
                    send_signal(said["pid"], signal.SIGKILL)
                self._answers.setdefault(asked, {}).update(said)
        return self._answers.get(number, {})

    def call_off(self, number: int) -> None:
        """Kill the worker of a request as soon as it is forked."""
        self._unwanted.add(number)

    def close(self) -> None:
        """End the zygote. The kernel then ends its workers."""
        self._lost()

    def _send(self) -> None:
        """Send what the socket accepts now. `answer`, which is called repeatedly, sends the rest."""
        try:
            while self._unsent and not self.dead:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lost()

    def _lost(self) -> None:
        self.dead = True
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ForkedChild:
    """A Child that a zygote forks, or that is started as a new interpreter if the zygote refuses. A ZygoteSpawner makes
    it."""

    def __init__(self, zygote: Zygote, command: WorkerCommand, plain: Callable[[WorkerCommand, str], Child]) -> None:
        self._zygote = zygote
        self._command = command
        self._start_plain = plain
        self._plain: Child | None = None
        self._signals: list[int] = []
        self._told = False
        """Whether it was told to end."""
        self._code: int | None = None
        self._number = zygote.ask(command)

    @property
    def pid(self) -> int | None:
        """Return the process id, or None while the process is being started."""
        if self._plain is not None:
            return self._plain.pid
        pid: int | None = self._zygote.answer(self._number).get("pid")
        return pid

    def poll(self) -> int | None:
        """Return the exit code or None. Start the worker as a new interpreter if the zygote has refused."""
        if self._code is not None:
            return self._code
        answer = self._zygote.answer(self._number)
        if self._plain is None and "refused" in answer:
            self._plain = self._start_plain(self._command, answer["refused"])
        if self._plain is not None:
            self._code = self._plain.poll()
        elif "code" in answer:
            self._code = answer["code"]
        elif self._zygote.dead:
            if "pid" in answer:
                end_group(answer["pid"])
            self._code = -signal.SIGKILL
        elif self._told and "pid" in answer and (code := zombie_code(answer["pid"])) is not None:
            end_group(answer["pid"])  # the zygote reaps nobody while it imports for another worker
            self._code = code
        if self._code is None and (pid := self.pid) is not None:
            while self._signals:
                send_signal(pid, self._signals.pop(0))
        return self._code

    def send(self, signum: int) -> None:
        """Send a signal to the worker. One that is not forked yet, since the zygote still imports, has nothing in hand
        and is called off: nobody waits a minute for a worker that will only leave."""
        self._signals.append(signum)
        self._told = True
        if self.poll() is None and self.pid is None:
            self._zygote.call_off(self._number)
            self._code = 0 if signum in (signal.SIGTERM, signal.SIGINT) else -signum


def zombie_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended and is not reaped yet, as `wait` would; None while it lives."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


# ------------------------------------------------------------------------------------------------ zygote's side


class Server:
    """The zygote's own side: it reads requests from a socket, forks workers, and reports their ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""
        self._workers: dict[int, tuple[int, int]] = {}
        """pidfd -> number of the request, and pid."""

    def serve(self) -> NoReturn:
        """Import BASE, and answer requests until the supervisor is gone."""
        _import(BASE)
        while True:
            channel = self._channel.fileno()
            ready, _, _ = select.select([channel, *self._workers], [], [])
            for source in ready:
                if source != channel:
                    self._reap(source)
            if channel in ready:
                for request in self._requests():
                    self._start(request)

    def _requests(self) -> Iterator[dict[str, Any]]:
        data = self._channel.recv(65536)
        if not data:
            os._exit(0)  # the supervisor is gone; our workers end with us
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def _start(self, request: dict[str, Any]) -> None:
        number = request["number"]
        _import(request["preload"])
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            self._say({"number": number, "refused": f"an import started {threads - 1} threads"})
            return
        gc.collect()
        gc.freeze()  # keeps the workers' collectors from touching the shared pages
        zygote, pid = os.getpid(), os.fork()
        if pid == 0:
            self._channel.close()
            for descriptor in self._workers:
                os.close(descriptor)
            _become(request, zygote)
        self._workers[os.pidfd_open(pid)] = (number, pid)
        self._say({"number": number, "pid": pid})

    def _reap(self, pidfd: int) -> None:
        number, pid = self._workers.pop(pidfd)
        os.close(pidfd)
        end_group(pid)  # before the wait: a zombie still reserves its group's number
        _, status = os.waitpid(pid, 0)
        self._say({"number": number, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, answer: dict[str, Any]) -> None:
        self._channel.sendall(json.dumps(answer).encode() + b"\n")


def _import(modules: tuple[str, ...] | list[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # a worker that needs the module will report the error
            importlib.import_module(module)


def _become(request: dict[str, Any], zygote: int) -> NoReturn:
    """Run `python -m rftstream ARGUMENTS` in the fork, and end with its exit code."""
    code = 1
    try:
        os.setsid()
        die_with_parent(zygote)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        set_title(request["process"], ["-m", "rftstream", *request["arguments"]])
        limit_threads(request["threads"])
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        module, _, function = WORKER_ENTRY.partition(":")
        getattr(importlib.import_module(module), function)(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # ends the process as the interpreter would
        import traceback

        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                output.flush()
        os._exit(code)


def set_title(process: str, arguments: list[str]) -> None:
    """Write another command line to the place where `ps` reads it: over the zygote's own in memory."""
    title = "\0".join([sys.executable, *arguments]).encode()
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
        if 0 < start < end:
            ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, process.encode()[:15], 0, 0, 0)
    except (OSError, ValueError, IndexError):
        pass  # the title is for people only


if __name__ == "__main__":
    descriptor, supervisor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_title("zygote", ["-m", "rftstream.launch.zygote"])
    Server(socket.socket(fileno=descriptor)).serve()
