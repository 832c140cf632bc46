"""A version of the weights in this machine's memory, where the processes of an engine read it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rftstream.models.spec import ModelSpec
from rftstream.weights.adapters import write_adapter
from rftstream.weights.snapshot import RawTensor, write_snapshot

MEMORY = Path("/dev/shm")
"""A file system in memory; other machines have none, and get a temporary folder."""


_PREFIX = "rftstream-adapter-"


class SharedFile:
    """Weights as a safetensors file in memory, which other processes of this user can open until it is closed."""

    def __init__(self, tensors: Mapping[str, RawTensor]) -> None:
        descriptor = os.memfd_create("rftstream-weights", os.MFD_CLOEXEC)
        self._file = os.fdopen(descriptor, "wb")
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        write_snapshot(self._file, tensors)
        self._file.flush()

    def close(self) -> None:
        """Give the memory back. Nobody can open the file any more."""
        self._file.close()


class SharedAdapter:
    """An adapter as a folder of PEFT, which other processes of this user can read until it is closed.

    It lies in memory if there is room: containers have 64 MiB of that unless they are given more."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
        try:
            _remove_left_behind(MEMORY)
            self.path = _written(MEMORY, spec, tensors)
        except OSError:
            self.path = _written(None, spec, tensors)

    def close(self) -> None:
        """Remove the folder. What the engine has read stays with it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _written(where: Path | None, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> str:
    """Write an adapter into a folder of its own. After an error nothing of it is left."""
    path = tempfile.mkdtemp(prefix=f"{_PREFIX}{_processes()}-{os.getpid()}-", dir=where)
    try:
        write_adapter(Path(path), spec, tensors)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def _remove_left_behind(where: Path) -> None:
    """Remove adapters of processes of this user that were killed, for they take memory."""
    prefix = f"{_PREFIX}{_processes()}-"
    for folder in where.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if folder.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _processes() -> int:
    """Return a number for the processes that this one sees; those of other containers have another one."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
