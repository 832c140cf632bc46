"""The address of a studio that shows a run, noted in the run's folder while the studio is open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rftstream.process_state import is_alive
from rftstream.runs.folder import RunFolder

FILE_NAME = "studio.url"


@contextmanager
def noted_address(folders: Sequence[RunFolder], url: str) -> Iterator[None]:
    """Note the address in each folder for the time of the block. Folders that cannot be written are left out."""
    text = f"{url} {os.getpid()} {socket.gethostname()}\n"
    for folder in folders:
        with suppress(OSError):
            folder.index.mkdir(exist_ok=True)
            (folder.index / FILE_NAME).write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        for folder in folders:
            file = folder.index / FILE_NAME
            if _read(file) == text:  # not the note of a studio that was opened later
                with suppress(OSError):
                    file.unlink()


def find_address(folder: RunFolder) -> str | None:
    """Return the address of an open studio on this machine that shows the run, or None."""
    words = _read(folder.index / FILE_NAME).split()
    if len(words) != 3 or words[2] != socket.gethostname() or not words[1].isdecimal():
        return None
    return words[0] if is_alive(int(words[1])) else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
