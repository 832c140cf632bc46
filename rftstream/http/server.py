"""HTTP/1.1 for a server in one event loop. httptools parses the requests. This module knows nothing about the
content."""

from __future__ import annotations

import asyncio
import functools
import http
import json
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from rftstream.http.outgoing import Outgoing

log = logging.getLogger(__name__)

MAX_REFUSED_BYTES = 64 << 20
"""Bytes of a too large body that are read and dropped, so that the client can read the answer; then the connection is
closed."""

MAX_HEAD_BYTES = 65_536
"""Largest size, in bytes, of request line and headers together, if they come in more than one read."""

IDLE_S = 120.0
"""Seconds after which a connection is closed if no request comes, a request stays incomplete, or an answer is not
taken."""

JSON_TYPE = "application/json"

MAX_WAITING = 1024
"""Largest number of connections that wait to be accepted."""

WhenDelivered = Callable[[], object] | None
"""Called when the client has taken an answer; None if nobody needs to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    """Headers by name in lower case; of a repeated name, the last one."""
    body: bytes
    is_too_large: bool = False
    """Whether the body was larger than the limit; it is then empty."""
    is_chunkable: bool = True
    """Whether the client understands a chunked answer."""
    keeps_alive: bool = True
    """Whether another request may follow on the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer with its whole body."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpConnection(Outgoing):
    """One client's connection. The event loop makes it and feeds it. For one request after the other it calls `handle`
    with itself; the handler calls `send`, or `begin_events`, `send_events` and `end_events`.

    A handler may return an awaitable. The request is done when it ends, and its result is called when the answer is
    delivered. Otherwise the handler returns None, and calls `finish` when the answer is sent, at once or later. Most
    requests take this way, which needs no task.

    `is_lost` says whether the client has gone away, and `when_lost` is called then."""

    def __init__(
        self,
        handle: Handler,
        *,
        max_body_bytes: int,
        connections: set[HttpConnection],
        max_connections: int,
        name: str = "server",
        refuses: Callable[[HttpRequest], bool] | None = None,
    ) -> None:
        """`name`: the server's name in errors. `refuses`: gets each request without its body. If it refuses, the body
        is not read, the handler gets the request without it, and the connection ends with the answer."""
        super().__init__()
        self._handle, self._name = handle, name
        self._connections, self._max_connections = connections, max_connections
        self.parser = httptools.HttpRequestParser(_Incoming(self, max_body_bytes, refuses))
        """The parser. Its callbacks ask it about the request that it has read."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[HttpRequest] = deque()
        """Complete requests that came while another is being handled."""
        self._request: HttpRequest | None = None
        """The current request, or the last one."""
        self._has_begun = self._has_ended = False
        """Whether the answer to the request has begun, and whether it has ended."""
        self._is_broken = False
        """Whether the last data was no valid request. Earlier requests are answered."""
        self._num_head_bytes = 0
        """Bytes of an incomplete head, or of the text between the chunks of a body and after them."""
        self._is_busy = False
        """Whether a request is being handled."""
        self._task: asyncio.Task[None] | None = None
        """The task of the current request, if it runs in a coroutine."""
        self._timer: asyncio.TimerHandle | None = None
        self._closes_at = math.inf
        """Time, by the event loop's clock, at which the connection is closed if nothing comes."""
        self.when_lost: Callable[[], object] | None = None

    # ------------------------------------------------------------------------------------------ the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start listening to a client. A connection above the limit is closed."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= self._max_connections:
            transport.abort()
            return
        self._connections.add(self)
        transport.set_write_buffer_limits(high=0)
        self._drained.set()
        self._closes_at = self._loop.time() + IDLE_S
        self._close_if_idle()

    def connection_lost(self, error: Exception | None) -> None:
        """Record that the client is gone. The current request is still completed."""
        self._connections.discard(self)
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._drained.set()
        if self.when_lost is not None:
            self.when_lost()

    def data_received(self, data: bytes) -> None:
        """Read the client's data."""
        if self._is_broken:
            return
        waits = self._is_busy or bool(self._waiting)
        self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the connection stays with HTTP/1.1, and is closed after the request
        except httptools.HttpParserError:
            self.refuse(http.HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.refuse(
                http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the headers have more than {MAX_HEAD_BYTES} bytes, expected at most that",
            )
        elif not waits:
            self._closes_at = self._loop.time() + IDLE_S
            self._begin()
        elif self._transport is not None:
            self._transport.pause_reading()  # the client does not wait for its answer; one request at a time is enough

    def eof_received(self) -> bool:
        """Close the connection: a client that sends no more does not wait for an answer, either."""
        return False

    # ------------------------------------------------------------------------------------------ the parser's side

    def part_received(self) -> None:
        """Record that the head of a request is complete, or that a piece of its body has come."""
        self._num_head_bytes = 0

    def go_on(self) -> None:
        """Tell a client that waits for `100 Continue` to send its body."""
        if not self._is_busy and not self._waiting:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def request_received(self, request: HttpRequest, *, is_last: bool = False) -> None:
        """Accept a complete request. `is_last`: the data after it cannot be parsed any more."""
        self._num_head_bytes = 0
        self._waiting.append(request)
        self._is_broken |= is_last

    # ------------------------------------------------------------------------------------------ the server's side

    def send(self, answer: HttpAnswer) -> None:
        """Send an answer with its whole body."""
        self._has_begun = True
        head = _head(
            self._request, answer.status, answer.content_type, answer.headers, f"content-length: {len(answer.body)}"
        )
        is_bodiless = self._request is not None and self._request.method == "HEAD"
        self._has_ended = True
        self._write(head if is_bodiless else head + answer.body)

    def begin_events(self) -> None:
        """Begin an answer of server-sent events."""
        is_chunked = self._request is not None and self._request.is_chunkable
        how = "transfer-encoding: chunked" if is_chunked else "connection: close"
        self._has_begun = True
        self._write(_head(self._request, 200, "text/event-stream; charset=utf-8", {"cache-control": "no-store"}, how))

    def send_events(self, data: bytes) -> None:
        """Send events, or a part of one."""
        is_chunked = self._request is not None and self._request.is_chunkable
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def end_events(self) -> None:
        """End an answer of events."""
        self._has_ended = True
        if self._request is not None and self._request.is_chunkable:
            self._write(b"0\r\n\r\n")

    def finish(self, when_delivered: WhenDelivered = None) -> None:
        """Continue with the next request after the client has taken the answer to this one. `when_delivered` is called
        then, unless the client went away first."""
        if self._drained.is_set():
            self._finished(when_delivered)
        else:  # a client that takes no answers gets no more
            self._closes_at = self._loop.time() + IDLE_S
            self._task = self._loop.create_task(self._finish_when_taken(when_delivered))

    def fail(self) -> None:
        """Log the current exception, and continue with the next request. The client gets an error unless its answer has
        begun."""
        log.exception("%s: %s failed", self._name, "a request" if self._request is None else self._request.path)
        if not self._has_begun:
            self.send(HttpAnswer(status=500, body=_error(f"the {self._name} failed; see its log")))
        self.finish()

    # ------------------------------------------------------------------------------------------ one request

    def _begin(self) -> None:
        """Begin the next request, if a complete one is here and none is being handled."""
        if not self._waiting or self._is_busy or self.is_lost:
            return
        self._closes_at = math.inf
        self._request = request = self._waiting.popleft()
        self._has_begun = self._has_ended = False
        self._is_busy = True
        try:
            work = self._handle(request, self)
        except Exception:
            self.fail()
            return
        if work is not None:
            self._task = self._loop.create_task(self._do(work))

    async def _do(self, work: Awaitable[WhenDelivered]) -> None:
        try:
            when_delivered = await work
        except Exception:
            self.fail()
        else:
            self.finish(when_delivered)

    async def _finish_when_taken(self, when_delivered: WhenDelivered) -> None:
        await self.is_delivered()
        self._finished(when_delivered)

    def _finished(self, when_delivered: WhenDelivered) -> None:
        self._is_busy, self._task, self.when_lost = False, None, None
        if when_delivered is not None and self.has_taken_all():
            when_delivered()
        keeps_alive = self._request is not None and self._request.keeps_alive
        goes_on = keeps_alive and (not self._is_broken or self._waiting)
        if not self.is_lost and self._has_ended and goes_on:
            assert self._transport is not None
            self._closes_at = self._loop.time() + IDLE_S
            if self._waiting:  # other connections take their turn first
                self._loop.call_soon(self._begin)
            else:  # otherwise each answer would let in more than one request
                self._transport.resume_reading()
        else:
            self.close()

    def refuse(self, status: http.HTTPStatus, sentence: str) -> None:
        """Close a connection whose data cannot be parsed any more, after earlier requests are answered."""
        self._is_broken = True
        if not self._is_busy and not self._waiting:
            self._request = None
            self.send(HttpAnswer(status=status, body=_error(sentence)))
            self.close()
        elif not self._is_busy:
            self._begin()

    # ------------------------------------------------------------------------------------------ writing

    def _close_if_idle(self) -> None:
        """Close the connection if it is time. A timer checks that now and then, since moving a timer for each request
        is expensive."""
        left_s = self._closes_at - self._loop.time()
        if left_s <= 0 and self._transport is not None and not self._drained.is_set():
            self._transport.abort()  # it would wait until all sent data is taken
        elif left_s <= 0:
            self.close()
        else:
            self._timer = self._loop.call_later(min(left_s, IDLE_S), self._close_if_idle)


Handler = Callable[[HttpRequest, HttpConnection], Awaitable[WhenDelivered] | None]


class HttpListener:
    """Listens, in the running event loop, until `close`."""

    def __init__(self, handle: Handler, **settings: Any) -> None:
        """`settings`: those of each `HttpConnection`."""
        self._handle, self._settings = handle, settings
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Start listening, and return the port. OSError if the address is not available."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, host, port, backlog=MAX_WAITING)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)  # ready answers leave before their connections are closed
        for connection in list(self._connections):
            connection.close()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._handle, connections=self._connections, **self._settings)


class _Incoming:
    """Assembles requests from the parser's callbacks. A connection makes it for its parser, which calls it."""

    def __init__(
        self, connection: HttpConnection, max_body_bytes: int, refuses: Callable[[HttpRequest], bool] | None
    ) -> None:
        self._connection, self._max_body_bytes, self._refuses = connection, max_body_bytes, refuses
        self._is_refused = False
        """Whether the request is already answered, and no more data is accepted."""
        self._clear()

    def _clear(self) -> None:
        self._url = b""
        self._num_hosts = 0
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._has_head = False

    def on_message_begin(self) -> None:
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # text after the body says nothing about the request
            lower = name.decode("latin-1").lower()
            self._num_hosts += lower == "host"
            self._headers[lower] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._connection.part_received()
        is_new = self._connection.parser.get_http_version() == "1.1"
        if self._num_hosts > 1 or (is_new and not self._num_hosts):
            self._is_refused = True
            self._connection.refuse(http.HTTPStatus.BAD_REQUEST, f"got {self._num_hosts} Host headers, expected one")
            return
        waits = self._headers.get("expect", "").lower() == "100-continue"
        if not waits and self._refuses is None:
            return
        length = self._headers.get("content-length", "")
        is_too_large = length.isdecimal() and int(length) > self._max_body_bytes
        request = self._request(is_too_large=is_too_large, keeps_alive=False)
        if (waits and is_too_large) or (self._refuses is not None and self._refuses(request)):
            self._is_refused = True
            self._connection.request_received(request, is_last=True)
        elif waits:
            self._connection.go_on()

    def on_body(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._connection.part_received()
        self._num_bytes += len(data)
        if self._num_bytes <= self._max_body_bytes:
            self._body.append(data)
        elif self._num_bytes <= MAX_REFUSED_BYTES:
            self._body.clear()
        else:
            self._connection.close()

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        parser = self._connection.parser
        request = self._request(
            is_too_large=self._num_bytes > self._max_body_bytes,
            keeps_alive=parser.should_keep_alive() and not parser.should_upgrade(),
        )
        self._clear()
        self._connection.request_received(request)

    def _request(self, *, is_too_large: bool, keeps_alive: bool) -> HttpRequest:
        parser = self._connection.parser
        is_new = parser.get_http_version() == "1.1"
        return HttpRequest(
            method=parser.get_method().decode("ascii"),
            path=_path_of(self._url.decode("ascii", "replace")),
            headers=self._headers,
            body=b"".join(self._body),
            is_too_large=is_too_large,
            is_chunkable=is_new,
            keeps_alive=is_new and keeps_alive,
        )


def _path_of(target: str) -> str:
    """Return the path in a request's target, which may be a whole URL, as proxies get it."""
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]


def _head(request: HttpRequest | None, status: int, content_type: str, others: Mapping[str, str], length: str) -> bytes:
    lines = [_status_line(status), f"content-type: {content_type}", length]
    lines += [f"{name}: {value}" for name, value in others.items()]
    if (request is None or not request.keeps_alive) and length != "connection: close":
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


@functools.cache
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"


def _error(sentence: str) -> bytes:
    return json.dumps({"error": {"message": sentence}}).encode()
