"""The last full snapshot, kept in a folder of this machine, so that a restart does not fetch it again."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rftstream.contracts.versions import WeightsAnnounced

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIX = ".safetensors"
LEFT_BEHIND_S = 3600.0
"""Age in seconds from which a temporary file counts as left behind by a process that was killed."""

logger = logging.getLogger(__name__)


class AnchorCache:
    """A folder that holds the newest full snapshot; a newer one takes its place.

    A follower calls `open` before it reads an anchor from the store, and `keep` after it has read one. Several
    processes may share a folder. Nothing in it is trusted: the reader compares digests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, anchor: WeightsAnnounced) -> IO[bytes] | None:
        """Return the anchor's file, opened for reading, or None if it is not there."""
        try:
            return self._path(anchor).open("rb")
        except OSError:
            return None

    def keep(self, anchor: WeightsAnnounced, data: Buffer) -> None:
        """Keep the anchor's bytes and delete the one before. An error of the file system is logged, not raised."""
        path = self._path(anchor)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for other in self._folder.iterdir():  # first, so that there is never room for two needed
                if other != path and (other.suffix == SUFFIX or _is_left_behind(other)):
                    other.unlink(missing_ok=True)
            if path.exists():
                return
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
            logger.warning("weights: %s: %s; the snapshot is fetched again when it is needed", self._folder, error)

    def _path(self, anchor: WeightsAnnounced) -> Path:
        return self._folder / f"{anchor.digest.removeprefix('sha256:')}{SUFFIX}"


def _is_left_behind(path: Path) -> bool:
    """Return whether a killed process was writing this file."""
    try:
        return time.time() - path.stat().st_mtime > LEFT_BEHIND_S
    except FileNotFoundError:
        return False
