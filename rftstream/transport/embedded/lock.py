"""The write lock of an embedded log: one writer at a time over all processes, and the holder is visible to all.

SQLite has its own lock. This lock is taken around it for three reasons:

- its holder is known: the kernel tells the process, and the lock ends with that process;
- commits and checkpoints never overlap, which avoids SQLite's WAL-reset race (all versions before 3.51.3);
- the wait is under our control: short steps, and an error that names the holder.

A POSIX lock belongs to the process, not to the opener of the file. So each process has one open file for a path, and a
mutex for its threads. Unlike flock, a forked child does not inherit the lock, which could then outlive its owner."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rftstream.process_state import process_state

_FLOCK = "hhqqi4x"
"""struct flock of Linux, 64 bit: type, whence, start, length, pid."""
_NOTE_BYTES = 48
_FIRST_STEP_S = 0.0002
_LONGEST_STEP_S = 0.005


class LockHolder(NamedTuple):
    """The process that holds the write lock."""

    pid: int
    """Its process id."""
    since_s: float
    """When the process took the lock, as time.time()."""


@dataclass(slots=True)
class _LockFile:
    fd: int
    mutex: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0


_FILES: dict[str, _LockFile] = {}
_FILES_MUTEX = threading.Lock()


def _forget_after_fork() -> None:
    """Let a forked child open its own files. A mutex may have been copied while a thread held it that does not exist in
    the child."""
    global _FILES_MUTEX
    _FILES_MUTEX = threading.Lock()
    _FILES.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class WriteLock:
    """The write lock of one log, for one user in this process.

    Store makes it, calls `acquire` and `release` around each transaction, and `close` last. All locks of a path in a
    process share one open file."""

    def __init__(self, path: Path) -> None:
        self._path = os.path.realpath(path)
        with _FILES_MUTEX:
            file = _FILES.get(self._path)
            if file is None:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if os.fstat(fd).st_size < _NOTE_BYTES:
                    # The file gets its full length now, so that a note never needs space on a full disk.
                    os.pwrite(fd, b" " * _NOTE_BYTES, 0)
                file = _FILES[self._path] = _LockFile(fd)
            file.num_users += 1
        self._file = file

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock. Return False if it is not free in time."""
        deadline = time.monotonic() + timeout_s
        if not self._file.mutex.acquire(timeout=timeout_s):
            return False
        taken = False
        try:
            taken = self._lock_until(deadline)
        finally:
            if not taken:
                self._file.mutex.release()
        if taken:
            self._note(b"%d %.3f" % (os.getpid(), time.time()))
        return taken

    def release(self) -> None:
        """Release the lock."""
        self._note(b"")
        fcntl.lockf(self._file.fd, fcntl.LOCK_UN)
        self._file.mutex.release()

    def holder(self) -> LockHolder | None:
        """Return the current holder of the lock, or None. A note left by a dead process is ignored."""
        try:
            pid, since_s = os.pread(self._file.fd, _NOTE_BYTES, 0).split()
            noted = LockHolder(int(pid), float(since_s))
        except ValueError:
            noted = None
        # The kernel does not show a process its own lock. And a taken mutex may belong to a thread that still waits.
        if self._file.mutex.locked() and noted is not None and noted.pid == os.getpid():
            return noted
        locked_by = self._locked_by()
        if locked_by is None:
            return noted if sys.platform != "linux" else None
        if noted is not None and noted.pid == locked_by:
            return noted
        return LockHolder(locked_by, time.time())

    def close(self) -> None:
        """Close the file if no other lock of this process uses it."""
        with _FILES_MUTEX:
            self._file.num_users -= 1
            if self._file.num_users == 0 and _FILES.get(self._path) is self._file:
                del _FILES[self._path]
                os.close(self._file.fd)

    def _lock_until(self, deadline: float) -> bool:
        step_s = _FIRST_STEP_S
        while True:
            try:
                fcntl.lockf(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except (BlockingIOError, PermissionError):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(step_s, left_s))
                step_s = min(step_s * 2, _LONGEST_STEP_S)

    def _note(self, text: bytes) -> None:
        with suppress(OSError):  # The note is for messages only; the lock works without it.
            os.pwrite(self._file.fd, text.ljust(_NOTE_BYTES), 0)

    def _locked_by(self) -> int | None:
        if sys.platform != "linux":
            return None
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._file.fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)


def describe_holder(holder: LockHolder | None) -> str:
    """Return a sentence about the holder, for the error of a process that waited too long."""
    if holder is None:
        return "no process is seen to hold it now; try again"
    held_s = max(0.0, time.time() - holder.since_s)
    if process_state(holder.pid) in ("T", "t"):
        return (
            f"process {holder.pid} has held it for {held_s:.1f} s and is stopped (SIGSTOP or Ctrl-Z);"
            f" let it go on with `kill -CONT {holder.pid}` or end it with `kill -KILL {holder.pid}`:"
            f" what it had begun is rolled back"
        )
    return (
        f"process {holder.pid} has held it for {held_s:.1f} s and is running; wait, or end it if it hangs:"
        f" what it had begun is rolled back"
    )
