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
    """An adapter as a folder of PEFT, which other processes of this user can read until it is closed."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
        self.path = tempfile.mkdtemp(prefix="rftstream-adapter-", dir=MEMORY if MEMORY.is_dir() else None)
        write_adapter(Path(self.path), spec, tensors)

    def close(self) -> None:
        """Remove the folder. What the engine has read stays with it."""
        shutil.rmtree(self.path, ignore_errors=True)
