"""Trackers with a remote service. A separate thread talks to the service, so that nothing waits for a slow or missing
one.

At its start a tracker asks the service for its last position (or reads it from a file beside the run), and continues
there. A service that does not answer is asked again, after longer and longer pauses. Meanwhile the log keeps the
records. So beside the records of the start, only MAX_WAITING wait in memory. Later ones are left to the next start,
which reads the log again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rftstream.config import secrets
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ConfigError
from rftstream.trackers.tracked import SampleTable, TrackedRun

PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Seconds before the second try, and the most seconds before any try."""
CLOSE_S = 60.0
"""Most seconds to write the rest when the session ends."""

MAX_WAITING = 10_000
"""Most records that wait for a service."""

News = StepRecord | EvalResult | SampleTable
"""A record that a tracker shows."""


class Written(NamedTuple):
    """The position up to which a service has the log."""

    epoch: int = 0
    """Trainer epoch of the newest step."""
    version: int = 0
    """Version of the newest step."""
    evaluations: int = 0
    """Number of records of `evals`, from the first on, that the service has."""


class PositionFile:
    """The position of a service that cannot be asked, in a file beside the run. The service makes it, calls `read` when
    it opens and `write` after each call."""

    def __init__(self, run: TrackedRun, folder: str) -> None:
        self._key, self._path = run.key, run.folder / folder / "written.json"
        self.rows = 0
        """Number of written rows."""

    def read(self) -> Written:
        """Return the position of this run; that of the beginning if there is none."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            state = json.loads(self._path.read_text())
            if state["id"] == self._key:
                self.rows = int(state["rows"])
                return Written(*map(int, state["written"]))
        return Written()

    def write(self, written: Written, rows: int) -> None:
        """Note the position after `rows` more rows."""
        self.rows += rows
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"id": self._key, "written": written, "rows": self.rows}))
        os.replace(new, self._path)


class TrackingService(Protocol):
    """The client of a tracking service. `ServedTracker` calls it in a separate thread: `open` once, then `write`, and
    `close` at the end. A call that raises is tried again, except after a ConfigError."""

    shows_samples: bool
    """Whether it takes tables of samples. Others get steps and evaluations alone."""

    def open(self) -> Written:
        """Find the run at the service, or make it there, and return the service's position. ConfigError if another try
        cannot help."""

    def write(self, news: Sequence[News], written: Written) -> None:
        """Write records, in the order of the log. `written` is the service's position afterwards. After an error, the
        same call may come again."""

    def close(self, *, ended: bool) -> None:
        """End the run at the service. `ended`: whether the run is over; otherwise it may be resumed."""


class ServedTracker:
    """A tracker with a remote service, as `Tracker` describes it. `open_trackers` makes it. Its thread talks to the
    service; `update` and `close` pass records to the thread."""

    def __init__(self, name: str, service: TrackingService, say: Callable[[str], None]) -> None:
        """Start the thread. `say` is called only by `update` and `close`, in the thread that calls these."""
        self._name, self._service, self._say = name, service, say
        self._news: queue.SimpleQueue[Sequence[News] | None] = queue.SimpleQueue()
        self._num_waiting = self._num_left_out = 0
        """Number of records that the thread has to write, and of later ones that it does not get."""
        self._max_waiting = 0
        self._count_lock = threading.Lock()
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._done = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def shows_samples(self) -> bool:
        """Whether the service takes tables of samples."""
        return self._service.shows_samples

    def update(self, news: Sequence[News]) -> None:
        """Pass records to the thread, and report errors since the last call, without waiting."""
        news = [one for one in news if self.shows_samples or not isinstance(one, SampleTable)]
        with self._count_lock:
            self._max_waiting = self._max_waiting or max(MAX_WAITING, len(news))
            closed = self._num_left_out or self._done.is_set()  # nothing is written after a gap
            taken = tuple(news[: 0 if closed else max(0, self._max_waiting - self._num_waiting)])
            self._num_waiting += len(taken)
            self._num_left_out += len(news) - len(taken)
        if taken:
            self._news.put(taken)
        self._tell()

    def close(self, *, ended: bool) -> None:
        """Wait until all is written and the service is closed, but at most CLOSE_S."""
        self._ended = ended
        self._leaving.set()
        self._news.put(None)
        self._done.wait(CLOSE_S)
        with self._count_lock:
            missing = self._num_waiting + self._num_left_out
        if missing or not self._done.is_set():
            self._troubles.put(f"{missing:,} records of the log are missing there; `rftstream resume` writes them")
        self._tell()

    def _tell(self) -> None:
        while not self._troubles.empty():
            self._say(f"{self._name}: {self._troubles.get()}")

    # ------------------------------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            opened: list[Written] = []
            if self._insist(lambda: opened.append(self._service.open())):
                self._follow(Unwritten(opened[0]))
                self._insist(lambda: self._service.close(ended=self._ended))
        finally:
            self._done.set()

    def _follow(self, unwritten: Unwritten) -> None:
        while (news := self._news.get()) is not None:
            due = unwritten.take(news)
            if due and not self._insist(lambda due=due: self._service.write(due, unwritten.written)):  # type: ignore[misc]
                return
            with self._count_lock:
                self._num_waiting -= len(news)

    def _insist(self, act: Callable[[], object]) -> bool:
        """Repeat `act` until it succeeds. Return False if it cannot succeed, or if the session ends first."""
        pause_s = PAUSE_S
        while True:
            try:
                act()
                return True
            except ConfigError as error:
                self._troubles.put(secrets.hidden(str(error)))
                return False
            except Exception as error:
                text = secrets.hidden(f"{type(error).__name__}: {error}")
                if pause_s == PAUSE_S:
                    self._troubles.put(f"{text}; tried again until it works, the log keeps what is to be written")
                if self._leaving.wait(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Unwritten:
    """Selects the records that a service does not have. The thread makes it when the service is open, and calls `take`
    with all records since the beginning of the log."""

    def __init__(self, written: Written) -> None:
        self._had = self.written = written
        self._evaluations = 0

    def take(self, news: Sequence[News]) -> list[News]:
        """Return the records to write, in the order of the log, without steps that another of these has replaced.
        Afterwards `written` counts them as written."""
        due: list[News] = []
        for one in news:
            if isinstance(one, EvalResult):
                self._evaluations += 1
                if self._evaluations > self._had.evaluations:
                    due.append(one)
            elif isinstance(one, SampleTable):
                if (one.name.trainer_epoch, one.name.version) > (self._had.epoch, self._had.version):
                    due.append(one)
            elif (one.name.trainer_epoch, one.name.version) > (self._had.epoch, self._had.version):
                due = [other for other in due if not _replaces(one, other)]
                due.append(one)
        last = next((one.name for one in reversed(due) if isinstance(one, StepRecord)), None)
        self.written = Written(
            last.trainer_epoch if last else self.written.epoch,
            last.version if last else self.written.version,
            max(self._evaluations, self._had.evaluations),
        )
        return due


def _replaces(step: StepRecord, other: News) -> bool:
    """Return whether the step's trainer went back to before the other step."""
    return isinstance(other, StepRecord) and other.name.version >= step.name.version
