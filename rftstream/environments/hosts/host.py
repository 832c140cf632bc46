"""One host process, as the explorer sees it: its guard, its two pipes, and its pending calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.environments.hosts.guard import sweep
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostTimeout
from rftstream.frames import FrameReader, frame

FOLDER = Path(__file__).parent
MAX_FRAME_BYTES = 64 << 20
"""Largest size of a request and an answer, in bytes. The texts of a rollout have to fit on the log, but the saved state
of an environment may be an object of the store."""
LOG_BYTES = 1 << 20
"""Largest number of output bytes that are kept: of each host on stderr, of each file in a log folder."""
START_S = 60.0
"""Largest number of seconds for the other interpreter to become ready."""
CLOSE_S = 5.0
"""Seconds for a host to close its environments before it is killed."""
END_S = 15.0
"""Seconds for a guard to kill the remaining processes before it is killed itself."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The settings of a host process. Environments with equal settings share hosts."""

    python: str = ""
    """The interpreter: a path, or a name on PATH; empty for rftstream's own."""
    processes: int = 1
    idle_timeout_s: float = 300.0
    path: tuple[str, ...] = ()
    """Folders at the front of its sys.path."""
    log_folder: str = ""
    """Folder for output, with a file for each host; empty for this process's stderr."""

    def interpreter(self) -> str:
        """Return the path of the interpreter. ConfigError if there is none."""
        if not self.python:
            return sys.executable
        if os.sep not in self.python:
            found = shutil.which(self.python)
        else:
            found = next((str(place) for place in places_of(self.python) if os.access(place, os.X_OK)), None)
        if found is None or Path(found).is_dir():
            raise ConfigError(
                f"environments: python: got {self.python!r}, expected an interpreter that can be run; "
                "make one, as with: python -m venv FOLDER"
            )
        return found


def own_folders() -> tuple[str, ...]:
    """Return the folders in which this process finds the user's own modules: those in sys.path that contain neither an
    interpreter's packages nor rftstream itself."""
    package = str(Path(__file__).parents[3])
    prefixes = tuple({os.path.realpath(one) + os.sep for one in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    folders = dict.fromkeys(os.path.realpath(entry or ".") for entry in sys.path)
    return tuple(
        folder for folder in folders if os.path.isdir(folder) and folder != package and not folder.startswith(prefixes)
    )


def places_of(path: str) -> list[Path]:
    """Return the possible places of a relative path: in the user's own folders, and in the working folder."""
    here = Path(path).expanduser()
    return [*(Path(folder) / here for folder in own_folders() if not here.is_absolute()), here.absolute()]


def _folder(path: str) -> Path:
    places = places_of(path)
    return next((place for place in places if place.is_dir()), places[-1])


class Host:
    """One host process and its guard.

    A HostPool makes it and calls `start` once, then `prepare` for a target and `call` for any number of environments at
    once, and `close`. If the host dies, all its unanswered calls raise HostError. All methods run in the pool's event
    loop.
    """

    def __init__(self, settings: HostSettings, name: str) -> None:
        self.keys: set[str] = set()
        """Environments and agents in it that have not ended and were not abandoned."""
        self.stuck: dict[int, str] = {}
        """Abandoned calls without an answer -> their keys."""
        self.idle_since = 0.0
        """Time at which its last environment left, by its loop's clock."""
        self.pid = 0
        """Process id of the other interpreter; 0 until it is ready."""
        self.end: str | None = None
        """How the process ended; None while it runs."""
        self._settings = settings
        self._name = name
        self._tag = uuid.uuid4().hex
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._imports: dict[str, asyncio.Task[Any]] = {}
        self._numbers = itertools.count(1)
        self._status = bytearray()
        self._fault = ""
        """Fault of the host, if that is why it was ended."""

    async def start(self) -> None:
        """Start the process, and wait until it is ready. ConfigError or HostError if that fails."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._guard, requests, replies = self._spawn()
        assert self._guard.stdout
        answers, status = _Replies(self._on_frame, self._on_fault), _Status(self._status, self._on_end)
        to_host, from_host = os.fdopen(requests, "wb", buffering=0), os.fdopen(replies, "rb", buffering=0)
        self._requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, to_host)
        self._transports: list[asyncio.BaseTransport] = [self._requests]
        self._transports.append((await loop.connect_read_pipe(lambda: answers, from_host))[0])
        self._transports.append((await loop.connect_read_pipe(lambda: status, self._guard.stdout))[0])
        waited = (self._ready, self._ended)
        await asyncio.wait(waited, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            if self.end is None:
                self._on_fault(f"was not ready after {START_S:g} s")
                await self._ended
            raise HostError(f"{self._name}: {self.end}")

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int, int]:
        settings = self._settings
        requests_end, requests = os.pipe()
        replies, replies_end = os.pipe()
        log = ""
        if settings.log_folder:
            os.makedirs(settings.log_folder, exist_ok=True)
            log = os.path.join(settings.log_folder, f"{self._name}.log")
        for_guard = {
            "python": settings.interpreter(),
            "runner": str(FOLDER / "runner.py"),
            "owner": os.getpid(),
            "descriptors": [requests_end, replies_end],
            "path": [*(str(_folder(one)) for one in settings.path), *own_folders()],
            "max_frame_bytes": MAX_FRAME_BYTES,
            "close_s": CLOSE_S,
            "log": log,
            "log_bytes": LOG_BYTES,
            "name": self._name,
            "tag": self._tag,
        }
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(FOLDER / "guard.py"), json.dumps(for_guard)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(requests_end, replies_end),
                start_new_session=True,  # a terminal's ctrl-C does not reach it
                bufsize=0,
            )
        finally:
            os.close(requests_end)
            os.close(replies_end)
        return guard, requests, replies

    async def prepare(self, target: str) -> None:
        """Import a target in the host, once. ConfigError if that fails."""
        if target not in self._imports:
            work = self.call("import", f"import {target}", 0, target=target)  # each caller has its own limit
            self._imports[target] = asyncio.create_task(work)
            self._imports[target].add_done_callback(lambda done: done.cancelled() or done.exception())  # if none waits
        await asyncio.shield(self._imports[target])

    async def call(self, do: str, key: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Return the host's answer. A `timeout_s` of 0 means no limit."""
        if self.end is not None:
            raise HostError(f"{self._name}: {self.end}")
        number = next(self._numbers)
        body = json.dumps({"id": number, "do": do, "key": key, **fields}).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise HostError(f"{self._name}: a request of {len(body)} bytes; expected at most {MAX_FRAME_BYTES}")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._requests.write(frame(body))
        try:
            async with asyncio.timeout(timeout_s or None):
                answer: dict[str, Any] = await future
                return answer
        except (TimeoutError, asyncio.CancelledError) as error:
            if self._waiting.pop(number, None) is not None and self.end is None:
                self.stuck[number] = key
                self._requests.write(frame(json.dumps({"do": "cancel", "key": key, "call": number}).encode()))
            if isinstance(error, TimeoutError):
                raise HostTimeout(f"{self._name}: no answer to {do!r} within {timeout_s:g} s") from None
            raise

    def _on_frame(self, body: bytes) -> None:
        answer = json.loads(body)
        if "ready" in answer:
            self.pid = answer["ready"]["pid"]
            self._ready.set_result(None)
            return
        self.stuck.pop(answer["id"], None)
        future = self._waiting.pop(answer["id"], None)
        if future is None or future.done():
            return
        if "error" not in answer:
            future.set_result(answer["value"])
            return
        kind, line = answer["error"]["kind"], answer["error"]["line"]
        if kind == "import":
            python = self._settings.python or sys.executable
            future.set_exception(
                ConfigError(f"environments: target: {line} (with {python}); install it there, or mend it")
            )
        else:
            future.set_exception(HostedCodeError(line))

    def _on_fault(self, fault: str) -> None:
        """End a host that violates the protocol."""
        self._fault = self._fault or fault
        self._cut_lifeline()

    def _cut_lifeline(self) -> None:
        assert self._guard.stdin
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def _on_end(self) -> None:
        """Record how the host ended. Its guard has killed all remaining processes, or was killed itself."""
        status = self._read_status()
        if status is None:
            for pid in filter(None, (self.pid, self._guard.pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            sweep(self._tag, {pid for pid in (self.pid, self._guard.pid) if pid})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=END_S)
        self.end = self._describe(status)
        for transport in self._transports:
            transport.close()
        self._cut_lifeline()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HostError(f"{self._name}: {self.end}"))
        self._waiting.clear()
        self.stuck.clear()
        if not self._ended.done():
            self._ended.set_result(None)

    def _read_status(self) -> Mapping[str, Any] | None:
        try:
            status: Mapping[str, Any] = json.loads(self._status)
            return status
        except ValueError:
            return None

    def _describe(self, status: Mapping[str, Any] | None) -> str:
        if status is None:
            return "its guard was killed"
        if "error" in status:
            return f"cannot be started: {status['error']}"
        how = self._fault or (f"ended with {exit_text(status['code'])}" if status["code"] is not None else "was ended")
        last = status["tail"].strip().rpartition("\n")[2].strip()
        return f"{how}; the last that it printed: {last}" if last else how

    async def close(self, patience_s: float = CLOSE_S) -> None:
        """End the host. It gets `patience_s` to close its environments; then all remaining processes are killed."""
        if self.end is not None:
            return
        self._requests.close()
        await asyncio.wait((self._ended,), timeout=patience_s)
        self._cut_lifeline()
        await asyncio.wait((self._ended,), timeout=END_S)
        if not self._ended.done():
            self._guard.kill()
            await self._ended


def exit_text(code: int) -> str:
    """Return how a process ended, from its exit code in the shell's form."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"


class _Replies(asyncio.Protocol):
    """Reads the answers of a host."""

    def __init__(self, on_frame: Callable[[bytes], None], on_fault: Callable[[str], None]) -> None:
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._on_frame = on_frame
        self._on_fault = on_fault

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._on_frame(body)
        except (ValueError, KeyError, TypeError) as error:
            self._on_fault(f"sent what is no answer ({type(error).__name__}: {error})")


class _Status(asyncio.Protocol):
    """Reads the guard's final report."""

    def __init__(self, status: bytearray, on_end: Callable[[], None]) -> None:
        self._status = status
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        self._status += data

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
