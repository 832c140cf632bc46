"""Virtual environments for foreign packages. Each is made once, and kept in .cache by its versions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
CACHE = ROOT / ".cache" / "foreign"


def interpreter(*packages: str) -> str:
    """Return the interpreter of an environment that has these packages, with exact versions."""
    name = packages[0].partition("==")[0] + "-" + hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    folder, done = CACHE / name, CACHE / f"{name}.done"
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, packages)
            done.touch()
    return str(folder / "bin" / "python")


def _make(folder: Path, packages: tuple[str, ...]) -> None:
    python, uv = str(folder / "bin" / "python"), Path(sys.executable).parent / "uv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if uv.exists():
        command = [str(uv), "pip", "install", "--quiet", "--python", python, *packages]
        if subprocess.run(command, env={"UV_SYSTEM_CERTS": "1", **os.environ}).returncode == 0:
            return
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *packages], check=True)
