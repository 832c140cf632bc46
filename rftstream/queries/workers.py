"""Asks the workers of a run on this machine for their state, on `/health`."""

from __future__ import annotations

import contextlib
import http.client
import json
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
    health: Mapping[str, Any] | None
    """What /health says; None if nobody answers."""


def ask_workers(folder: RunFolder) -> tuple[WorkerStatus, ...]:
    """Ask all workers of the run that have a port on this machine, all at once. The call waits for the slowest
    answer."""
    files = sorted(folder.logs.glob("*.port")) if folder.logs.is_dir() else []
    if not files:
        return ()
    with ThreadPoolExecutor(max_workers=min(32, len(files))) as pool:
        return tuple(worker for worker in pool.map(_ask, files) if worker is not None)


def _ask(file: Path) -> WorkerStatus | None:
    try:
        port = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    health: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # gone, or not one of ours any more
        try:
            answer = _DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=HEALTH_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error  # 503: it says of itself that it is stuck
        with answer:
            health = json.loads(answer.read(1 << 20))
    if isinstance(health, dict) and health.get("process", file.stem) == file.stem:
        return WorkerStatus(process=file.stem, port=port, health=health)
    return WorkerStatus(process=file.stem, port=port, health=None)
