"""Wait for what threads and other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 240.0) -> None:
    """Wait for a condition. Only a hang reaches the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s in vain"
        time.sleep(0.01)
