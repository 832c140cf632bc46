"""Records how each session of a run ended, in two lines of `logs/run.log`: one at its beginning, one at its end.

    2026-01-31 12:00:00.123 INFO    run begins pid=4711
    2026-01-31 12:30:00.456 ERROR   run ended by=error exit_code=2 error="trainer-0: ..."

A session without the second line was killed. A full disk looks the same, since the second line cannot be written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from rftstream.config import secrets
from rftstream.errors import exit_code_of
from rftstream.runs.folder import RunFolder

RUN_LOG = "run.log"
"""File in `logs/` with the supervisor's messages, in the form of `TextFormatter`."""

_LINE = re.compile(
    r"(\S+ \S+)\.\d+ (?:INFO|ERROR) +run (?:begins pid=\d+|ended by=(\S+)(?: exit_code=(\d+))?(?: error=(.*))?)$"
)
_CHANGED = re.compile(r"(\S+ \S+)\.\d+ WARNING +run changed: (.*)$")
_RESTARTED = re.compile(r"(\S+ \S+)\.\d+ WARNING +run (\S+) ended \((.*?)\)(.*); starting again in [\d.]+ s$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a session of a run ended. `read_ending` makes it from the run's log file."""

    by: str
    """SIGINT (ctrl-C), SIGTERM, SIGHUP, error, kill (the session wrote no end), or the reason that `run` gave."""
    at: float | None = None
    """Time of the ending in seconds; None for a kill."""
    error: str | None = None
    """The error, in one line; None if there was none."""
    exit_code: int | None = None
    """The exit code of the error."""

    def to_json(self) -> dict[str, Any]:
        """Return the ending as a dict for JSON."""
        return asdict(self)

    def sentence(self, width: int, moment: str = "") -> str:
        """Return what stopped the run, and when. An error is cut to `width` characters."""
        by = {"SIGINT": "ctrl-C", "error": "an error", "kill": "a kill"}.get(self.by, self.by)
        error = "" if self.error is None else ": " + shorten(self.error, width, placeholder=" ...")
        return by + moment + error


@contextmanager
def noting_failure(notes: logging.Logger) -> Iterator[None]:
    """Note the beginning of a session. If it raises an error, note that as its end."""
    notes.info("begins", extra={"pid": os.getpid()})
    try:
        yield
    except KeyboardInterrupt:
        note_ending(notes, "SIGINT")
        raise
    except BaseException as error:
        note_ending(notes, "error", str(error) or type(error).__name__, exit_code_of(error))
        raise


def note_ending(notes: logging.Logger, by: str, error: str | None = None, exit_code: int = 0) -> None:
    """Record how a session ended. Of an error its exit code and its last line are recorded, without secrets."""
    if error is None:
        notes.info("ended", extra={"by": by})
    else:
        said = {"by": by, "exit_code": exit_code}
        notes.error("ended", extra={**said, "error": secrets.hidden(error.strip().rpartition("\n")[2])})


def read_ending(folder: RunFolder) -> Ending | None:
    """Return how the newest session ended, for a run that is not live; None if there was no session here."""
    found: Ending | None = None
    try:
        with (folder.logs / RUN_LOG).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (match := _LINE.match(line)) is not None:
                    found = _ending(*match.groups())
    except OSError:
        return None
    return found


def read_changes(folder: RunFolder) -> list[str]:
    """Return the newest settings that `resume` changed here, each with the time, the newest last."""
    try:
        with (folder.logs / RUN_LOG).open(encoding="utf-8", errors="replace") as lines:
            found = [
                f"{match[1]}: {secrets.hidden(match[2])}"
                for line in lines
                if (match := _CHANGED.match(line)) is not None
            ]
    except OSError:
        return []
    return found[-6:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often a process of a run died and was started again here. `read_restarts` makes it."""

    process: str
    count: int
    last_at: str
    """When it died last, as the log has it."""
    last: str
    """How it died then."""

    def to_text(self) -> str:
        """Return it in words."""
        times = "once" if self.count == 1 else f"{self.count:,} times, last"
        return f"{self.process} {times} at {self.last_at}: {shorten(self.last, 200, placeholder=' ...')}"


def read_restarts(folder: RunFolder) -> tuple[Restarts, ...]:
    """Return which processes died and were started again here, over all sessions, those that died last at the end."""
    found: dict[str, Restarts] = {}
    try:
        with (folder.logs / RUN_LOG).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (match := _RESTARTED.match(line)) is not None:
                    at, process, how, error = match.groups()
                    before = found.pop(process, None)
                    count, last = 1 + (before.count if before else 0), secrets.hidden(how + error)
                    found[process] = Restarts(process=process, count=count, last_at=at, last=last)
    except OSError:
        return ()
    return tuple(found.values())


def _ending(moment: str, by: str | None, exit_code: str | None, error: str | None) -> Ending:
    if by is None:
        return Ending(by="kill")
    at = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
    code = None if exit_code is None else int(exit_code)
    return Ending(by=by, at=at, error=None if error is None else secrets.hidden(_plain(error)), exit_code=code)


def _plain(value: str) -> str:
    """Return the text of a logged value. Text with spaces is logged as JSON."""
    try:
        return str(json.loads(value)) if value.startswith('"') else value
    except ValueError:
        return value
