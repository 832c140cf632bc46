"""Virtual environments for foreign packages. Each is made once, and kept in .cache by its versions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.made import made_once

ROOT = Path(__file__).parents[4]
CACHE = ROOT / ".cache" / "foreign"


def interpreter(*packages: str) -> str:
    """Return the interpreter of an environment that has these packages, with exact versions."""
    name = packages[0].partition("==")[0] + "-" + hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    folder = made_once(CACHE, name, lambda folder: _make(folder, packages))
    return str(folder / "bin" / "python")


def _make(folder: Path, packages: tuple[str, ...]) -> None:
    python, uv = str(folder / "bin" / "python"), Path(sys.executable).parent / "uv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if uv.exists():
        command = [str(uv), "pip", "install", "--quiet", "--python", python, *packages]
        if subprocess.run(command, env={"UV_SYSTEM_CERTS": "1", **os.environ}).returncode == 0:
            return
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *packages], check=True)
