"""Servers and ports on loopback, for tests."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Asked:
    """A request to a server of a test."""

    method: str
    path: str
    """Without the query."""
    query: str
    headers: dict[str, str]
    """By names in small letters."""
    body: bytes
    connection: socket.socket

    @cached_property
    def value(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body or b"null")

    @property
    def key(self) -> str | None:
        return self.headers.get("authorization")


class HttpServer:
    """An HTTP server that asks a function for each answer: its content (bytes, text or a value for JSON), or a status
    and the content, with headers as a third; None closes the connection without a word."""

    def __init__(self, answer: Callable[[Asked], object], *, port: int = 0, keeps_open: bool = True) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections: list[socket.socket] = []
        settings = {"owner": self, "protocol_version": "HTTP/1.1" if keeps_open else "HTTP/1.0"}
        self._http = _Http(("127.0.0.1", port), type("Handler", (_Handler,), settings))
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """Close all connections, as a server does with those that have been idle for long."""
        while self.connections:
            with contextlib.suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Say nothing where who asked has gone."""
        if not isinstance(error := sys.exception(), OSError):
            raise error  # type: ignore[misc]


class _Handler(BaseHTTPRequestHandler):
    owner: HttpServer

    def setup(self) -> None:
        super().setup()
        self.owner.connections.append(self.connection)

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        num_bytes = int(headers.get("content-length", 0))
        body = self.rfile.read(num_bytes)
        if len(body) < num_bytes:
            raise ConnectionResetError("who asked was killed in the middle of its request")
        asked = Asked(self.command, path, query, headers, body, self.connection)
        self.owner.asked.append(asked)
        told = self.owner.answer(asked)
        if told is None:
            self.close_connection = True
            return
        status, content, more = (*told, {})[:3] if isinstance(told, tuple) else (200, told, {})
        content = content.encode() if isinstance(content, str) else content
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        pass


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(taken_port()) for _ in range(count)]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """Yield a port that nobody answers at, and nobody else gets meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
