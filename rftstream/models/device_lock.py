"""Who holds the memory of a device that a trainer and engines use one after the other (`trainer.colocate`).

Engines hold it together, a trainer alone. The operating system keeps count, by two files of each device that are
locked (`flock`): one by those who hold it, the other by a trainer that asks for it or has it. Both locks end with the
process, however it ends, so nobody has to be waited for who is gone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = physical_name(device)
        self._name = name
        self._held = _open(folder / f"{name}.held")
        self._asked = _open(folder / f"{name}.asked")

    def share(self) -> bool:
        """Hold the device beside other engines."""
        if not _lock(self._asked, fcntl.LOCK_SH):
            return False
        try:
            return _lock(self._held, fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._asked, fcntl.LOCK_UN)

    def is_wanted(self) -> bool:
        """Return whether a trainer asks for the device or has it."""
        if not _lock(self._asked, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._asked, fcntl.LOCK_UN)
        return False

    def is_taken(self) -> bool:
        """Return whether somebody has the device alone. For those who look from outside."""
        if not _lock(self._held, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._held, fcntl.LOCK_UN)
        return False

    def take(self) -> bool:
        """Ask for the device, and hold it alone if all others have released it."""
        return _lock(self._asked, fcntl.LOCK_EX) and _lock(self._held, fcntl.LOCK_EX)

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
        fcntl.flock(self._held, fcntl.LOCK_UN)
        fcntl.flock(self._asked, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the device, and close the files."""
        os.close(self._held)
        os.close(self._asked)

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


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, kind: int) -> bool:
    """Lock a file as `kind` says, if that can be done at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
