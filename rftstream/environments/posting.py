"""One POST over HTTP/1.1, in an event loop, that may wait for its answer for hours."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult

import h11

CONNECT_S = 20.0
"""Seconds that a connection may take."""
KEPT_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Options of the connection, by which a machine that is gone is noticed after some 90 s."""


class NotSent(Exception):
    """Nobody was there to take the request."""


class AnswerLost(Exception):
    """The request was sent, and its connection ended without an answer that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response to a POST. `post` makes it."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes


async def post(address: SplitResult, headers: Mapping[str, str], body: bytes, *, max_bytes: int) -> Answer:
    """Send a request, and wait for its answer without a limit. NotSent if there is no connection, AnswerLost if it
    ends too early, or brings more than `max_bytes` or something that is no HTTP. Cancelling this ends the connection.
    """
    is_https = address.scheme == "https"
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                address.hostname, address.port or (443 if is_https else 80), ssl=_tls() if is_https else None
            )
    except (OSError, TimeoutError) as error:
        raise NotSent(f"{type(error).__name__}: {error}" if str(error) else "no connection in time") from None
    try:
        _keep_alive(writer.get_extra_info("socket"))
        return await _exchange(reader, writer, address, {"host": address.netloc, **headers}, body, max_bytes)
    except (OSError, h11.RemoteProtocolError) as error:
        raise AnswerLost(f"{type(error).__name__}: {error}") from None
    finally:
        writer.close()


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    address: SplitResult,
    headers: Mapping[str, str],
    body: bytes,
    max_bytes: int,
) -> Answer:
    http = h11.Connection(h11.CLIENT)
    target = f"{address.path or '/'}{'?' if address.query else ''}{address.query}"
    fields = [*headers.items(), ("content-length", str(len(body))), ("connection", "close")]
    head = http.send(h11.Request(method="POST", target=target, headers=fields))
    writer.write(
        b"".join(part or b"" for part in (head, http.send(h11.Data(data=body)), http.send(h11.EndOfMessage())))
    )
    await writer.drain()
    found: h11.Response | None = None
    parts: list[bytes] = []
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            found = event
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            if sum(map(len, parts)) > max_bytes:
                raise AnswerLost(f"got more than {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage) and found is not None:
            named = {name.decode("latin-1"): value.decode("latin-1") for name, value in found.headers}
            return Answer(status=found.status_code, headers=named, body=b"".join(parts))
        elif isinstance(event, h11.ConnectionClosed):
            raise AnswerLost("the connection was closed without an answer")


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEPT_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
