"""The index of a run, which keeps what audits have read of its log, under its lock (facts/database.py)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest
from rftstream.queries.facts.database import Index
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control

LOCK_WAIT_S = 60.0


@contextlib.contextmanager
def opened_index(run: OpenRun, *, looking: bool = False) -> Iterator[Index | None]:
    """Open the index of a run under its lock; give None if there can be none.

    With `looking` the index is only read. Where it cannot be used, an empty one is given that keeps nothing."""
    manifest = read_control(run.transport).manifest
    folder = folder_of(run)
    if manifest is None or (looking and not folder.is_dir()):  # without a manifest there is nothing to be counted
        yield None
        return
    with contextlib.ExitStack() as stack:
        note = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, shared=looking, wait_s=0.0 if looking else LOCK_WAIT_S):
                note = f"{folder}: held by another audit; the whole log is read"
        except OSError as error:
            note = f"{folder}: cannot be used ({error.strerror or error}); the whole log is read"
        index = Index(None if note else folder, identity_of(manifest), looking=looking)
        stack.callback(index.close)
        index.notes += [note] if note else []
        yield index


def folder_of(run: OpenRun) -> Path:
    """Return the folder of a run's index: in the run folder, or in the user's cache if there is no run folder here."""
    if run.folder.exists():
        return run.folder.index
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = hashlib.sha256(repr(run.config.transport.servers).encode()).hexdigest()[:12]
    return cache / "rftstream" / "index" / f"{run.run_id}-{where}"


def identity_of(manifest: RunManifest) -> str:
    """Return a text that two runs of the same name do not share."""
    return hashlib.sha256(codec.encode(manifest)).hexdigest()


def _lock(descriptor: int, *, shared: bool, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
