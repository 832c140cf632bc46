"""One child process of a ProcessScorer, seen from the parent."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import rftstream
from rftstream.rewards.frames import IDLE, PAGE_BYTES, Frames, Ready, Result, pack, read_page, write_page

TARGET_S = 0.05
"""Work that is sent to a child ahead of time."""
MAX_HELD = 512
MAX_CHUNK_BYTES = 1 << 20
START_TIMEOUT_S = 120.0
DYING_S = 0.5
"""Between the end of a child's pipe and its exit code."""

_RESULTS = msgspec.msgpack.Decoder(list[Result])


@dataclass(slots=True, kw_only=True)
class Pending:
    """A request that has no reply yet."""

    number: int
    request_id: str
    reward: str
    item: msgspec.Raw = field(repr=False)
    tries: int = 0
    detail: str = ""


class Child:
    def __init__(self, setup: bytes, selector: selectors.BaseSelector) -> None:
        self.held: dict[int, Pending] = {}
        """Sent and not yet answered."""
        self.versions: dict[str, tuple[str, str]] = {}
        """Name of the reward -> scorer and version; empty until the child is ready."""
        self.error: str | None = None
        """Why the rewards cannot be built."""
        self._frames = Frames()
        self._out = bytearray()
        self._item_s = TARGET_S / 8
        self._received_at = time.monotonic()
        self._started_at = self._received_at
        self._page, self._process = self._launch()
        assert self._process.stdin
        assert self._process.stdout
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        selector.register(self._stdout, selectors.EVENT_READ, self)
        self._writing = False
        self._out += setup
        self.flush(selector)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def current(self) -> int:
        """Number of the item it is at, or IDLE."""
        return read_page(self._page)[0]

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    @property
    def load(self) -> float:
        """Seconds of work ahead of it, by what items took so far."""
        return len(self.held) * self._item_s if self.versions else float("inf")

    @property
    def room(self) -> int:
        """How many items it should be sent now; 0 while what it has keeps it busy."""
        if not self.versions or self._out:
            return 0
        limit = max(1, min(MAX_HELD, int(TARGET_S / self._item_s)))
        room = limit - len(self.held)
        return room if room > limit // 2 or not self.held else 0

    def send(self, waiting: deque[Pending], selector: selectors.BaseSelector) -> None:
        """Takes as many items as there is room for from the front of the queue."""
        chunk: list[msgspec.Raw] = []
        num_bytes = 0
        if not self.held:
            self._received_at = time.monotonic()
        for _ in range(min(self.room, len(waiting))):
            num_bytes += len(bytes(waiting[0].item))
            if chunk and num_bytes > MAX_CHUNK_BYTES:
                break
            pending = waiting.popleft()
            self.held[pending.number] = pending
            chunk.append(pending.item)
        self._out += pack(chunk)
        self.flush(selector)

    def flush(self, selector: selectors.BaseSelector) -> None:
        """Writes what the pipe takes; the selector says when it takes more."""
        try:
            while self._out:
                del self._out[: os.write(self._stdin, memoryview(self._out)[: 1 << 18].tobytes())]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._out.clear()  # it is gone: the end of its stdout says so, too
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                selector.register(self._stdin, selectors.EVENT_WRITE, self)
            else:
                selector.unregister(self._stdin)

    def receive(self) -> tuple[list[Result], bool]:
        """Results that have come, and whether the child is still there and makes sense."""
        results: list[Result] = []
        try:
            while data := os.read(self._stdout, 1 << 20):
                for body in self._frames.feed(data):
                    results += self._decode(body)
        except BlockingIOError:
            return results, True
        except (ValueError, msgspec.DecodeError):
            return results, False
        return results, False

    def hangs(self, now: float, timeout_s: float) -> bool:
        if not self.versions:
            return now - self._started_at > START_TIMEOUT_S
        number, since = read_page(self._page)
        return number != IDLE and now - since > timeout_s and read_page(self._page) == (number, since)

    def kill(self, selector: selectors.BaseSelector, *, dying: bool = False) -> str:
        """Ends the child and all that it started; says how it ended. One that is dying may do so by itself."""
        if self._writing:
            selector.unregister(self._stdin)
            self._writing = False
        selector.unregister(self._stdout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DYING_S if dying else 0.0)
        code = self._process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()
        self._page.close()
        return _exit_text(code)

    def _launch(self) -> tuple[mmap.mmap, subprocess.Popen[bytes]]:
        package_folder = str(Path(rftstream.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            page = mmap.mmap(file.fileno(), PAGE_BYTES)
            write_page(page, IDLE, 0.0)
            process = subprocess.Popen(
                [sys.executable, "-m", "rftstream.rewards.child", str(os.getpid()), str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(file.fileno(),),
                start_new_session=True,  # a terminal's ctrl-C does not reach it, and its group can be killed
                env={**os.environ, "PYTHONPATH": path},
            )
        return page, process

    def _decode(self, body: bytes) -> list[Result]:
        if not self.versions:
            ready: Any = msgspec.msgpack.decode(body, type=Ready)
            self.error = ready.error
            self.versions = ready.rewards
            return []
        results = _RESULTS.decode(body)
        now = time.monotonic()
        if results:
            item_s = (now - self._received_at) / len(results)
            self._item_s = max(1e-6, 0.5 * self._item_s + 0.5 * item_s)
            self._received_at = now
        for result in results:
            self.held.pop(result.number, None)
        return results


def _exit_text(code: int | None) -> str:
    if code is None:
        return "killed by the scorer"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
