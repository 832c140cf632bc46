"""One port per worker: `/metrics` for Prometheus, `/health` for whoever asks whether it still works, and `/livez` and
`/readyz` for what starts it anew and sends it work.

queries/state/workers.py asks."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STUCK_AFTER_S = 120.0
"""Seconds without a beat after which a loop counts as stuck."""


class Health:
    """The state that a worker's loop last reported. The worker makes it. Its loop calls `beat` and `update`, and the
    serving thread calls `report`."""

    def __init__(self, *, stuck_after_s: float = STUCK_AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_after_s = stuck_after_s
        self._clock = clock
        self._beat_at = clock()
        self._values: Mapping[str, object] = {}

    def beat(self) -> None:
        """Note that the loop came round."""
        self._beat_at = self._clock()

    def update(self, values: Mapping[str, object]) -> None:
        """Replace the values that `/health` shows."""
        self._values = values

    def report(self) -> tuple[bool, dict[str, object]]:
        """Return whether the loop is alive, and what `/health` says."""
        silent_s = self._clock() - self._beat_at
        alive = silent_s <= self._stuck_after_s
        return alive, {"ok": alive, "silent_s": round(silent_s, 3), **self._values}

    def not_ready(self) -> str:
        """Return what the worker still waits for, for `/readyz`; empty if it does its work."""
        values = self._values
        if not values:
            return "it has not begun"
        if "version" in values and values["version"] is None:
            return "it has no weights yet"
        if values.get("partitions") == 0:
            return "it owns no partitions"
        return ""


class HealthServer:
    """The thread that answers `/metrics`, `/health`, `/livez` and `/readyz`. A worker makes it, and closes it at its
    end.

    `port` 0 takes any free port. The port in use and the host are written to `file`, for others to find.
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
        """`registry`: the metrics, by default those of this process. `option`: what the port was given by."""
        handler = type("Handler", (_Handler,), {"health": health, "registry": registry})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"{option} {port}: {error.strerror or error}; take another port, or 0 for any free one"
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._file = file
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.port} {socket.gethostname()}\n", encoding="utf-8")
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the thread. One that sleeps would keep the port open, and once it was woken it would
        never sleep again."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # it is awake
            socket.create_connection((str(self._server.server_address[0]), self.port), timeout=1.0).close()
        self._thread.join(1.0)
        self._server.server_close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _serve(self) -> None:
        """Sleep until somebody connects, and answer. `serve_forever` would look for its end now and then."""
        while not self._is_closing:
            self._server.handle_request()


log = logging.getLogger(__name__)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has hung up, which happens, and log anything else."""
        if not isinstance(sys.exception(), OSError):
            log.exception("/metrics and /health: a request from %s failed", client_address[0])


class _Handler(BaseHTTPRequestHandler):
    health: Health
    registry: CollectorRegistry | None
    timeout = 10

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # who asked has hung up
            super().handle()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send_metrics()
        elif path in ("/health", "/livez"):
            alive, values = self.health.report()
            self._send(200 if alive else 503, "application/json", json.dumps(values, default=str).encode() + b"\n")
        elif path == "/readyz":
            alive, _ = self.health.report()
            why = self.health.not_ready() if alive else "its loop does not come round"
            self._send(503 if why else 200, "text/plain", f"{why or 'ready'}\n".encode())
        else:
            self._send(404, "text/plain", b"known: /metrics, /health, /livez, /readyz\n")

    def _send_metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder

        from rftstream.metrics import REGISTRY

        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        self._send(200, kind, encode(self.registry or REGISTRY))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Being asked is not an event."""


# ------------------------------------------------------------------------------------------------ asking
