"""A server of sandboxes over HTTP, for machines without bubblewrap: `rftstream sandbox serve`.

    POST   /v1/boxes                {"disk_bytes"}            -> {"id"}
    POST   /v1/boxes/ID/put         [file, ...]               -> {}
    POST   /v1/boxes/ID/run         job                       -> end
    POST   /v1/boxes/ID/get         {"names", "max_bytes"}    -> [file, ...]
    DELETE /v1/boxes/ID                                       -> {}

Files, jobs and ends are those of `base` as JSON, with bytes in base64. A sandbox that failed is 503 with {"error"}, a
request that is none is 400, a box that is not there 404, a wrong token 401, files that do not fit into a box or are too
large to be taken out of it 507. A box that nobody uses for IDLE_S is ended.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec

from rftstream.errors import ConfigError
from rftstream.sandbox.base import BoxFile, BoxRefused, Job, Sandbox, SandboxBackend, SandboxError

logger = logging.getLogger(__name__)

IDLE_S = 120.0
"""Seconds after which a box that nobody uses is ended: its user has died."""
MAX_REQUEST_BYTES = 256 << 20
MAX_GET_BYTES = 64 << 20
SOCKET_S = 300.0
"""Most seconds for a client to send its request."""


class NewBox(msgspec.Struct, forbid_unknown_fields=True):
    """The request for a new box."""

    disk_bytes: int = 64 << 20


class WantedFiles(msgspec.Struct, forbid_unknown_fields=True):
    """The request for files of a box."""

    names: list[str] | None = None
    max_bytes: int = MAX_GET_BYTES


@dataclass(slots=True)
class _HeldBox:
    box: Sandbox
    used_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class SandboxServer(ThreadingHTTPServer):
    """Serves the sandboxes of a back end. `rftstream sandbox serve` makes it, and calls `serve_forever` and `close`.

    Without a token it serves this machine alone.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], backend: SandboxBackend, *, token: str = "") -> None:
        if not token and not _is_loopback(address[0]):
            raise ConfigError(
                f"sandbox serve: {address[0]} can be reached from other machines, which needs a token; set "
                "RFTSTREAM_SANDBOX_TOKEN, or serve 127.0.0.1"
            )
        self.backend, self.token = backend, token
        self._boxes: dict[str, _HeldBox] = {}
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _SandboxHandler)

    @property
    def url(self) -> str:
        """Return the address under which it can be reached."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has hung up, which happens, and log anything else."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a request from %s failed", client_address[0])

    def service_actions(self) -> None:
        """End boxes whose users are gone. `serve_forever` calls it twice a second."""
        now = time.monotonic()
        with self._lock:
            old = [
                name for name, held in self._boxes.items()
                if now - held.used_at > IDLE_S and not held.lock.locked()
            ]  # fmt: skip
        for name in old:  # elsewhere, since new connections wait meanwhile
            threading.Thread(target=self.end, args=(name,), name="sandbox-end", daemon=True).start()

    def make(self, request: NewBox) -> str:
        """Return the id of a new box."""
        box = self.backend.create(disk_bytes=request.disk_bytes)
        name = secrets.token_hex(16)
        with self._lock:
            self._boxes[name] = _HeldBox(box, time.monotonic())
        return name

    def find(self, name: str) -> _HeldBox | None:
        """Return a box that is there."""
        with self._lock:
            return self._boxes.get(name)

    def end(self, name: str) -> bool:
        """End a box. Return whether it was there."""
        with self._lock:
            held = self._boxes.pop(name, None)
        if held is not None:
            with held.lock:
                held.box.close()
        return held is not None

    def close(self) -> None:
        """End all boxes, and the back end."""
        with self._lock:
            names = list(self._boxes)
        for name in names:
            self.end(name)
        self.server_close()
        self.backend.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _SandboxHandler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = SOCKET_S

    def do_POST(self) -> None:  # the name that http.server calls
        self._answer(self._post)

    def do_DELETE(self) -> None:  # the name that http.server calls
        self._answer(self._delete)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name that http.server has
        """Say nothing of single requests."""

    def _answer(self, work: Callable[[list[str], bytes], Any]) -> None:
        refused, length = self._refused()
        if refused is not None:
            self.close_connection = True  # the request's body was not read
            self._send(*refused)
            return
        data = self.rfile.read(length)
        try:
            status, answer = 200, work(self.path.strip("/").split("/"), data)
        except BoxRefused as error:
            status, answer = 507, {"error": str(error)}
        except SandboxError as error:
            status, answer = 503, {"error": str(error)}
        except LookupError:
            status, answer = 404, {"error": "no such box or request"}
        except (msgspec.MsgspecError, ValueError) as error:
            status, answer = 400, {"error": str(error)}
        except Exception as error:
            logger.exception("%s %s failed", self.command, self.path)
            status, answer = 500, {"error": f"the server failed: {type(error).__name__}: {error}"}
        self._send(status, answer)

    def _refused(self) -> tuple[tuple[int, dict[str, str]] | None, int]:
        """Return why a request is refused before any of its body is read, or None, and the bytes of its body."""
        given, wanted = self.headers.get("Authorization") or "", f"Bearer {self.server.token}"
        if self.server.token and not hmac.compare_digest(given.encode(), wanted.encode()):
            return (401, {"error": "the token is wrong"}), 0
        text = self.headers.get("Content-Length") or "0"
        if not (text.isascii() and text.isdigit()) or "Transfer-Encoding" in self.headers:
            return (400, {"error": "the request needs a Content-Length"}), 0
        if int(text[:20]) > MAX_REQUEST_BYTES:
            return (413, {"error": "the request is too large"}), 0
        return None, int(text[:20])

    def _send(self, status: int, answer: Any) -> None:
        body = msgspec.json.encode(answer)
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def _post(self, parts: list[str], data: bytes) -> Any:
        match parts:
            case ["v1", "boxes"]:
                return {"id": self.server.make(msgspec.json.decode(data, type=NewBox))}
            case ["v1", "boxes", name, ("put" | "run" | "get") as what]:
                held = self.server.find(name)
                if held is None:
                    raise LookupError
                with held.lock:
                    if held is not self.server.find(name):
                        raise LookupError  # it was ended meanwhile
                    try:
                        return _done(held.box, what, data)
                    finally:
                        held.used_at = time.monotonic()
        raise LookupError

    def _delete(self, parts: list[str], data: bytes) -> Any:
        if parts[:2] != ["v1", "boxes"] or len(parts) != 3 or not self.server.end(parts[2]):
            raise LookupError
        return {}


def _done(box: Sandbox, what: str, data: bytes) -> Any:
    if what == "put":
        box.put(msgspec.json.decode(data, type=list[BoxFile]))
        return {}
    if what == "run":
        return box.run(msgspec.json.decode(data, type=Job))
    wanted = msgspec.json.decode(data, type=WantedFiles)
    return box.get(wanted.names, max_bytes=min(wanted.max_bytes, MAX_GET_BYTES))
