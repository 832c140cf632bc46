"""A proxy between a client and a server, byte for byte, that does to the next connections what a bad network does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import urlsplit

STEP_BYTES = 16 * 1024


@dataclass(frozen=True)
class Fault:
    """Of one connection. Without any of these it is closed as soon as it is there."""

    delay_s: float = 0.0
    """Before anything is passed on; the connection is a good one then."""
    request_bytes: int | None = None
    """So many of what the client says are passed on, then both sides are cut off."""
    answer_bytes: int | None = None
    """Likewise of what the server says."""
    answer: bytes | None = None
    """Said in the place of the server, of whom nothing is asked."""
    silent: bool = False
    """Nobody answers."""


DROPPED = Fault()
SILENT = Fault(silent=True)


def refusal(status: int, code: str, *, behind_s: float = 0.0) -> Fault:
    """As S3 says it, by a clock that is behind this machine's."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so it is said</Message></Error>".encode()
    headers = (f"HTTP/1.1 {status} X", "Content-Type: application/xml", f"Content-Length: {len(body)}",
               f"Date: {formatdate(time.time() - behind_s, usegmt=True)}", "Connection: close")  # fmt: skip
    return Fault(answer="\r\n".join((*headers, "", "")).encode() + body)


class Proxy:
    def __init__(self, url: str) -> None:
        self._server = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults: deque[Fault] = deque()
        """Of the next connections, one each."""
        self.always: Fault | None = None
        """Of all connections after those."""
        self.num_connections = 0
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def fail(self, *faults: Fault, always: Fault | None = None) -> None:
        """From now on; what is open is closed, so that the next request needs a connection."""
        self.faults, self.always, self.num_connections = deque(faults), always, 0
        self._cut(*list(self._open))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut(*list(self._open))
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._open.add(client)
            fault = self.faults.popleft() if self.faults else self.always
            self._start(self._serve, client, fault)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, client: socket.socket, fault: Fault | None) -> None:
        if fault == DROPPED:
            self._cut(client)
            return
        if fault is not None and fault.silent:
            return  # until the client has enough of it
        if fault is not None and fault.answer is not None:
            with contextlib.suppress(OSError):
                head, end, body = fault.answer.partition(b"\r\n\r\n")
                asked_for_body = not client.recv(STEP_BYTES).startswith(b"HEAD ")
                client.sendall(head + end + (body if asked_for_body else b""))
                client.shutdown(socket.SHUT_WR)
                while client.recv(STEP_BYTES):  # else the answer would be lost with the connection
                    pass
            self._cut(client)
            return
        if fault is not None:
            time.sleep(fault.delay_s)
        try:
            server = socket.create_connection(self._server)
        except OSError:
            self._cut(client)
            return
        self._open.add(server)
        self._start(self._pass_on, client, server, fault.request_bytes if fault else None)
        self._start(self._pass_on, server, client, fault.answer_bytes if fault else None)

    def _pass_on(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(STEP_BYTES if limit is None else min(STEP_BYTES, limit - passed) or 1):
                sink.sendall(data)
                passed += len(data)
                if limit is not None and passed >= limit:
                    break
        self._cut(source, sink)

    def _cut(self, *sockets: socket.socket) -> None:
        for one in sockets:
            self._open.discard(one)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    try:
        yield made
    finally:
        made.close()
