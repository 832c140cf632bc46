"""Notes and tags that people put on rollouts, groups and versions of a run: `notes.jsonl` in the run folder.

They change nothing in the run, and no role reads them, so they are not on its log. Each line adds a note or takes one
back, and no line is ever changed: several studios may write at once, and a line that was cut off is passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rftstream.errors import ConfigError
from rftstream.runs.folder import RunFolder, naming

MAX_TEXT, MAX_TAGS, MAX_BYTES = 4_000, 10, 20_000_000
"""Most characters of a note, most tags of one, and the largest size of the file."""
_TAG = re.compile(r"[\w.-]{1,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note on a part of a run."""

    note_id: str
    target: str
    """The rollout, group or version (`v12`) that it is about."""
    text: str
    """The words of the note; may be empty if there are tags."""
    tags: tuple[str, ...]
    by: str
    """Name of the writer."""
    at: float
    """Time of the note in seconds since 1970."""


class RunNotes:
    """The notes of a run. Any thread may use it; the file is read again when it has changed."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._known: tuple[tuple[int, int], tuple[Note, ...]] = ((0, 0), ())

    @property
    def _file(self) -> Path:
        return self._folder.notes_file

    @property
    def revision(self) -> tuple[int, int]:
        """Return a value that changes with the notes."""
        try:
            status = self._file.stat()
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size

    def notes(self, *, target: str = "", tag: str = "") -> list[Note]:
        """Return the notes, newest first: all, or those on a target or with a tag."""
        with self._lock:
            revision = self.revision
            if revision != self._known[0]:
                self._known = (revision, _read(self._file))
            found = self._known[1]
        return [note for note in found if target in ("", note.target) and (not tag or tag in note.tags)]

    def add(self, target: str, text: str, tags: Sequence[str], *, by: str) -> Note:
        """Write a note. ConfigError if it says nothing, or too much."""
        text = text.strip()
        chosen = tuple(dict.fromkeys(tag.lower() for tag in tags))
        if not text and not chosen:
            raise ConfigError("note: got no text and no tag, expected one of them")
        if len(text) > MAX_TEXT:
            raise ConfigError(f"note: got {len(text):,} characters, expected at most {MAX_TEXT:,}")
        wrong = [tag for tag in chosen if not _TAG.fullmatch(tag)]
        if wrong or len(chosen) > MAX_TAGS:
            got = repr(wrong[0][:50]) if wrong else f"{len(chosen)} tags"
            raise ConfigError(f"tags: got {got}, expected at most {MAX_TAGS} of up to 40 letters, digits and _ . -")
        note = Note(
            note_id=secrets.token_hex(8), target=target, text=text, tags=chosen, by=by, at=round(time.time(), 3)
        )
        self._append({**asdict(note)})
        return note

    def remove(self, note_id: str, *, by: str, any_writer: bool) -> Note:
        """Take a note back. ConfigError if there is none, or it is somebody else's and not `any_writer`."""
        found = next((note for note in self.notes() if note.note_id == note_id), None)
        if found is None:
            raise ConfigError(f"note: got {note_id[:40]!r}, expected the id of a note of this run")
        if found.by != by and not any_writer:
            raise ConfigError(f"note: it was written by {found.by}; expected its writer, or an operator")
        self._append({"removed": note_id, "by": by, "at": round(time.time(), 3)})
        return found

    def _append(self, line: dict[str, object]) -> None:
        if not self._folder.exists():
            raise ConfigError(
                f"{self._folder.path}: no run folder on this host, and notes are kept in it; open the studio where the "
                "run was started"
            )
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        with naming(self._file):
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                if size + len(data) > MAX_BYTES:
                    raise ConfigError(f"{self._file}: has {size:,} bytes, expected room for notes below {MAX_BYTES:,}")
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a write that was cut off
                    data = b"\n" + data
                os.write(descriptor, data)
            finally:
                os.close(descriptor)


def _read(file: Path) -> tuple[Note, ...]:
    found: dict[str, Note] = {}
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
    for line in lines:
        try:
            values = json.loads(line)
            if "removed" in values:
                found.pop(values["removed"], None)
            else:
                found[values["note_id"]] = Note(**{**values, "tags": tuple(values["tags"])})
        except (ValueError, TypeError, LookupError):
            continue
    return tuple(reversed(found.values()))
