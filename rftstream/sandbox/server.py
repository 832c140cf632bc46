"""A server of sandboxes over HTTP, for machines without bubblewrap: `rftstream sandbox serve`.

    POST   /v1/boxes                {"disk_bytes"}            -> {"id"}
    POST   /v1/boxes/ID/put         [file, ...]               -> {}
    POST   /v1/boxes/ID/run         job                       -> end
    POST   /v1/boxes/ID/get         {"names", "max_bytes"}    -> [file, ...]
    DELETE /v1/boxes/ID                                       -> {}

Files, jobs and ends are those of `base` as JSON, with bytes in base64. Error codes: 400 an invalid request; 401 a wrong
token; 404 an unknown box; 503 a failed sandbox, with {"error"}; 507 files that do not fit into a box or are too large
to be returned. A box that is unused for IDLE_S is ended.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rftstream.errors import ConfigError
from rftstream.http.server import HttpAnswer, HttpConnection, HttpListener, HttpRequest
from rftstream.loops import LoopThread
from rftstream.sandbox.base import BoxFile, BoxRefused, Job, Sandbox, SandboxBackend, SandboxError

logger = logging.getLogger(__name__)

IDLE_S = 120.0
"""Seconds after which an unused box is ended: its user has died."""
LOOK_EVERY_S = 0.5
"""Seconds between two checks for unused boxes."""
MAX_REQUEST_BYTES = 256 << 20
MAX_GET_BYTES = 64 << 20
MAX_CONNECTIONS = 1024


class NewBox(msgspec.Struct, forbid_unknown_fields=True):
    """The request for a new box."""

    disk_bytes: int = 64 << 20


class WantedFiles(msgspec.Struct, forbid_unknown_fields=True):
    """The request for files of a box."""

    names: list[str] | None = None
    max_bytes: int = MAX_GET_BYTES


# Made here, and not by the first threads that need them: contracts/codec.py says why.
_new_box, _wanted_files = msgspec.json.Decoder(NewBox), msgspec.json.Decoder(WantedFiles)
_job, _files = msgspec.json.Decoder(Job), msgspec.json.Decoder(list[BoxFile])


@dataclass(slots=True)
class _HeldBox:
    box: Sandbox
    used_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class SandboxServer:
    """Serves the sandboxes of a back end. `rftstream sandbox serve` makes it, which starts it, and calls `close`.

    Without a token it accepts only connections from this machine.
    """

    def __init__(self, address: tuple[str, int], backend: SandboxBackend, *, token: str = "") -> None:
        host, port = address
        if not token and not _is_loopback(host):
            raise ConfigError(
                f"sandbox serve: {host} can be reached from other machines, which needs a token; set "
                "RFTSTREAM_SANDBOX_TOKEN, or serve 127.0.0.1"
            )
        self.backend, self.token = backend, token
        self._boxes: dict[str, _HeldBox] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="sandbox")
        self._listener = HttpListener(
            self._handle,
            name="sandbox server",
            max_body_bytes=MAX_REQUEST_BYTES,
            max_connections=MAX_CONNECTIONS,
            refuses=lambda request: self._refusal(request) is not None,
        )
        self._loop = LoopThread("sandbox server")
        try:
            self.port = self._loop.call(self._listener.listen(host, port))
        except OSError:
            self._loop.close()
            raise
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        """The address of the server."""
        self._reaper = self._loop.begin(self._reap())

    def make(self, request: NewBox) -> str:
        """Return the id of a new box."""
        box = self.backend.create(disk_bytes=request.disk_bytes)
        name = secrets.token_hex(16)
        with self._lock:
            self._boxes[name] = _HeldBox(box, time.monotonic())
        return name

    def find(self, name: str) -> _HeldBox | None:
        """Return the box with this name, or None."""
        with self._lock:
            return self._boxes.get(name)

    def end(self, name: str) -> bool:
        """End a box. Return whether there was one."""
        with self._lock:
            held = self._boxes.pop(name, None)
        if held is not None:
            with held.lock:
                held.box.close()
        return held is not None

    def close(self) -> None:
        """Stop listening, end all boxes, and close the back end."""
        self._loop.call(self._listener.close())
        self._loop.close()
        with self._lock:
            names = list(self._boxes)
        for name in names:
            self.end(name)
        self._threads.shutdown(wait=False)
        self.backend.close()

    async def _reap(self) -> None:
        """End boxes whose users are gone."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            with self._lock:
                held = list(self._boxes.items())
            for name, box in held:
                if now - box.used_at > IDLE_S and not box.lock.locked():
                    self._threads.submit(self.end, name)

    async def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        answer = self._refusal(request)
        if answer is None:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, request)
        status, value = answer
        connection.send(HttpAnswer(status=status, body=msgspec.json.encode(value)))

    def _refusal(self, request: HttpRequest) -> tuple[int, Any] | None:
        """Return why a request is refused before its body is read; None if it is accepted."""
        given, wanted = request.headers.get("authorization", ""), f"Bearer {self.token}"
        if self.token and not hmac.compare_digest(given.encode(), wanted.encode()):
            return 401, {"error": "the token is wrong"}
        if "transfer-encoding" in request.headers:
            return 400, {"error": "the request needs a Content-Length"}
        return (413, {"error": "the request is too large"}) if request.is_too_large else None

    def _answer(self, request: HttpRequest) -> tuple[int, Any]:
        try:
            return 200, self._value(request.method, request.path.strip("/").split("/"), request.body)
        except BoxRefused as error:
            return 507, {"error": str(error)}
        except SandboxError as error:
            return 503, {"error": str(error)}
        except LookupError:
            return 404, {"error": "no such box or request"}
        except (msgspec.MsgspecError, ValueError) as error:
            return 400, {"error": str(error)}
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return 500, {"error": f"the server failed: {type(error).__name__}: {error}"}

    def _value(self, method: str, parts: list[str], data: bytes) -> Any:
        match method, *parts:
            case ["POST", "v1", "boxes"]:
                return {"id": self.make(_new_box.decode(data))}
            case ["DELETE", "v1", "boxes", name] if self.end(name):
                return {}
            case ["POST", "v1", "boxes", name, ("put" | "run" | "get") as what] if held := self.find(name):
                with held.lock:
                    if held is not self.find(name):
                        raise LookupError  # the box was ended meanwhile
                    try:
                        return _done(held.box, what, data)
                    finally:
                        held.used_at = time.monotonic()
        raise LookupError


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _done(box: Sandbox, what: str, data: bytes) -> Any:
    if what == "put":
        box.put(_files.decode(data))
        return {}
    if what == "run":
        return box.run(_job.decode(data))
    wanted = _wanted_files.decode(data)
    return box.get(wanted.names, max_bytes=min(wanted.max_bytes, MAX_GET_BYTES))
