"""The HTTP port of each worker: `/metrics` for Prometheus, `/health` for its state, and `/livez` and `/readyz` for
systems that restart it or send it work.

queries/state/workers.py reads `/health`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.errors import ConfigError
from rftstream.http.server import JSON_TYPE, HttpAnswer, HttpConnection, HttpListener, HttpRequest
from rftstream.loops import LoopThread
from rftstream.queries.state.workers import FOR_ALL

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STUCK_AFTER_S = 120.0
"""Seconds without a beat after which a loop counts as stuck."""


MAX_CONNECTIONS = 256
"""Most clients at once."""


class Health:
    """The state that a worker's loop last reported. The worker makes it. Its loop calls `beat` and `update`, and the
    server calls `report`."""

    def __init__(self, *, stuck_after_s: float = STUCK_AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_after_s = stuck_after_s
        self._clock = clock
        self._beat_at = clock()
        self._values: Mapping[str, object] = {}

    def beat(self) -> None:
        """Record that the loop has come round."""
        self._beat_at = self._clock()

    def update(self, values: Mapping[str, object]) -> None:
        """Replace the values that `/health` shows."""
        self._values = values

    def report(self) -> tuple[bool, dict[str, object]]:
        """Return whether the loop is alive, and the answer of `/health`."""
        silent_s = self._clock() - self._beat_at
        alive = silent_s <= self._stuck_after_s
        return alive, {"ok": alive, "silent_s": round(silent_s, 3), **self._values}

    def not_ready(self) -> str:
        """Return what the worker still waits for, for `/readyz`; empty if it is ready."""
        values = self._values
        if not values:
            return "it has not begun"
        if "version" in values and values["version"] is None:
            return "it has no weights yet"
        if values.get("partitions") == 0:
            return "it owns no partitions"
        return ""


class HealthServer:
    """Answers `/metrics`, `/health`, `/livez` and `/readyz`, in a thread. A worker makes it, and closes it at its end.

    `port` 0 takes any free port. The port in use and the host are written to `file`, so that others can find them.
    """

    def __init__(
        self,
        health: Health,
        *,
        port: int,
        host: str = "",
        file: Path | None = None,
        registry: CollectorRegistry | None = None,
        option: str = "--metrics-port",
    ) -> None:
        """`registry`: the metrics, by default those of this process. `option`: the setting or flag that gave the port,
        for errors."""
        self._health, self._registry, self._file = health, registry, file
        self._listener = HttpListener(
            self._handle, name="server of /metrics and /health", max_body_bytes=0, max_connections=MAX_CONNECTIONS
        )
        self._loop = LoopThread("health")
        try:
            self.port = self._loop.call(self._listener.listen(host or "0.0.0.0", port))
        except OSError as error:
            self._loop.close()
            why = os.strerror(error.errno) if error.errno else error  # asyncio has a text of its own
            raise ConfigError(f"{option} {port}: {why}; take another port, or 0 for any free one") from None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            who = "" if host else f" {FOR_ALL}"
            file.write_text(f"{self.port} {socket.gethostname()}{who}\n", encoding="utf-8")

    def close(self) -> None:
        """Stop listening, and end the thread."""
        if not self._loop.closed:
            self._loop.call(self._listener.close())
            self._loop.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        connection.send(self._answer(request))
        connection.finish()

    def _answer(self, request: HttpRequest) -> HttpAnswer:
        if request.path == "/metrics":
            return self._metrics(request.headers.get("accept", ""))
        alive, values = self._health.report()
        if request.path in ("/health", "/livez"):
            body = json.dumps(values, default=str).encode() + b"\n"
            return HttpAnswer(status=200 if alive else 503, content_type=JSON_TYPE, body=body)
        if request.path == "/readyz":
            why = self._health.not_ready() if alive else "its loop does not come round"
            text = f"{why or 'ready'}\n".encode()
            return HttpAnswer(status=503 if why else 200, content_type="text/plain", body=text)
        known = b"known: /metrics, /health, /livez, /readyz\n"
        return HttpAnswer(status=404, content_type="text/plain", body=known)

    def _metrics(self, accept: str) -> HttpAnswer:
        from prometheus_client.exposition import choose_encoder

        from rftstream.metrics import REGISTRY

        encode, kind = choose_encoder(accept)
        return HttpAnswer(status=200, content_type=kind, body=encode(self._registry or REGISTRY))


def trained_again(health: Mapping[str, object]) -> str:
    """Return, as the end of a sentence, which versions a trainer's successor trains again, by the trainer's health."""
    version, saved = health.get("version"), health.get("saved")
    if not isinstance(version, int) or not isinstance(saved, int) or version <= saved:
        return ""
    return f", and trains again what came after version {saved} (trainer.checkpoint_every)"
