"""A cache of weight objects in a folder of this machine, so that its processes fetch each object only once from a
remote store.

It keeps the full snapshot that was fetched last, for restarts, and some deltas, for the other processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from rftstream.weights.version_parts import HasObject

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIX, DELTA_SUFFIX = ".safetensors", ".delta"
MOST_DELTAS = 64
"""Largest number of deltas that are kept."""
LEFT_BEHIND_S = 3600.0
"""Age in seconds from which a temporary file counts as left by a killed process."""
LOCK = ".lock"
WAIT_S, PAUSE_S = 30.0, 0.02
"""Longest wait for another process that fetches the same object, and pause between two checks, in seconds."""

logger = logging.getLogger(__name__)


class AnchorCache:
    """A folder that holds the full snapshot that was fetched last, and the last MOST_DELTAS deltas.

    A follower calls `open` before it reads an object from the store. If the object is not cached, it waits for its
    `turn`, calls `open` again, and calls `keep` after reading from the store. Several processes may share a folder. The
    cache is not trusted: the reader verifies digests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, announced: HasObject) -> IO[bytes] | None:
        """Return the object's file, opened for reading, or None if it is not there."""
        try:
            return self._path(announced).open("rb")
        except OSError:
            return None

    @contextlib.contextmanager
    def turn(self, announced: HasObject) -> Iterator[None]:
        """Wait until no other process of this machine fetches an object of the same kind, so that each object is
        fetched once. A fetch of a snapshot does not delay one of a delta.

        After WAIT_S, or if files cannot be locked, the call does not wait, and an object may be fetched twice."""
        lock = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / f"{''.join(PurePosixPath(announced.object).suffixes)}{LOCK}").open("wb")
            deadline = time.monotonic() + WAIT_S
            while not _locked(lock) and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
        except OSError as error:
            logger.debug("weights: %s: no lock: %s", self._folder, error)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()  # closing unlocks it, as does a kill of this process

    def keep(self, announced: HasObject, data: Buffer, *, beside: Sequence[HasObject] = ()) -> None:
        """Keep the object's bytes and delete the ones that they replace, but not those of the objects `beside` it.
        Errors of the file system are logged, not raised."""
        path = self._path(announced)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Before the write, so that there need not be room for two.
            self._make_room(path, {path, *map(self._path, beside)})
            handle, name = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("weights: %s: %s; the object is fetched again when it is needed", self._folder, error)

    def _make_room(self, path: Path, kept: Collection[Path]) -> None:
        others = [other for other in self._folder.iterdir() if other not in kept and other.suffix != LOCK]
        deltas = sorted((other for other in others if other.suffix == DELTA_SUFFIX), key=_written_at)
        if path.suffix == SUFFIX:
            gone = [other for other in others if other.suffix == SUFFIX]
        else:
            gone = deltas[: max(len(deltas) - MOST_DELTAS + 1, 0)]
        objects = (SUFFIX, DELTA_SUFFIX)
        gone += [other for other in others if other.suffix not in objects and _written_at(other) < _long_ago()]
        for other in gone:
            other.unlink(missing_ok=True)

    def _path(self, announced: HasObject) -> Path:
        suffix = PurePosixPath(announced.object).suffix
        return self._folder / f"{announced.digest.removeprefix('sha256:')}{suffix}"


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _long_ago() -> float:
    return time.time() - LEFT_BEHIND_S


def _written_at(path: Path) -> float:
    """Return when a file was written, in seconds; the current time for a file that has just been removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
