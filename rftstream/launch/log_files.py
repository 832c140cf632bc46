"""Reads the log files of a run's processes in logs/: the events of all files, in the order of their times."""

from __future__ import annotations

import heapq
import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rftstream.config import loader
from rftstream.runs.folder import named_files

_TEXT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(\S+) (.*)")
"""The beginning of an event in the form `text` of launch/logging.py. Other lines belong to the event before them."""
_BEGIN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?:WARNING|ERROR|CRITICAL) ")
_BLOCK_BYTES = 1 << 16
TROUBLES = ("WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event that a process logged. `LogFile` makes it."""

    moment: str
    """Local time, as in the file. Events are sorted by it."""
    level: str
    text: str
    """All lines of the event, as in the file, without the last line's end."""
    message: str
    """First line of the logged text, without time, level and process."""
    process: str = ""


class LogFile:
    """A log file that is read from some position on. `read` returns the events since the last call."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """Start before the newest `last` events, or at the beginning of the file."""
        self._path = path
        self._offset = 0 if last is None else _beginning_of_last(path, last)
        self._newest = LogEvent("", "INFO", "", "")

    def read(self) -> list[LogEvent]:
        """Return the new events. An incomplete line comes with the next call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events: list[LogEvent] = []
        for line in whole.decode("utf-8", errors="replace").splitlines():
            found = event_of(line)
            if found is None:  # a traceback, or the output of a library
                before = events.pop() if events else replace(self._newest, text="")
                found = replace(before, text=f"{before.text}\n{line}".removeprefix("\n"))
            events.append(found)
            self._newest = found
        return events


def find_logs(run: Path, layers: Sequence[Path] = ()) -> Path | None:
    """Return the folder with the logs of the newest run that has some on this host; None without one. No server is
    asked, and logs may be all that a host has of a run of others."""
    if run.is_dir():
        return run / "logs" if (run / "logs").is_dir() and not layers else None
    files = named_files(run, layers)
    if not files[0].is_file():
        return None
    config = loader.load(files)
    name = re.compile(re.escape(config.run.name) + r"(?:-(\d+))?")
    base = Path(config.base) / config.run.folder
    found = [(int(match[1] or 1), one) for one in base.glob("*/logs") if (match := name.fullmatch(one.parent.name))]
    return max(found)[1] if found else None


def whole_end(line: str) -> str:
    """Return the newest event of a line in which an earlier one broke off, as on a full disk."""
    return line[max((match.start() for match in _BEGIN.finditer(line)), default=0) :]


def event_of(line: str) -> LogEvent | None:
    """Return the event that begins with this line, in either form of launch/logging.py; None if none begins with it."""
    if match := _TEXT.match(line):
        return LogEvent(match[1], match[2], line, match[4], match[3])
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        moment = float(found.get("time", 0.0))
        shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        moment_text, process = f"{shown}.{int(moment % 1 * 1000):03d}", str(found.get("process", ""))
        return LogEvent(moment_text, found["level"].upper(), line, str(found["message"]), process)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _beginning_of_last(path: Path, last: int) -> int:
    """Return the offset of the newest `last` events. Only the end of the file is read."""
    offset = path.stat().st_size
    starts: list[int] = []
    tail = b""
    with path.open("rb") as file:
        while offset > 0 and len(starts) < last:
            step = min(_BLOCK_BYTES, offset)
            offset -= step
            file.seek(offset)
            tail = file.read(step) + tail
            starts = _starts(tail, offset)
    return starts[-last] if len(starts) >= last else 0


def _starts(tail: bytes, offset: int) -> list[int]:
    """Return the offsets of the events in `tail`, the end of a file from `offset` on."""
    found, place = [], offset
    for number, line in enumerate(tail.splitlines(keepends=True)):
        is_whole = number > 0 or offset == 0
        if is_whole and event_of(line.decode("utf-8", errors="replace").rstrip("\n")) is not None:
            found.append(place)
        place += len(line)
    return found


def in_order(files: Sequence[LogFile]) -> Iterator[LogEvent]:
    """Yield the new events of all files, the oldest first."""
    yield from heapq.merge(*(file.read() for file in files), key=lambda event: event.moment)


def told_once(events: Iterable[LogEvent], troubles: deque[str]) -> Iterator[LogEvent]:
    """Yield the events without the warnings and errors of workers that the command `run` has told once more.
    `troubles`: the newest of the events before, and then also of these."""
    for event in events:
        if event.process == "run" and event.message in troubles:
            continue
        if event.level in TROUBLES:
            troubles.append(f"{event.process}: {event.message}")
        yield event
