"""One child process of a ProcessScorer, seen from the parent."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rftstream.frames import FrameReader
from rftstream.rewards.frames import (
    IDLE,
    MAX_FRAME_BYTES,
    PAGE_BYTES,
    TRACE_SIGNAL,
    At,
    Ready,
    Result,
    pack_items,
    read_page,
    read_trace,
    users_place,
    waited_s,
    write_page,
)
from rftstream.rewards.queue import Pending

TARGET_S = 0.05
"""Seconds of work that a child gets in advance."""
MAX_HELD = 512
MAX_CHUNK_BYTES = 8 << 20
START_TIMEOUT_S = 600.0
"""Largest number of seconds for a child to start, since a reward may load a model first."""
TRACE_S = 0.3
"""Seconds to wait for a child that hangs to write where it is."""
DYING_S = 0.5
"""Seconds to wait for a child's exit code after its pipe has ended."""

BUSY_SHARE = 0.5
"""Share of the time limit. If the time is up, an answer is to blame if its evaluation used at least that much CPU
time."""
PATIENCE = 60
"""Largest duration of a call, in time limits, while the machine is too busy to run it."""

_RESULTS = msgspec.msgpack.Decoder(list[Result])


class BatchSizes:
    """Decides how many rollouts a batched reward gets at once. A ProcessScorer makes it for all its children.

    The limit is the number of rollouts that the reward can score in half of the time limit, measured by its calls so
    far. A reward that loops over its list gets few, so that it is not killed; a reward that is just as quick for many
    gets many.
    """

    def __init__(self, *, max_batch: int, timeout_s: float) -> None:
        self._max_batch = max_batch
        self._patience_s = timeout_s / 2
        self._item_s: dict[str, float] = {}

    def limit(self, reward: str) -> int:
        """Return the largest number of rollouts that the reward may get at once."""
        return max(1, int(min(self._max_batch, self._patience_s / self._item_s.get(reward, 1e-9))))

    def took(self, reward: str, num_items: int, seconds: float) -> None:
        """Record that a call for `num_items` rollouts took `seconds`."""
        item_s = max(1e-9, seconds / num_items)
        self._item_s[reward] = 0.5 * self._item_s.get(reward, item_s) + 0.5 * item_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvaluation:
    """The work of a lost child: the evaluation of a policy's answer."""

    part: int
    """Number of the part of the reward, from 1."""
    busy: bool
    """Whether the evaluation used much CPU time. If not, the machine or something that it waited for is to blame."""


class RewardChild:
    """A child process that computes rewards, as its parent sees it.

    A ProcessScorer makes it, which starts the process. It then calls `take` to send requests, `receive` to read
    results, `flush` when the pipe is writable, and `kill` at the end or when the child `hangs`.
    """

    def __init__(self, setup: bytes, selector: selectors.BaseSelector, sizes: BatchSizes) -> None:
        self.held: dict[int, Pending] = {}
        """Number -> request that was sent and has no result yet."""
        self.versions: dict[str, tuple[str, str]] = {}
        """Name of the reward -> scorer and version. Empty until the child is ready."""
        self.announced = False
        """True once the scorer has looked at `versions`."""
        self.batched: frozenset[str] = frozenset()
        """Names of rewards that score several items at once."""
        self._concurrent: dict[str, int] = {}
        """Name of a reward that scores rollouts at the same time, each by itself -> how many."""
        self.without_tokens: frozenset[str] = frozenset()
        """Names of rewards that get no tokens."""
        self.given: frozenset[str] = frozenset()
        """Names of rewards that take the reward of the environment."""
        self.grouped: frozenset[str] | None = None
        """Names of rewards that see whole groups; None until the child is ready."""
        self._sizes = sizes
        self.error: str | None = None
        """Why the rewards cannot be built; None if they can."""
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._out: deque[memoryview] = deque()
        """Pieces that are still to be written, in order."""
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
        self._out.append(memoryview(setup))
        self.flush(selector)

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._process.pid

    @property
    def current(self) -> list[Pending]:
        """Return the requests that the child works on: one, or a batch."""
        at = read_page(self._page)
        if at.num_items > 1:
            return [pending for pending in self.held.values() if pending.batch == at.number]
        return [self.held[at.number]] if at.number in self.held else []

    @property
    def exited(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    @property
    def load(self) -> float:
        """Return the seconds of work that the child has, estimated from earlier items. Infinite until it is ready."""
        return len(self.held) * self._item_s if self.versions else float("inf")

    def take(self, waiting: deque[Pending], selector: selectors.BaseSelector) -> bool:
        """Send requests from the front of the queue to the child, if it has room. Return whether any were sent."""
        if not self.versions or self._out:
            return False
        chosen = self._choose_concurrent(waiting) or self._choose(waiting)
        if not chosen:
            return False
        if not self._num_in_order:
            self._received_at = time.monotonic()
        for pending, _ in chosen:
            pending.batch = chosen[0][0].number
            self.held[pending.number] = pending
        self._out.extend(map(memoryview, pack_items([item for _, item in chosen])))
        self.flush(selector)
        return True

    @property
    def _num_in_order(self) -> int:
        """Return the number of requests that the child holds and scores one after the other, or in batches."""
        if not self._concurrent:
            return len(self.held)
        return sum(pending.reward not in self._concurrent for pending in self.held.values())

    def _choose_concurrent(self, waiting: deque[Pending]) -> list[tuple[Pending, bytes]]:
        """Remove and return the first requests of rewards that score rollouts at the same time, as many as may begin
        now, in the form in which they are sent."""
        room = dict(self._concurrent)
        for pending in self.held.values() if room else ():
            if pending.reward in room:
                room[pending.reward] -= 1
        wanted: list[Pending] = []
        for pending in waiting if room else ():
            if room.get(pending.reward, 0) > 0:
                room[pending.reward] -= 1
                wanted.append(pending)
        return self._taken(waiting, wanted)

    def _choose(self, waiting: deque[Pending]) -> list[tuple[Pending, bytes]]:
        """Remove and return the next of the other requests while there is room, in the form in which they are sent. For
        a batched reward, take all its waiting requests, up to a limit."""
        others = (one for one in waiting if one.reward not in self._concurrent)
        first, num_held = next(others, None), self._num_in_order
        if first is None:
            return []
        if first.reward not in self.batched:
            limit = max(1, min(MAX_HELD, int(TARGET_S / self._item_s)))
            room = limit - num_held
            if room <= limit // 2 and num_held:
                return []  # the child has enough to do
            front = itertools.islice(itertools.chain([first], others), max(room, 1))
            return self._taken(waiting, itertools.takewhile(lambda one: one.reward not in self.batched, front))
        if num_held:
            return []  # the next batch is chosen after this one, from all requests that wait by then
        if first.alone:
            return self._taken(waiting, [first])
        same = (one for one in waiting if one.reward == first.reward and not one.alone)
        return self._taken(waiting, itertools.islice(same, self._sizes.limit(first.reward)))

    def _taken(self, waiting: deque[Pending], wanted: Iterable[Pending]) -> list[tuple[Pending, bytes]]:
        """Remove the first of the wanted requests from the queue, as many as fit, and return them with their items."""
        chosen = self._fit(wanted)
        numbers = {one.number for one, _ in chosen}
        num_left = len(waiting) - len(numbers)
        while numbers and waiting[0].number in numbers:
            numbers.remove(waiting.popleft().number)
        if len(waiting) > num_left:
            rest = [one for one in waiting if one.number not in numbers]
            waiting.clear()
            waiting.extend(rest)
        return chosen

    def _fit(self, pending: Iterable[Pending]) -> list[tuple[Pending, bytes]]:
        """Return the first requests that fit into one chunk, at least one, with their items as they are sent."""
        chosen: list[tuple[Pending, bytes]] = []
        num_bytes = 0
        for one in pending:
            item = msgspec.msgpack.encode(one.score_item(with_tokens=one.reward not in self.without_tokens))
            num_bytes += len(item)
            if chosen and num_bytes > MAX_CHUNK_BYTES:
                break
            chosen.append((one, item))
        return chosen

    def flush(self, selector: selectors.BaseSelector) -> None:
        """Write as much as the pipe accepts. The selector reports when it accepts more."""
        try:
            while self._out:
                part = self._out[0]
                written = os.write(self._stdin, part)
                if written < len(part):
                    self._out[0] = part[written:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._out.clear()  # the child is gone: the end of its stdout will report it
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                selector.register(self._stdin, selectors.EVENT_WRITE, self)
            else:
                selector.unregister(self._stdin)

    def receive(self) -> tuple[list[Result], bool]:
        """Return the results that arrived, and whether the child is alive and sends valid frames."""
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
        """Return whether the child works on one call for longer than `timeout_s`, or takes too long to start. Time in
        which it was ready to run but others had the processor does not count."""
        if not self.versions:
            return now - self._started_at > START_TIMEOUT_S
        at = read_page(self._page)
        if at.number == IDLE or not is_overdue(at, now, lambda: waited_s(self.pid), timeout_s):
            return False
        return read_page(self._page) == at

    def evaluation(self, timeout_s: float) -> AnswerEvaluation | None:
        """Return the part of a reward that is evaluating a policy's answer now, or None if none is."""
        at = read_page(self._page)
        if at.number == IDLE or at.part == 0 or at.num_items != 1:
            return None
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return AnswerEvaluation(part=at.part, busy=False)
        return AnswerEvaluation(part=at.part, busy=times.user + times.system - at.cpu_s >= BUSY_SHARE * timeout_s)

    def place(self) -> str:
        """Return where in the user's code a child that hangs is; empty if it does not say so within TRACE_S."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, TRACE_SIGNAL)
        text, ends_at = "", time.monotonic() + TRACE_S
        while time.monotonic() < ends_at:
            before, text = text, read_trace(self._page)
            if text and text == before:
                break
            time.sleep(TRACE_S / 10)
        return users_place(text)

    @property
    def crashed(self) -> bool:
        """Return whether the process ended by its own fault, such as a stack overflow."""
        return self._process.returncode in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)

    def kill(self, selector: selectors.BaseSelector, *, dying: bool = False) -> str:
        """End the child and all processes that it started, and return how it ended. A dying child gets DYING_S to end
        by itself."""
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
        package_folder = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            page = mmap.mmap(file.fileno(), PAGE_BYTES)
            write_page(page, At(IDLE, 0, 0.0))
            process = subprocess.Popen(
                [sys.executable, "-m", "rftstream.rewards.child", str(os.getpid()), str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(file.fileno(),),
                start_new_session=True,  # a terminal's ctrl-C does not reach it, and its process group can be killed
                env={**os.environ, "PYTHONPATH": path},
            )
        return page, process

    def _decode(self, body: bytes) -> list[Result]:
        if not self.versions:
            ready: Any = msgspec.msgpack.decode(body, type=Ready)
            self.error = ready.error
            self.grouped = frozenset(ready.grouped)
            self.without_tokens, self.given = frozenset(ready.without_tokens), frozenset(ready.given)
            self.versions, self._concurrent = ready.rewards, ready.concurrent
            self.batched = frozenset(ready.batched) - self.grouped - ready.concurrent.keys()
            return []
        results = _RESULTS.decode(body)
        now = time.monotonic()
        in_order = [
            self.held[result.number]
            for result in results
            if result.tried and result.number in self.held and self.held[result.number].reward not in self._concurrent
        ]
        if num_tried := len(in_order):
            item_s = (now - self._received_at) / num_tried
            self._item_s = max(1e-6, 0.5 * self._item_s + 0.5 * item_s)
            if in_order[0].reward in self.batched:
                self._sizes.took(in_order[0].reward, num_tried, now - self._received_at)
            self._received_at = now
        for result in results:
            self.held.pop(result.number, None)
        return results


def is_overdue(at: At, now: float, waited: Callable[[], float], timeout_s: float) -> bool:
    """Return whether a call's time is up: by the clock, without the time in which the child waited for a processor."""
    lasts_s = now - at.since
    if lasts_s <= timeout_s:
        return False
    return lasts_s > PATIENCE * timeout_s or lasts_s - (waited() - at.delay_s) > timeout_s


def _exit_text(code: int | None) -> str:
    if code is None:
        return "killed by the scorer"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
