"""HTTP/1.1 for a server in one event loop, over h11. It knows nothing of what is served."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import h11

log = logging.getLogger(__name__)

MAX_REFUSED_BYTES = 64 << 20
"""How much of a body that is too large is read and forgotten, so that the client reads the answer; then the connection
is cut."""

IDLE_S = 120.0
"""Seconds after which a connection is closed on which no request comes, or the rest of one."""

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """By name in lower case; of a name that comes twice, the last."""
    body: bytes
    is_too_large: bool = False
    """Whether the body was larger than the limit; it is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer with its whole body."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpConnection(asyncio.Protocol):
    """One client's connection. The event loop makes it and feeds it. For each request, one after the other, it calls
    `handle` with itself; that calls `send`, or `begin_events`, `send_events` and `end_events`.

    `is_lost` says whether the client has gone away, and `when_lost` is called then."""

    def __init__(
        self,
        handle: Callable[[HttpRequest, HttpConnection], Awaitable[None]],
        *,
        max_body_bytes: int,
        connections: set[HttpConnection],
        max_connections: int,
    ) -> None:
        self._handle, self._max_body_bytes = handle, max_body_bytes
        self._connections, self._max_connections = connections, max_connections
        self._http = h11.Connection(h11.SERVER)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closes_at = math.inf
        """When the connection is closed if nothing comes, by the event loop's clock."""
        self._drained = asyncio.Event()
        self.is_lost = False
        self.when_lost: Callable[[], object] | None = None

    # ------------------------------------------------------------------------------------------ the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to listen to a client; one too many is cut off."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= self._max_connections:
            transport.abort()
            return
        self._connections.add(self)
        transport.set_write_buffer_limits(high=0)
        self._drained.set()
        self._expect_more()
        self._close_if_idle()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the client is gone. A request that is being done is done all the same."""
        self._connections.discard(self)
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._drained.set()
        if self.when_lost is not None:
            self.when_lost()

    def pause_writing(self) -> None:
        """Note that the client has not taken all that was sent."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Note that the client has taken all that was sent."""
        self._drained.set()

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        self._http.receive_data(data)
        if self._task is None:
            self._expect_more()
            self._read()
        elif self._transport is not None:
            self._transport.pause_reading()  # it does not wait for its answer; one request at a time is enough

    def eof_received(self) -> bool:
        """Close the connection: a client that sends no more waits for nothing, either."""
        return False

    # ------------------------------------------------------------------------------------------ the server's side

    def send(self, answer: HttpAnswer) -> None:
        """Send an answer with its whole body."""
        self._send_head(answer.status, answer.content_type, answer.headers, length=len(answer.body))
        self._write(h11.Data(data=answer.body))
        self._write(h11.EndOfMessage())

    def begin_events(self) -> None:
        """Begin an answer of server-sent events."""
        self._send_head(200, "text/event-stream; charset=utf-8", {"cache-control": "no-store"}, length=None)

    def send_events(self, data: bytes) -> None:
        """Send events, or a part of one."""
        self._write(h11.Data(data=data))

    def end_events(self) -> None:
        """End an answer of events."""
        self._write(h11.EndOfMessage())

    async def is_delivered(self) -> bool:
        """Wait until the client's side has taken all that was sent; return False if it went away before."""
        await self._drained.wait()
        return not self.is_lost

    def close(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------------------ reading

    def _read(self) -> None:
        """Take the next events of the protocol until a request is whole, or more bytes are needed."""
        while self._task is None and not self.is_lost:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse_protocol(error)
                return
            match event:
                case h11.Request():
                    self._head, self._body, self._num_bytes = event, [], 0
                    if self._http.they_are_waiting_for_100_continue:
                        self._write(h11.InformationalResponse(status_code=100, headers=[]))
                case h11.Data():
                    self._num_bytes += len(event.data)
                    if self._num_bytes > MAX_REFUSED_BYTES:
                        self.close()
                        return
                    if self._num_bytes <= self._max_body_bytes:
                        self._body.append(bytes(event.data))
                    else:
                        self._body.clear()
                case h11.EndOfMessage():
                    self._begin()
                case h11.ConnectionClosed():
                    self.close()
                    return
                case _:  # NEED_DATA, PAUSED
                    return

    def _begin(self) -> None:
        assert self._head is not None
        self._closes_at = math.inf
        request = HttpRequest(
            method=self._head.method.decode(),
            path=self._head.target.decode("ascii", "replace").partition("?")[0],
            headers={name.decode(): value.decode("latin-1") for name, value in self._head.headers},
            body=b"".join(self._body),
            is_too_large=self._num_bytes > self._max_body_bytes,
        )
        self._body = []
        self._task = self._loop.create_task(self._do(request))

    async def _do(self, request: HttpRequest) -> None:
        try:
            await self._handle(request, self)
        except Exception:
            log.exception("gateway: %s %s failed", request.method, request.path)
            if self._http.our_state is h11.SEND_RESPONSE:
                self.send(HttpAnswer(status=500, body=b'{"error":{"message":"the gateway failed; see its log"}}'))
        finally:
            self._task, self.when_lost = None, None
        if not self.is_lost and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            assert self._transport is not None
            self._http.start_next_cycle()
            self._transport.resume_reading()
            self._expect_more()
            self._read()
        else:
            self.close()

    def _refuse_protocol(self, error: h11.RemoteProtocolError) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = b'{"error":{"message":"this is no HTTP/1.1 request"}}'
            self.send(HttpAnswer(status=error.error_status_hint, body=body, headers={"connection": "close"}))
        self.close()

    # ------------------------------------------------------------------------------------------ writing

    def _send_head(self, status: int, content_type: str, others: Mapping[str, str], *, length: int | None) -> None:
        headers = [("content-type", content_type), *others.items()]
        headers.append(("transfer-encoding", "chunked") if length is None else ("content-length", str(length)))
        self._write(h11.Response(status_code=status, headers=headers))

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _expect_more(self) -> None:
        """Close the connection if nothing comes for so long from now."""
        self._closes_at = self._loop.time() + IDLE_S

    def _close_if_idle(self) -> None:
        """Close the connection if it is time. A timer looks at that now and then, since moving a timer at each request
        is dear."""
        left_s = self._closes_at - self._loop.time()
        if left_s <= 0:
            self.close()
        else:
            self._timer = self._loop.call_later(min(left_s, IDLE_S), self._close_if_idle)
