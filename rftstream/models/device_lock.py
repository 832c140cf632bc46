"""Who holds the memory of a device that a trainer and engines use one after the other (`trainer.colocate`).

Engines hold it together, a trainer alone. The operating system keeps count, by two files of each device that are
locked (`flock`): one by those who hold it, the other by a trainer that asks for it or has it. Both locks end with the
process, however it ends, so nobody has to be waited for who is gone.
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
"""Seconds from one look at a lock that somebody else has to the next."""


class DeviceLock(Protocol):
    """The lock of a device, as one process has it. The worker of an engine or a trainer makes it.

    An engine:                                   A trainer:

        while not lock.share(): ...                  while not lock.take(): ...  # engines see it and give way
        if lock.is_wanted(): sleep, then             train
            lock.release()                           lock.release()
    """

    def share(self) -> bool:
        """Hold the device beside other engines. False while a trainer has it or asks for it."""

    def is_wanted(self) -> bool:
        """Return whether a trainer asks for the device or has it."""

    def take(self) -> bool:
        """Hold the device alone. False while others hold it; engines see from the first call on that it is wanted."""

    def wait_shared(self) -> None:
        """Return when the device is held beside other engines. Called when an engine starts."""

    def wait_taken(self) -> None:
        """Return when the device is held alone. Called when a trainer starts."""

    def release(self) -> None:
        """Hold the device no more, and ask for it no more. Nothing happens if it is not held."""


class FileLock:
    """A DeviceLock for processes of one machine and one user."""

    def __init__(self, device: str, *, folder: Path | None = None, look: Callable[[], None] = lambda: None) -> None:
        """`folder`: of this user alone; the same for all processes that share the device. `look` is called again and
        again while the device is waited for; what it raises ends the wait."""
        self._look = look
        folder = lock_folder() if folder is None else folder
        name = physical_name(device)
        self._name = name
        self._held = _LockedFile(folder / f"{name}.held")
        self._asked = _LockedFile(folder / f"{name}.asked")

    def share(self) -> bool:
        """Hold the device beside other engines."""
        if not self._asked.lock(fcntl.LOCK_SH):
            return False
        try:
            return self._held.lock(fcntl.LOCK_SH)
        finally:
            self._asked.unlock()

    def is_wanted(self) -> bool:
        """Return whether a trainer asks for the device or has it."""
        if not self._asked.lock(fcntl.LOCK_SH):
            return True
        self._asked.unlock()
        return False

    def take(self) -> bool:
        """Ask for the device, and hold it alone if all others have released it."""
        return self._asked.lock(fcntl.LOCK_EX) and self._held.lock(fcntl.LOCK_EX)

    def wait_shared(self) -> None:
        """Return when the device is held beside other engines."""
        if not self.share():
            log.info("waits until the trainer has left the device %s", self._name)
            self._until(self.share)

    def wait_taken(self) -> None:
        """Return when the device is held alone."""
        if not self.take():
            log.info("waits until all engines have left the device %s", self._name)
            self._until(self.take)

    def release(self) -> None:
        """Hold the device no more, and ask for it no more."""
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
    """Return the folder of this user's locks: in memory, where there is such a folder."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(place) / f"rftstream-{os.getuid()}"


def physical_name(device: str) -> str:
    """Return the name of the device that all processes of the machine have for it, whichever GPUs they see."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return kind
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = int(number or 0)
    return f"cuda-{visible[index].strip() if index < len(visible) and visible[index].strip() else index}"


def _check_is_ours(folder: Path) -> None:
    """Raise ConfigError if others could hold the locks in this folder, or lead us elsewhere."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"trainer.colocate: {folder} holds locks of devices, expected a folder that user {os.getuid()} owns and "
            f"nobody else can write to; got {stat.filemode(found.st_mode)} of user {found.st_uid}; remove it"
        )


class _LockedFile:
    """A file that is locked, as one process has it. A FileLock makes two."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def _open(self) -> int:
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_ours(folder)
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def lock(self, kind: int) -> bool:
        """Lock the file as `kind` says, if that can be done at once."""
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._is_there():
                return True
            os.close(self._file)  # it was removed: others lock the one that has its name now
            self._file = self._open()

    def unlock(self) -> None:
        """Release the lock. Nothing happens if there is none."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock, and close the file."""
        os.close(self._file)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False
