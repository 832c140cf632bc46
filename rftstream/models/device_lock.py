"""The lock of a device whose memory a trainer and engines use in turn (`trainer.colocate`).

Engines hold the device together; a trainer holds it alone. Each device has two files that processes lock with `flock`:
its holders lock one, and a trainer that wants or holds the device locks the other. The operating system releases both
locks when a process ends, for whatever reason, so no process waits for a dead one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rftstream.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two checks of a lock that another process holds."""


class DeviceLock(Protocol):
    """One process's view of a device's lock. The worker of an engine or a trainer makes it.

    An engine:                                   A trainer:

        while not lock.share(): ...                  while not lock.take(): ...  # engines see it and give way
        if lock.is_wanted(): sleep, then             train
            lock.release()                           lock.release()
    """

    def share(self) -> bool:
        """Hold the device together with other engines. Return False while a trainer holds it or wants it."""

    def is_wanted(self) -> bool:
        """Return whether a trainer wants the device or holds it."""

    def take(self) -> bool:
        """Hold the device alone. Return False while others hold it. From the first call on, engines see that the device
        is wanted."""

    def wait_shared(self) -> None:
        """Wait until the device is held together with other engines. An engine calls it when it starts."""

    def wait_taken(self) -> None:
        """Wait until the device is held alone. A trainer calls it when it starts."""

    def release(self) -> None:
        """Release the device and stop asking for it. Nothing happens if it is not held."""


class FileLock:
    """A DeviceLock for processes of one machine and one user."""

    def __init__(self, device: str, *, folder: Path | None = None, look: Callable[[], None] = lambda: None) -> None:
        """`folder`: the folder of the lock files. It belongs to this user alone and is the same for all processes that
        share the device. `look`: called repeatedly while waiting for the device; an exception that it raises ends the
        wait."""
        self._look = look
        folder = lock_folder() if folder is None else folder
        name = physical_name(device)
        self._name = name
        self._held = _LockedFile(folder / f"{name}.held")
        self._asked = _LockedFile(folder / f"{name}.asked")

    def share(self) -> bool:
        """Hold the device together with other engines."""
        if not self._asked.lock(fcntl.LOCK_SH):
            return False
        try:
            return self._held.lock(fcntl.LOCK_SH)
        finally:
            self._asked.unlock()

    def is_wanted(self) -> bool:
        """Return whether a trainer wants the device or holds it."""
        if not self._asked.lock(fcntl.LOCK_SH):
            return True
        self._asked.unlock()
        return False

    def take(self) -> bool:
        """Ask for the device, and hold it alone if all others have released it."""
        return self._asked.lock(fcntl.LOCK_EX) and self._held.lock(fcntl.LOCK_EX)

    def wait_shared(self) -> None:
        """Wait until the device is held together with other engines."""
        if not self.share():
            log.info("waits until the trainer has left the device %s", self._name)
            self._until(self.share)

    def wait_taken(self) -> None:
        """Wait until the device is held alone."""
        if not self.take():
            log.info("waits until all engines have left the device %s", self._name)
            self._until(self.take)

    def release(self) -> None:
        """Release the device and stop asking for it."""
        self._held.unlock()
        self._asked.unlock()

    def close(self) -> None:
        """Release the device, and close the files."""
        self._held.close()
        self._asked.close()

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._look()
            time.sleep(LOOK_S)


def lock_folder() -> Path:
    """Return the folder of this user's locks: in memory if the machine has such a folder."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(place) / f"rftstream-{os.getuid()}"


def physical_name(device: str) -> str:
    """Return the machine-wide name of the device, which does not depend on the GPUs that a process sees."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return kind
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = int(number or 0)
    return f"cuda-{visible[index].strip() if index < len(visible) and visible[index].strip() else index}"


def _check_is_ours(folder: Path) -> None:
    """Raise ConfigError if another user could hold the locks in this folder, or redirect it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"trainer.colocate: {folder} holds locks of devices, expected a folder that user {os.getuid()} owns and "
            f"nobody else can write to; got {stat.filemode(found.st_mode)} of user {found.st_uid}; remove it"
        )


class _LockedFile:
    """A file that this process may lock. A FileLock makes two."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def _open(self) -> int:
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_ours(folder)
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def lock(self, kind: int) -> bool:
        """Take the lock of this `kind` if that is possible at once; return whether it was."""
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._is_there():
                return True
            os.close(self._file)  # the file was removed: other processes lock the new file of this name
            self._file = self._open()

    def unlock(self) -> None:
        """Release the lock. Nothing happens if it is not held."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock, and close the file."""
        os.close(self._file)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False
