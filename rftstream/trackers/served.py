"""Trackers behind a service: a thread of its own talks to it, so that nobody waits for one that is slow or away.

What a service has already is asked of it (or kept beside the run): a tracker that starts again goes on from there. One
that does not answer is asked again, after longer and longer pauses; meanwhile the log keeps what is to be written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rftstream.config import secrets
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ConfigError

PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
CLOSE_S = 60.0
"""To write the rest when the run leaves."""

News = StepRecord | EvalResult


@dataclass(frozen=True, slots=True)
class Written:
    """What a service has: everything up to here."""

    epoch: int = 0
    """Of the newest step."""
    version: int = 0
    evaluations: int = 0
    """So many of those that stand on `evals`, from the first on."""


class TrackingService(Protocol):
    def open(self) -> Written:
        """Finds the run there, or makes it. ConfigError where trying again can't help; any other error is tried
        again."""

    def write(self, news: Sequence[News], written: Written) -> None:
        """In the order of the log; what the service has afterwards. May be called again with the same after an
        error."""

    def close(self, *, ended: bool) -> None:
        """`ended`: the run is over, else it may be resumed."""


class ServedTracker:
    def __init__(self, name: str, service: TrackingService, say: Callable[[str], None]) -> None:
        """`say` is called by `update` and `close` alone, in their thread."""
        self._name, self._service, self._say = name, service, say
        self._news: queue.SimpleQueue[Sequence[News] | None] = queue.SimpleQueue()
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._done = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def update(self, news: Sequence[News]) -> None:
        if news:
            self._news.put(tuple(news))
        self._tell()

    def close(self, *, ended: bool) -> None:
        self._ended = ended
        self._leaving.set()
        self._news.put(None)
        if not self._done.wait(CLOSE_S):
            self._troubles.put(f"has not everything yet after {CLOSE_S:g} s; `rftstream resume` writes the rest")
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

    def _insist(self, act: Callable[[], object]) -> bool:
        """Until it is done; False if that is hopeless, or the run leaves meanwhile."""
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
    """Of the news since the beginning of the log, those that a service does not have."""

    def __init__(self, written: Written) -> None:
        self._had = self.written = written
        self._evaluations = 0

    def take(self, news: Sequence[News]) -> list[News]:
        """In the order of the log, without steps that another one among these has replaced."""
        due: list[News] = []
        for one in news:
            if isinstance(one, EvalResult):
                self._evaluations += 1
                if self._evaluations > self._had.evaluations:
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
    """Whether its trainer went back behind the other one."""
    return isinstance(other, StepRecord) and other.name.version >= step.name.version
