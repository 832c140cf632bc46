"""The state of a process of this machine: whether it runs, is stopped, or has ended."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs. A zombie counts as ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) not in ("Z", "X")


def process_state(pid: int) -> str | None:
    """Return the state letter: R, S, D, T (stopped), t (traced), Z, ...; None if the system does not give it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]
