"""A broker that is too old: it answers which requests it knows, and knows nothing new."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

API_VERSIONS, METADATA = 18, 3
OLD = {0: (0, 2), 1: (0, 3), 2: (0, 1), METADATA: (0, 2), API_VERSIONS: (0, 0)}
"""Request -> versions of it, as Kafka 0.10.1 has them: no transactions."""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while head := self._receive(4):
            body = self._receive(struct.unpack(">i", head)[0])
            api, version, correlation = struct.unpack(">hhi", body[:8])
            if api == API_VERSIONS:
                error = 0 if version == 0 else 35
                listed = b"".join(struct.pack(">hhh", key, *versions) for key, versions in sorted(OLD.items()))
                answer = struct.pack(">hi", error, len(OLD)) + listed
            elif api == METADATA:
                host, port = self.server.server_address[:2]  # type: ignore[misc]
                name = str(host).encode()
                broker = struct.pack(">ih", 1, len(name)) + name + struct.pack(">ih", port, -1)
                answer = struct.pack(">i", 1) + broker
                answer += (struct.pack(">h", -1) if version >= 2 else b"") + struct.pack(">ii", 1, 0)
            else:
                return
            self.request.sendall(struct.pack(">ii", len(answer) + 4, correlation) + answer)

    def _receive(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self.request.recv(count - len(found))
            if not part:
                return b""
            found += part
        return found


@contextmanager
def old_broker() -> Iterator[str]:
    """Its address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
