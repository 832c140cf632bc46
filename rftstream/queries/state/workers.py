"""Asks the workers of a run on this machine for their state, on `/health`."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.http.address import split_url
from rftstream.http.client import HttpClient, RequestFailed
from rftstream.runs.folder import RunFolder

HEALTH_TIMEOUT_S = 0.5


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
    address = split_url(f"http://127.0.0.1:{port}")
    if address is not None:
        client = HttpClient(address, max_bytes=1 << 20)
        with contextlib.suppress(RequestFailed, ValueError), contextlib.closing(client):  # gone, or not one of ours
            answer = client.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            health = json.loads(answer.body)  # 503: it says of itself that it is stuck
    if isinstance(health, dict) and health.get("process", file.stem) == file.stem:
        return WorkerStatus(process=file.stem, port=port, host=host, health=health)
    return WorkerStatus(process=file.stem, port=port, host=host, health=None)
