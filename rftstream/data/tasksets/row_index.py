"""Where the rows of a large file begin, kept beside a run: the file is gone through once, and not at each start.

    with kept_in(folder):
        sources, context = open_sources(config, spec)

In this block a large file of JSON lines is opened without a look at all of its rows: they are looked at while the run
goes on (`JsonlTaskset.check_some`), and that this was done is kept, too. What is kept can be deleted at any time. It is
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
"""Files with fewer rows are looked at as a whole when they are opened, and nothing is kept of them."""

_folder: ContextVar[Path | None] = ContextVar("folder of row indexes", default=None)


@dataclass(slots=True, kw_only=True)
class RowIndex:
    """The rows of a file. JsonLines makes it, or takes one that was kept."""

    offsets: array[int]
    """Where each row begins."""
    lines: array[int]
    """Its line, from 1 on."""
    digest: str
    """SHA-256 of the file, as hex digits."""
    num_checked: int = 0
    """Rows from the first one on that were looked at."""


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Keep the indexes of large files that are opened in this block in a run's folder of indexes, and take those that
    are there."""
    token = _folder.set(folder / "rows")
    try:
        yield
    finally:
        _folder.reset(token)


class KeptIndex:
    """The place where the index of one file is kept. `kept_index` makes it; JsonLines calls `load`, and `save` when
    all rows were looked at."""

    def __init__(self, file: Path, settings: Any, folder: Path) -> None:
        text = json.dumps([__version__, str(file.absolute()), settings], sort_keys=True)
        self._identity = json.loads(text)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._path = folder / f"{name}.rows"

    def load(self, file: BinaryIO) -> RowIndex | None:
        """Return what was kept of the open file; None if there is nothing that can be used."""
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
        """Keep the index of the open file. Where that fails, the next start goes through the file again."""
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
    """Return where the index of a file is kept whose rows are read by these settings; None outside of `kept_in`."""
    folder = _folder.get()
    return None if folder is None else KeptIndex(file, settings, folder)


def _state(file: BinaryIO) -> list[int]:
    """Return what changes when somebody writes to the file, or puts another one in its place."""
    status = os.fstat(file.fileno())
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
