"""Asks the workers of a run on this machine for their state, on `/health`."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.runs.folder import RunFolder

HEALTH_TIMEOUT_S = 0.5
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without a proxy, since the workers are on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's answer. `ask_workers` makes it."""

    process: str
    port: int
    host: str
    """Where it runs."""
    health: Mapping[str, Any] | None
    """Answer of /health; None if nobody answers, or if the worker is on another host, which is not asked."""

    @property
    def reachable(self) -> bool:
        """Whether it has answered."""
        return self.health is not None

    @property
    def is_here(self) -> bool:
        """Return whether it runs on this host, and was asked."""
        return self.host == socket.gethostname()


def ask_workers(folder: RunFolder) -> tuple[WorkerStatus, ...]:
    """Return all workers of the run that have a port. Those on this host are asked, all at once; the call waits for the
    slowest answer."""
    files = sorted(folder.logs.glob("*.port")) if folder.logs.is_dir() else []
    if not files:
        return ()
    with ThreadPoolExecutor(max_workers=min(32, len(files))) as pool:
        return tuple(worker for worker in pool.map(_ask, files) if worker is not None)


def _ask(file: Path) -> WorkerStatus | None:
    try:
        words = file.read_text(encoding="utf-8").split()
        port, host = int(words[0]), words[1] if words[1:] else socket.gethostname()
    except (OSError, ValueError, IndexError):
        return None
    if host != socket.gethostname():
        return WorkerStatus(process=file.stem, port=port, host=host, health=None)
    health: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # gone, or not one of ours any more
        try:
            answer = _DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=HEALTH_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error  # 503: it says of itself that it is stuck
        with answer:
            health = json.loads(answer.read(1 << 20))
    if isinstance(health, dict) and health.get("process", file.stem) == file.stem:
        return WorkerStatus(process=file.stem, port=port, host=host, health=health)
    return WorkerStatus(process=file.stem, port=port, host=host, health=None)
