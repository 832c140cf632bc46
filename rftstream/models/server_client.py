"""A client of a served model, for any server with OpenAI's HTTP API. Keys are sent to that server alone.

Connections are those of httpcore, the part of httpx that speaks HTTP. The client of httpx is not used. With 64
requests on their way it takes five times the processor time, most of it in its pool, which looks at every connection
for every request."""

from __future__ import annotations

import contextlib
import email.utils
import json
import random
import re
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpcore

from rftstream.config import secrets
from rftstream.errors import ConfigError

PAUSE_S = 0.5
"""Seconds before the second try, give or take a half; twice as long before each further try."""

KEPT_OPEN_S = 3.0
"""Seconds that a connection may be idle before it is used again. Servers close theirs after 5 s and more, so a request
hardly ever meets a connection that is just being closed."""

CONNECT_S = 10.0
"""Most seconds that a server may take to accept a connection, however long its answers may take."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After how many seconds the system asks whether a watched host is there, how often, and how many times in vain."""

BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which another try may help."""

MISTAKEN = frozenset({401, 403, 404})
"""HTTP statuses that every request would get."""

AWAY = frozenset({429, 502, 503, 504})
"""Those of BUSY that say nothing about the request: the server is full, or a proxy finds none."""

GONE = frozenset({502, 504})
"""Those of AWAY by which a proxy says that it lost the server."""

FAILED = (OSError, httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)
"""Exceptions of a request that met no server, lost it, or had no answer in time."""

MAX_ANSWER_BYTES = 256 << 20
"""Largest size of an answer in bytes: many times that of the logprobs of the longest prompts."""


class RetryableError(Exception):
    """A request failed, and another try may help: no server was there, or it had no time. `timed_out` says whether
    the answer did not come in time. `after_s` is how many seconds the server wants to be left alone. `is_away` says
    whether it would have failed at any request, and `is_lost` whether the server may have ended."""

    def __init__(
        self, text: str, *, timed_out: bool = False, after_s: float = 0.0, is_away: bool = False, is_lost: bool = False
    ) -> None:
        super().__init__(text)
        self.timed_out, self.after_s, self.is_away, self.is_lost = timed_out, after_s, is_away, is_lost


class Refused(Exception):
    """A request cannot be answered; other requests can."""


class Unreachable(Exception):
    """No request can be answered now. `timed_out` says whether the last try had no answer in time."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Call:
    """A request on its way. The thread that asks attaches the connection that it uses; any other thread may cancel."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def attach(self, connection: socket.socket | None) -> None:
        """Note the connection that the request goes over, so that `cancel` can end it; None when it is over."""
        with self._lock:
            self._socket = connection
            self._shut_if_cancelled()

    def cancel(self) -> None:
        """Cancel the request: its thread gives up, and the server sees that nobody listens any more."""
        self.cancelled.set()
        with self._lock:
            self._shut_if_cancelled()

    def _shut_if_cancelled(self) -> None:
        if self._socket is not None and self.cancelled.is_set():
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)


class ModelServer:
    """A client of one resource of a model server. Many threads may use it at once; each `ask` is a request with its
    tries. Connections stay open for the next requests until `close`."""

    def __init__(
        self, url: str, resource: str, *, api_key: str | None, timeout_s: float, tries: int, section: str
    ) -> None:
        """`url` is where the API begins, and `resource` the part of it that is asked, e.g. `completions`. `section` of
        the run file is named in errors.

        ConfigError for a url that is none, or a key that no header can hold."""
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):  # the client would say so with the key in it
            raise ConfigError(
                f"{section}.api_key: found a space, a line break or another sign that no header can hold (it is not "
                "shown here), expected the key alone; set the environment variable without it"
            )
        parts = split_url(url, section)
        path = f"{parts.path.rstrip('/')}/{resource}"
        self.where = f"{parts.scheme}://{parts.netloc}{path}"
        self._address = _Address(parts, path)
        headers = {"Host": parts.netloc, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._api_key, self._timeout_s, self._tries, self._section = api_key, timeout_s, tries, section
        self._random = random.Random()
        self._idle: deque[_Connection] = deque()
        self._close_idle = weakref.finalize(self, _close_all, self._idle)

    def ask(self, body: dict[str, Any], call: Call | None = None) -> dict[str, Any]:
        """Return the answer to a POST. Raises Refused, or Unreachable after all tries."""
        call = call or Call()
        last = RetryableError("")
        for number in range(self._tries):
            if number and self.pause(number, call, at_least_s=last.after_s):
                break
            try:
                return self.ask_once(body, call)
            except RetryableError as error:
                last = error
        raise Unreachable(
            f"{self.where}: {last}, after {self._tries} tries; is the server up?", timed_out=last.timed_out
        )

    def ask_once(self, body: dict[str, Any], call: Call) -> dict[str, Any]:
        """Return the answer without a second try. Raises RetryableError where another try may help."""
        try:
            answer = self._post(json.dumps(body).encode(), call)
        except FAILED as error:
            timed_out = isinstance(error, (TimeoutError, httpcore.TimeoutException))
            is_away = not timed_out or isinstance(error, httpcore.ConnectTimeout)
            text = self._hidden(_reason(error))
            raise RetryableError(text, timed_out=timed_out, is_away=is_away, is_lost=True) from None
        if answer.status == 200:
            return _object(answer.body)
        text = _object(answer.body).get("error", answer.body[:300].decode(errors="replace"))
        said = self._hidden(f"{answer.status}: {text.get('message', text) if isinstance(text, dict) else text}")
        if answer.status in MISTAKEN:
            raise Unreachable(f"{self.where}: {said}; mend url, model or api_key in [{self._section}]")
        if answer.status in BUSY:
            status, after_s = answer.status, answer.retry_after_s
            raise RetryableError(said, after_s=after_s, is_away=status in AWAY, is_lost=status in GONE)
        raise Refused(f"the server answered {said}")

    def pause(self, number: int, call: Call, *, at_least_s: float = 0.0) -> bool:
        """Wait before try `number`, counted from 0; return whether the request was cancelled meanwhile. Requests that
        failed together come back apart. `at_least_s` is what the server asks for; it counts up to the time limit of an
        answer."""
        pause_s = PAUSE_S * 2 ** (number - 1) * self._random.uniform(0.5, 1.5)
        return call.cancelled.wait(max(pause_s, min(at_least_s, self._timeout_s)))

    def watch(self) -> ServerWatch | None:
        """Return a watch over the server; None if it is not there."""
        with contextlib.suppress(OSError):
            return ServerWatch(self._address.connect())
        return None

    def close(self) -> None:
        """Close the connections that are idle. Those in use are closed when their requests end."""
        self._close_idle()

    def _hidden(self, text: str) -> str:
        """Return the text without the key: servers repeat keys that they refuse."""
        return secrets.hidden(text if not self._api_key else text.replace(self._api_key, "***"))

    def _post(self, content: bytes, call: Call) -> _Answer:
        connection = self._take()
        try:
            call.attach(connection.socket)
            if call.cancelled.is_set():
                raise Refused("aborted")
            answer = connection.post(self._headers, content, self._timeout_s, call)
        except BaseException:
            connection.close()
            raise
        finally:
            call.attach(None)
        if self._close_idle.alive:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _take(self) -> _Connection:
        """Return a connection that is open and idle, the one used last, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if not connection.has_expired:
                    return connection
                connection.close()
        return _Connection(self._address)


class _Address:
    """Where the connections of a ModelServer go."""

    def __init__(self, parts: SplitResult, path: str) -> None:
        host = (parts.hostname or "").encode("idna")
        self.url = httpcore.URL(scheme=parts.scheme.encode(), host=host, port=parts.port, target=path.encode("ascii"))
        # One for all connections: each of its own would load the certificates of all authorities again.
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_port = address_of(parts)

    def connect(self) -> socket.socket:
        """Return a new connection that no request has used."""
        connection = socket.create_connection(self._host_port, timeout=CONNECT_S)
        if self.tls is None:
            return connection
        try:
            return self.tls.wrap_socket(connection, server_hostname=self._host_port[0])
        except BaseException:
            connection.close()
            raise


class ServerWatch:
    """An idle connection, by which a caller sees that the server still runs. While the connection is open the server
    has not ended, so it still has the version that it was given. `ModelServer.watch` makes it; its caller closes it.

    A server may close idle connections for reasons of its own, but vLLM and SGLang close only connections that were
    used. Behind a proxy the connection shows only that the proxy runs."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():  # a host that is gone, and one that is back, says nothing by itself
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection

    @property
    def is_open(self) -> bool:
        """Whether the server has been there all the time."""
        try:
            self._socket.recv(1)  # the end, or what a server says before it ends a connection that is of no use
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class _Answer(NamedTuple):
    """A server's answer; `retry_after_s` is how many seconds it wants to be left alone."""

    status: int
    body: bytes
    retry_after_s: float


class _Connection:
    """A connection that is opened by its first request and kept for the next. It is used by one request at a time.
    After an error it must be closed."""

    def __init__(self, address: _Address) -> None:
        self._url = address.url
        self._http = httpcore.HTTPConnection(
            origin=address.url.origin, ssl_context=address.tls, keepalive_expiry=KEPT_OPEN_S
        )
        self.socket: socket.socket | None = None
        """The connection's socket; None before it is opened."""

    @property
    def has_expired(self) -> bool:
        """Whether the connection has been idle for too long, or the server has closed it."""
        return self._http.is_closed() or self._http.has_expired()

    def post(self, headers: Sequence[tuple[bytes, bytes]], content: bytes, timeout_s: float, call: Call) -> _Answer:
        """Return what the server answers. Raises one of FAILED, or Refused for an answer that is too long."""

        def note_socket(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                self.socket = info["return_value"].get_extra_info("socket")
                call.attach(self.socket)

        deadline = time.monotonic() + timeout_s
        limits = {"connect": min(timeout_s, CONNECT_S), "write": timeout_s, "read": timeout_s}
        request = httpcore.Request(
            b"POST",
            self._url,
            headers=[*headers, (b"Content-Length", b"%d" % len(content))],
            content=content,
            extensions={"timeout": limits, "trace": note_socket},
        )
        with contextlib.closing(self._http.handle_request(request)) as response:
            parts, num_bytes = [], 0
            for part in response.iter_stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > MAX_ANSWER_BYTES:
                    raise Refused(f"the server's answer is longer than {MAX_ANSWER_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
            return _Answer(response.status, b"".join(parts), _retry_after_s(response.headers))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _close_all(connections: deque[_Connection]) -> None:
    while connections:
        connections.pop().close()


def address_of(parts: SplitResult) -> tuple[str, int]:
    """Return the host and the port that a url names, as `split_url` returns it."""
    return str(parts.hostname), parts.port or {"http": 80, "https": 443}[parts.scheme]


def split_url(url: str, section: str) -> SplitResult:
    """Return the parts of a server's url. ConfigError, which names `section` of the run file, for one that is none or
    holds a key."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.username is None and parts.port != 0
        (parts.hostname or "").encode("idna")
        parts.path.encode("ascii")
    except ValueError:  # a port that is no number, a host that no name can be, a path with other signs
        is_one = False
    if not is_one:
        raise ConfigError(
            f"{section}.url: expected http://HOST:PORT/v1 or https://, without keys in it; those come by "
            'api_key = "env:NAME"'
        )
    return parts


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error: what the system said, or else what the client says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """Return for how many seconds the server wants to be left alone, which it says as a number or as a date."""
    said = next((value.decode("latin-1") for name, value in headers if name.lower() == b"retry-after"), "")
    if said.isdecimal():
        return float(said)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return 0.0


def _object(answer: bytes) -> dict[str, Any]:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
