"""Things that are dear to make (models, trained runs, virtual environments) are made once for all tests that ask.

Several processes of pytest-xdist may ask at the same time: the first one makes it, the others wait. What could not be
made is removed by the next one who asks, and made anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(base: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `base/name`. `make` fills it the first time; tests read it, and copy what they change.

    The folder has its final name while it is filled, so that what it holds may name itself."""
    base.mkdir(parents=True, exist_ok=True)
    folder, done = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of this run of pytest share. It goes with pytest's temporary files."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made"
