"""Shared memory that holds a model's weights once for all processes of this machine that read them.

The bytes are those of a snapshot, a safetensors file. Their owner changes them in place, and processes of the same user
map them. The memory is anonymous (memfd). So a small /dev/shm, as in containers, does not limit it, and a killed
process leaves nothing behind. If the system has no memfd, the memory is a file in /dev/shm or in a temporary folder."""

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
"""A file system in memory. Machines without it use a temporary folder."""

_SEAL_FUTURE_WRITE = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which Python defines from 3.13 on: later mappings of the file are read-only."""


class WeightsMemory:
    """Shared memory with a snapshot's bytes, which other processes of this user can map, and the rules for its use.

    A follower makes it, or an owner of weights without a follower. The owner changes the bytes in one thread, while a
    reader lets other processes read them in another:

        with memory.changing():
            view = memory.allocate(num_bytes)
            view[:] = snapshot
        shared = SharedTensors(decode_snapshot(view), memory, marks=digests)

        with shared.reading() as is_current:
            if is_current:
                tell_the_processes(memory.path)

    A change waits until no reader is active. A reader that starts after a change has begun gets False, since the bytes
    are gone, and does not delay the change."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._num_reading = 0
        self._is_changing = False
        self._mapping: mmap.mmap | None = None
        self._release: weakref.finalize[..., WeightsMemory] | None = None
        self.path = ""
        """Path of the file that other processes open. It changes when the number of bytes changes."""
        self.revision = 0
        """Number of changes begun so far."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Wait until no reader is active, and keep readers away while the bytes are changed inside."""
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
        """Keep changes away while the bytes are read inside. Yield False if the bytes belong to another revision by
        now. The call never waits."""
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
        """Return that many writable bytes; call it inside of `changing`. If the number is unchanged, the previous bytes
        are returned. Otherwise the previous memory is released once it has no views."""
        if self._mapping is None or len(self._mapping) != max(num_bytes, 1):
            self.close()
            descriptor, self.path, is_file = _open(max(num_bytes, 1))
            self._release = weakref.finalize(self, _close, descriptor, self.path if is_file else None)
            self._mapping = mmap.mmap(descriptor, max(num_bytes, 1))
            if not is_file:
                _seal(descriptor)
        return memoryview(self._mapping)[:num_bytes]

    def close(self) -> None:
        """Release the memory. It can no longer be opened; existing views stay valid."""
        self._mapping = None
        if self._release is not None:
            self._release()


class SharedTensors(dict[str, RawTensor]):
    """A version's tensors as views of a WeightsMemory, valid until the memory is changed. The owner of the memory makes
    it and passes it to a policy."""

    def __init__(self, tensors: Mapping[str, RawTensor], memory: WeightsMemory, marks: Mapping[str, object]) -> None:
        """`marks` has for each tensor a value that differs whenever its bytes differ, such as a digest."""
        super().__init__(tensors)
        self.memory, self.marks, self._revision = memory, marks, memory.revision

    def reading(self) -> contextlib.AbstractContextManager[bool]:
        """Keep changes of the memory away inside. Yield False if it was changed since this object was made."""
        return self.memory.reading(self._revision)

    def changed_since(self, marks: Mapping[str, object] | None) -> list[str] | None:
        """Return the names of the tensors that differ from those with these marks. None means all tensors: there are no
        marks, or they belong to other tensors."""
        if marks is None or marks.keys() != self.marks.keys():
            return None
        return [name for name, mark in self.marks.items() if mark != marks[name]]


def _open(num_bytes: int) -> tuple[int, str, bool]:
    """Return a new zero-filled file, its path, and whether the path must be removed later."""
    try:
        descriptor = os.memfd_create("rftstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not on Linux, or not permitted
        return *_open_file(num_bytes), True
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    if not os.access(path, os.R_OK):  # there is no /proc, or it shows other processes
        os.close(descriptor)
        return *_open_file(num_bytes), True
    os.ftruncate(descriptor, num_bytes)
    return descriptor, path, False


def _seal(descriptor: int) -> None:
    """Forbid changes of the size to everybody, and changes of the bytes to other processes. A kernel before 5.1
    supports only the former."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)


def _open_file(num_bytes: int) -> tuple[int, str]:
    prefix = name_prefix("weights")
    remove_left_behind(MEMORY, prefix)
    try:
        return _fill(*tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-", dir=MEMORY), num_bytes)
    except OSError:  # the folder is missing or too small
        return _fill(*tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-"), num_bytes)


def _fill(descriptor: int, path: str, num_bytes: int) -> tuple[int, str]:
    """Allocate the file's space now. Otherwise a process that writes to a mapping would be killed when space runs
    out."""
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
    """Return the prefix of names in MEMORY; the process id and a hyphen follow it. Other containers have other
    prefixes, since their process ids mean nothing here."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"rftstream-{kind}-{namespace}-"


def remove_left_behind(where: Path, prefix: str) -> None:
    """Remove files and folders of this user's killed processes, since they take memory."""
    for path in where.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):  # another process removes it at the same time
            if path.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
