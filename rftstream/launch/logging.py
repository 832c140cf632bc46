"""Logs of a process: one line an event, with time, level, process, message and fields.

    2026-01-31 12:00:00.123 INFO    trainer-0 trained version=3 loss=0.12

Anything in `extra={"version": 3}` is a field. With `[log] format = "json"` each line is a JSON object. Values of fields
whose names mark a secret, and users and passwords inside URLs, are never written.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from rftstream.config import secrets
from rftstream.error_kinds import MAX_KINDS, kind_of, rough_kind_of
from rftstream.launch.log_files import event_of, whole_end

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}
_TAIL_BYTES = 65_536
_ERRORS = ("error", "critical")
_TROUBLES = ("warning", *_ERRORS)
_REPEAT_AFTER_S = 60.0
_FEW = 3
"""Most lines in that time that differ only in numbers and quoted parts."""
_ECHOED = ("kafka",)
"""Packages whose warnings are logged as info, since our own message reports the same problem and its consequences."""
_OWN = ("rftstream", "workers")


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text. `setup` makes it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record))
        line = f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {self._process} {record.getMessage()}{fields}"
        line = line + "\n" + self.formatException(record.exc_info) if record.exc_info else line
        return secrets.without_logins(line)


class JsonFormatter(TextFormatter):
    """Formats a record as one JSON object. `setup` makes it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as one line of JSON."""
        values: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **dict(_fields(record)),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return secrets.without_logins(json.dumps(values, default=str))


def setup(
    process: str,
    *,
    level: str,
    form: Literal["text", "json"],
    file: Path | None = None,
    stream: TextIO | None = None,
    echoes: bool = True,
) -> None:
    """Send the logs of this process to a file and to a stream (stderr). `echoes`: also what a Kafka client says of its
    connections, which our own messages say, too. A second call replaces the settings of the first."""
    formatter = JsonFormatter(process) if form == "json" else TextFormatter(process)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream if stream is not None else sys.stderr)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    thinned = Thinned(echoes=echoes)
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(thinned)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)  # this level holds for other people's packages
    for package in _OWN:
        logging.getLogger(package).setLevel(level.upper())
    logging.captureWarnings(True)


class Thinned(logging.Filter):
    """Filters the logs of other people's packages. A repeated message (a client whose broker is away) passes once in
    ten seconds."""

    def __init__(
        self, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic, echoes: bool = True
    ) -> None:
        """`echoes`: whether messages pass that only repeat our own."""
        super().__init__()
        self._echoes = echoes
        self._every_s = every_s
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is kept. Records of our own are always kept."""
        if record.name.partition(".")[0] in _OWN:
            return True
        # Each handler asks about the same record.
        fields = vars(record)
        if "_is_kept" not in fields:
            is_echo = record.name.partition(".")[0] in _ECHOED
            if is_echo and record.levelno > logging.INFO:
                record.levelno, record.levelname = logging.INFO, "INFO"
            fields["_is_kept"] = (self._echoes or not is_echo) and self._keep(record)
        return bool(fields["_is_kept"])

    def _keep(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        kind, now = (record.name, kind_of(text)), self._clock()
        said_at, num_held = self._said.get(kind, (-math.inf, 0))
        if now - said_at < self._every_s:
            self._said[kind] = (said_at, num_held + 1)
            return False
        if len(self._said) >= MAX_KINDS:
            self._said.clear()
        self._said[kind] = (now, 0)
        if num_held:
            record.msg, record.args = f"{text} (and {num_held} more since the last such line)", None
        return True


def last_error(file: Path, *, since: int = 0) -> str | None:
    """Return the newest error of a log file from byte `since` on. If there is none, return the last line, which may
    come from a crash."""
    last = None
    for line in reversed(_tail(file, since)):
        if (text := _said(line, _ERRORS)) is not None:
            return text
        last = last or line.strip() or None
    return last


class Troubles:
    """New warnings and errors in a log file that another process writes. The same message is returned once a minute,
    and of messages that differ only in quoted parts a few, with the number of the others."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._offset = self._size()
        self._said_at: dict[str, float] = {}
        self._alike: dict[str, tuple[float, int, str]] = {}
        """Rough kind -> time of its first message in this minute, number of its messages, and the newest."""

    def new(self) -> list[str]:
        """Return the new warnings and errors since the last call."""
        size, since = self._size(), self._offset
        found = list(self._held_back())
        if size <= since:
            return found
        self._offset = size
        for line in _tail(self._file, since):
            text = _said(line, _TROUBLES)
            if text is None:
                continue
            if self._clock() - self._said_at.get(kind_of(text), -_REPEAT_AFTER_S) >= _REPEAT_AFTER_S:
                self.said(text)
                kind = rough_kind_of(text)
                began, count, _ = self._alike.get(kind, (self._clock(), 0, ""))
                self._alike[kind] = (began, count + 1, text)
                if count < _FEW:
                    found.append(text)
        return found

    def _held_back(self) -> Iterator[str]:
        """Yield a line for each rough kind whose minute is over, if it had more messages than were returned."""
        now = self._clock()
        for kind, (began, count, newest) in list(self._alike.items()):
            if now - began >= _REPEAT_AFTER_S:
                del self._alike[kind]
                if (more := count - _FEW) > 0:
                    yield f"{newest} (and {more - 1:,} more like it)" if more > 1 else newest

    def said(self, text: str) -> None:
        """Record that a message was already shown."""
        self._said_at[kind_of(text)] = self._clock()

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except OSError:
            return 0


def _said(line: str, levels: tuple[str, ...]) -> str | None:
    """Return the message of a line if the line has one of these levels."""
    event = event_of(whole_end(line))
    return event.message if event is not None and event.level.lower() in levels else None


def _tail(file: Path, since: int) -> list[str]:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(since, size - _TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for name, value in vars(record).items():
        if name not in _STANDARD and not name.startswith("_"):
            yield name, "***" if secrets.is_secret(name) else value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if not text or re.search(r"[\s\"=]", text) else text
