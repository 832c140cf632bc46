"""The client for all calls over HTTP/1.1. It follows no redirects and uses no proxies.

Connections are those of httpcore, the part of httpx that speaks HTTP. httpx's own client is not used: with 64
concurrent requests it takes five times the processor time, mostly in its pool, which checks every connection for every
request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import SplitResult

import httpcore

from rftstream.http.address import hide, host_and_port, keep_alive_options, target_of

KEPT_OPEN_S = 3.0
"""Seconds that a connection may be idle and still be used again. Servers close idle connections after 5 s or more, so a
request hardly ever meets a connection that is just being closed."""

CONNECT_S = 10.0
"""Largest number of seconds for a server to accept a connection, regardless of the answer's time limit."""

KEEP_ALIVE = keep_alive_options(30, 15, 4)
"""A dead machine is noticed after about 90 s, regardless of the answer's time limit."""

MAX_ANSWER_BYTES = 256 << 20
"""Largest size of an answer in bytes: many times the size of the logprobs of the longest prompts."""

BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which another try may help."""

FAILED = (OSError, httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class RequestFailed(Exception):
    """A request has no complete answer. `timed_out`: whether the time was up. `was_sent`: whether a server accepted the
    connection."""

    def __init__(self, text: str, *, timed_out: bool = False, was_sent: bool = True) -> None:
        super().__init__(text)
        self.timed_out, self.was_sent = timed_out, was_sent


class AnswerTooLong(RequestFailed):
    """An answer is longer than the client accepts."""


class RequestCancelled(RequestFailed):
    """A request was cancelled before it was sent."""


class Answer(NamedTuple):
    """An answer of a server. `HttpClient` makes it."""

    status: int
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    body: bytes

    @property
    def retry_after_s(self) -> float:
        """Seconds that the server asks to be left alone. The server gives them as a number or as a date."""
        text = self.headers.get("retry-after", "").strip()
        if text.isdecimal():
            return float(text[:9])
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time())


class Call:
    """A running request. Its thread attaches the connection; any other thread may cancel it."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.num_retried = 0
        """Number of its tries that a busy server, or none, did not answer."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def attach(self, connection: socket.socket | None) -> None:
        """Record the request's connection, so that `cancel` can end it; None when the request is over."""
        with self._lock:
            self._socket = connection
            self._shut_if_cancelled()

    def cancel(self) -> None:
        """Cancel the request: its thread gives up, and the server sees the connection close."""
        self.cancelled.set()
        with self._lock:
            self._shut_if_cancelled()

    def _shut_if_cancelled(self) -> None:
        if self._socket is not None and self.cancelled.is_set():
            with contextlib.suppress(OSError):  # it has already ended
                self._socket.shutdown(socket.SHUT_RDWR)


def pause_s(number: int, first_s: float, *, most_s: float = 3600.0) -> float:
    """Return the seconds to wait before try `number`, counted from 0: `first_s` before the second try, doubled before
    each further one. The pause is randomised by half, so that requests that failed together do not return together."""
    return min(most_s, first_s * 2.0 ** min(number - 1, 20)) * random.uniform(0.5, 1.5)


class _Asker:
    """The common part of the clients for threads and for event loops: address, headers, and the text of a failure."""

    def __init__(self, address: SplitResult, *, key: str = "", max_bytes: int) -> None:
        """`key`: sent as the bearer token, only to this server, and hidden in errors."""
        self._address, self._key, self._max_bytes = address, key, max_bytes
        self._url = httpcore.URL(
            scheme=address.scheme.encode(), host=str(address.hostname).encode("idna"), port=address.port, target=b"/"
        )
        headers = {"Host": address.netloc.rpartition("@")[2], "Accept-Encoding": "identity"}
        self._headers = headers | ({"Authorization": f"Bearer {key}"} if key else {})

    def hidden(self, text: str, *others: str) -> str:
        """Return the text without the client's key, and without others."""
        return hide(text, self._key, *others)

    def _connection_settings(self) -> dict[str, Any]:
        tls = _tls() if self._address.scheme == "https" else None
        kept = {"keepalive_expiry": KEPT_OPEN_S, "socket_options": KEEP_ALIVE}
        return {"origin": self._url.origin, "ssl_context": tls, **kept}

    def _request(
        self,
        method: str,
        resource: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
        trace: Any = None,
    ) -> httpcore.Request:
        """Return a request. A request with a body, which may be empty, is declared as JSON unless `headers` say
        otherwise."""
        sent = dict(self._headers)
        if content is not None:
            sent |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        target = target_of(self._address, resource)
        connect_s = CONNECT_S if timeout_s is None else min(timeout_s, CONNECT_S)
        extensions: dict[str, Any] = {"timeout": {"connect": connect_s, "write": timeout_s, "read": timeout_s}}
        return httpcore.Request(
            method.encode(),
            httpcore.URL(scheme=self._url.scheme, host=self._url.host, port=self._url.port, target=target.encode()),
            headers=[(name.encode(), value.encode()) for name, value in (sent | dict(headers)).items()],
            content=content,
            extensions=extensions if trace is None else extensions | {"trace": trace},
        )

    def _failure(self, error: Exception) -> RequestFailed:
        is_connecting = isinstance(error, (httpcore.ConnectError, httpcore.ConnectTimeout))
        timed_out = isinstance(error, (TimeoutError, httpcore.TimeoutException))
        text = "TimeoutError: timed out" if timed_out else self.hidden(_reason(error))
        return RequestFailed(text, timed_out=timed_out, was_sent=not is_connecting)

    def _too_long(self) -> AnswerTooLong:
        return AnswerTooLong(f"the server's answer is longer than {self._max_bytes:,} bytes")


class HttpClient(_Asker):
    """A client of one server. Many threads may use it at once. Connections stay open for the next requests until
    `close`."""

    def __init__(self, address: SplitResult, *, key: str = "", max_bytes: int | None = None) -> None:
        """`address`: from `split_url`; resources are below it."""
        super().__init__(address, key=key, max_bytes=MAX_ANSWER_BYTES if max_bytes is None else max_bytes)
        self._idle: deque[_Connection] = deque()
        self._close_idle = weakref.finalize(self, _close_all, self._idle)

    def ask(
        self,
        method: str,
        resource: str,
        content: bytes | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        call: Call | None = None,
    ) -> Answer:
        """Send a request once, and return its answer, whatever its status. Raises RequestFailed. `timeout_s` covers the
        whole answer."""
        call = call or Call()
        connection = self._take()
        request = self._request(method, resource, content, headers or {}, timeout_s, connection.trace_for(call))
        try:
            call.attach(connection.socket)
            if call.cancelled.is_set():
                raise RequestCancelled("cancelled")
            answer = self._answer(connection, request, timeout_s)
        except FAILED as error:
            connection.http.close()
            raise self._failure(error) from None
        except BaseException:
            connection.http.close()
            raise
        finally:
            call.attach(None)
        if self._close_idle.alive and not connection.http.is_closed():
            self._idle.append(connection)
        else:
            connection.http.close()
        return answer

    def connect(self) -> socket.socket:
        """Return a new connection that no request has used."""
        connection = socket.create_connection(host_and_port(self._address), timeout=CONNECT_S)
        if self._address.scheme == "http":
            return connection
        try:
            return _tls().wrap_socket(connection, server_hostname=self._address.hostname)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connections that are idle. Those in use are closed when their requests end."""
        self._close_idle()

    def _answer(self, connection: _Connection, request: httpcore.Request, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(connection.http.handle_request(request)) as response:
            parts, num_bytes = [], 0
            for part in response.iter_stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > self._max_bytes:
                    raise self._too_long()
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
            return Answer(response.status, _named(response.headers), b"".join(parts))

    def _take(self) -> _Connection:
        """Return an open idle connection, the most recently used one, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if not connection.has_expired:
                    return connection
                connection.http.close()
        return _Connection(httpcore.HTTPConnection(**self._connection_settings()))


class _Connection:
    """A connection that its first request opens and that is kept for later ones. It serves one request at a time. After
    an error it must be closed."""

    def __init__(self, http: httpcore.HTTPConnection) -> None:
        self.http = http
        self.socket: socket.socket | None = None
        """The connection's socket; None before it is opened."""

    @property
    def has_expired(self) -> bool:
        """Whether the connection has been idle for too long, or the server has closed it."""
        return self.http.is_closed() or self.http.has_expired()

    def trace_for(self, call: Call) -> Any:
        """Return the trace function with which httpcore reports that it has opened the connection."""

        def note_socket(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                self.socket = info["return_value"].get_extra_info("socket")
                call.attach(self.socket)

        return note_socket


class LoopClient(_Asker):
    """The same for an event loop: its requests are coroutines of one loop, and cancelling one closes its connection.
    One connection is kept for the next request; further concurrent requests open their own."""

    def __init__(self, address: SplitResult, *, key: str = "", max_bytes: int) -> None:
        super().__init__(address, key=key, max_bytes=max_bytes)
        self._idle: httpcore.AsyncHTTPConnection | None = None

    async def ask(
        self,
        method: str,
        resource: str,
        content: bytes | None = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        is_last: bool = False,
    ) -> Answer:
        """Send a request once, and return its answer, whatever its status. Raises RequestFailed. Without `timeout_s`
        there is no time limit. `is_last`: the connection is not kept."""
        connection, self._idle = self._idle, None
        if connection is None or connection.is_closed() or connection.has_expired():
            await _close(connection)
            connection = httpcore.AsyncHTTPConnection(**self._connection_settings())
        request = self._request(method, resource, content, headers or {}, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                response = await connection.handle_async_request(request)
                parts, num_bytes = [], 0
                async for part in response.aiter_stream():
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > self._max_bytes:
                        raise self._too_long()
                await response.aclose()
        except FAILED as error:
            await _close(connection)
            raise self._failure(error) from None
        except BaseException:
            await _close(connection)
            raise
        if is_last or self._idle is not None:
            await _close(connection)
        else:
            self._idle = connection
        return Answer(response.status, _named(response.headers), b"".join(parts))

    async def close(self) -> None:
        """Close the connection that is kept."""
        connection, self._idle = self._idle, None
        await _close(connection)


async def _close(connection: httpcore.AsyncHTTPConnection | None) -> None:
    if connection is not None:
        await connection.aclose()


def _close_all(connections: deque[_Connection]) -> None:
    while connections:
        connections.pop().http.close()


def _named(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error: the system's message, or else the client's."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that checks certificates. It is shared, since a separate one for each connection would
    load all authorities again."""
    return ssl.create_default_context()
