"""Memory that holds a model's weights once for all processes of this machine that read them.

The bytes are those of a snapshot, a safetensors file. Their owner changes them in place, and processes of the same user
map them. The memory is anonymous (memfd), so a small /dev/shm, as containers have it, does not limit it, and nothing is
left behind by a process that was killed. Where there is no such memory it is a file in /dev/shm or a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from rftstream.weights.snapshot import RawTensor

MEMORY = Path("/dev/shm")
"""A file system in memory; other machines have none, and get a temporary folder."""

_SEAL_FUTURE_WRITE = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which Python knows from 3.13 on: who maps the file from now on can only read it."""


class WeightsMemory:
    """Shared memory with a snapshot's bytes, which other processes of this user can map, and the rules for its use.

    A follower makes it, or the owner of weights that no follower holds. The owner changes the bytes in one thread, a
    reader has other processes read them in another:

        with memory.changing():
            view = memory.allocate(num_bytes)
            view[:] = snapshot
        shared = SharedTensors(decode_snapshot(view), memory, marks=digests)

        with shared.reading() as is_current:
            if is_current:
                tell_the_processes(memory.path)

    A change waits until nobody reads. A reader that has not begun when a change begins is told that the bytes are gone,
    and need not be waited for."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._num_reading = 0
        self._is_changing = False
        self._mapping: mmap.mmap | None = None
        self._release: weakref.finalize[..., WeightsMemory] | None = None
        self.path = ""
        """The file that other processes open. It is another one when the number of bytes has changed."""
        self.revision = 0
        """Number of changes that were begun."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Wait until nobody reads, and keep readers away while the bytes are changed inside."""
        with self._turn:
            self._turn.wait_for(lambda: not self._num_reading and not self._is_changing)
            self.revision += 1
            self._is_changing = True
        try:
            yield
        finally:
            with self._turn:
                self._is_changing = False
                self._turn.notify_all()

    @contextlib.contextmanager
    def reading(self, revision: int) -> Iterator[bool]:
        """Keep changes away while the bytes are read inside. Yields False if they are not those of that revision any
        more. Waits for nothing."""
        with self._turn:
            is_current = revision == self.revision and not self._is_changing
            self._num_reading += is_current
        try:
            yield is_current
        finally:
            with self._turn:
                self._num_reading -= is_current
                self._turn.notify_all()

    def allocate(self, num_bytes: int) -> memoryview:
        """Return a number of writable bytes, inside of `changing`. They are the bytes of before if the number is the
        same; else the old bytes are released as soon as nobody has a view of them."""
        if self._mapping is None or len(self._mapping) != max(num_bytes, 1):
            self.close()
            descriptor, self.path, is_file = _open(max(num_bytes, 1))
            self._release = weakref.finalize(self, _close, descriptor, self.path if is_file else None)
            self._mapping = mmap.mmap(descriptor, max(num_bytes, 1))
            if not is_file:
                _seal(descriptor)
        return memoryview(self._mapping)[:num_bytes]

    def close(self) -> None:
        """Give the memory back. Nobody can open it any more; views of it stay valid as long as they are held."""
        self._mapping = None
        if self._release is not None:
            self._release()


class SharedTensors(dict[str, RawTensor]):
    """A version's tensors as views of a WeightsMemory, until that is changed. The owner of the memory makes it, a
    policy is given it."""

    def __init__(self, tensors: Mapping[str, RawTensor], memory: WeightsMemory, marks: Mapping[str, object]) -> None:
        """`marks`: for each tensor what differs from one value of its bytes to another, such as a digest."""
        super().__init__(tensors)
        self.memory, self.marks, self._revision = memory, marks, memory.revision

    def reading(self) -> contextlib.AbstractContextManager[bool]:
        """Keep changes of the memory away inside. Yields False if it was changed since this object was made."""
        return self.memory.reading(self._revision)

    def changed_since(self, marks: Mapping[str, object] | None) -> list[str] | None:
        """Return the names of the tensors that differ from those with these marks. None for all of them: if there are
        no marks, or they are of other tensors."""
        if marks is None or marks.keys() != self.marks.keys():
            return None
        return [name for name, mark in self.marks.items() if mark != marks[name]]


def _open(num_bytes: int) -> tuple[int, str, bool]:
    """Return a new file of a number of zeros, its path, and whether it has a name of its own that is to be removed."""
    try:
        descriptor = os.memfd_create("rftstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or not allowed
        return *_open_file(num_bytes), True
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    if not os.access(path, os.R_OK):  # no /proc, or that of other processes
        os.close(descriptor)
        return *_open_file(num_bytes), True
    os.ftruncate(descriptor, num_bytes)
    return descriptor, path, False


def _seal(descriptor: int) -> None:
    """Let nobody change the size, and nobody but us the bytes. A kernel before 5.1 knows only the former."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)


def _open_file(num_bytes: int) -> tuple[int, str]:
    prefix = name_prefix("weights")
    remove_left_behind(MEMORY, prefix)
    try:
        return _fill(*tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-", dir=MEMORY), num_bytes)
    except OSError:  # there is no such folder, or it is too small
        return _fill(*tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-"), num_bytes)


def _fill(descriptor: int, path: str, num_bytes: int) -> tuple[int, str]:
    """Take the room for a file now: a process that writes to a mapping would be killed where there is none."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        _close(descriptor, path)
        raise
    return descriptor, path


def _close(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def name_prefix(kind: str) -> str:
    """Return how names of what lies in MEMORY begin; the id of its process and a hyphen follow. Processes of other
    containers, whose ids mean nothing here, have other prefixes."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"rftstream-{kind}-{namespace}-"


def remove_left_behind(where: Path, prefix: str) -> None:
    """Remove files and folders of processes of this user that were killed, for they take memory."""
    for path in where.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):  # another process does it, too
            if path.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
