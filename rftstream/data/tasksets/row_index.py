"""The offsets of a large file's rows, kept beside a run, so that the file is scanned once, not at each start.

    with kept_in(folder):
        sources, context = open_sources(config, spec)

In this block a large file of JSON lines is opened without checking all of its rows: they are checked during the run
(`JsonlTaskset.check_some`), and the progress is kept as well. The kept files can be deleted at any time. An index is
made anew if it is damaged, or if the file, its path, the settings or the release have changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rftstream.version import __version__

log = logging.getLogger(__name__)

LARGE_ROWS = 20_000
"""Smallest number of rows of a large file. Smaller files are checked completely when they are opened, and no index is
kept."""

_folder: ContextVar[Path | None] = ContextVar("folder of row indexes", default=None)


@dataclass(slots=True, kw_only=True)
class RowIndex:
    """The rows of a file. JsonLines makes it, or loads a kept one."""

    offsets: array[int]
    """Offset of each row."""
    lines: array[int]
    """Line number of each row, from 1."""
    digest: str
    """SHA-256 of the file, as hex digits."""
    num_checked: int = 0
    """Number of rows, from the first one on, that were checked."""


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Keep the indexes of large files that are opened in this block in a run's folder, and load existing ones."""
    token = _folder.set(folder / "rows")
    try:
        yield
    finally:
        _folder.reset(token)


class KeptIndex:
    """The place of one file's kept index. `kept_index` makes it; JsonLines calls `load`, and `save` after all rows were
    checked."""

    def __init__(self, file: Path, settings: Any, folder: Path) -> None:
        text = json.dumps([__version__, str(file.absolute()), settings], sort_keys=True)
        self._identity = json.loads(text)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._path = folder / f"{name}.rows"

    def load(self, file: BinaryIO) -> RowIndex | None:
        """Return the kept index of the open file; None if there is no usable one."""
        try:
            with self._path.open("rb") as kept:
                head = json.loads(kept.readline())
                data = kept.read()
            if head["identity"] != self._identity or head["state"] != _state(file) or head["crc"] != zlib.crc32(data):
                return None
            offsets, lines = array("q"), array("q")
            offsets.frombytes(data[: len(data) // 2])
            lines.frombytes(data[len(data) // 2 :])
            return RowIndex(offsets=offsets, lines=lines, digest=head["digest"], num_checked=head["checked"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.warning("%s: cannot be used (%s); made anew", self._path, error)
            return None

    def save(self, file: BinaryIO, index: RowIndex) -> None:
        """Keep the index of the open file. If that fails, the next start scans the file again."""
        data = index.offsets.tobytes() + index.lines.tobytes()
        head = {
            "identity": self._identity,
            "state": _state(file),
            "crc": zlib.crc32(data),
            "digest": index.digest,
            "checked": index.num_checked,
        }
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(json.dumps(head).encode() + b"\n" + data)
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s: cannot be written (%s); the next start reads the file again", self._path, error)


def kept_index(file: Path, settings: Any) -> KeptIndex | None:
    """Return the place of the index of a file whose rows are read with these settings; None outside `kept_in`."""
    folder = _folder.get()
    return None if folder is None else KeptIndex(file, settings, folder)


def _state(file: BinaryIO) -> list[int]:
    """Return values that change when the file is written to or replaced."""
    status = os.fstat(file.fileno())
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
