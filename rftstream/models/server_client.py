"""A client for models behind any server with OpenAI's HTTP API. Keys are sent only to that server."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from typing import Any
from urllib.parse import SplitResult

from rftstream.errors import ConfigError
from rftstream.http import address
from rftstream.http.client import BUSY, AnswerTooLong, Call, HttpClient, RequestCancelled, RequestFailed, pause_s

PAUSE_S = 0.5
"""Seconds before the second try, randomised by half of that; the pause doubles before each further try."""

WATCHED = address.keep_alive_options(5, 5, 3)
"""Settings by which the system checks that a watched host is alive. Connections without a watch may wait longer."""

MISTAKEN = frozenset({401, 403, 404})
"""HTTP statuses that every request would get."""

AWAY = frozenset({429, 502, 503, 504})
"""Statuses in BUSY that say nothing about the request: the server is full, or a proxy finds no server."""

FULL = 429
"""The status in AWAY by which a server says that it has too many requests."""

GONE = frozenset({502, 504})
"""Statuses in AWAY by which a proxy reports that it lost the server."""


class RetryableError(Exception):
    """A request failed, and another try may help: there was no server, or the server was busy.

    `timed_out`: whether the answer did not come in time. `after_s`: seconds to wait, as the server asked. `is_away`:
    whether any request would have failed. `is_lost`: whether the server may have ended."""

    def __init__(
        self, text: str, *, timed_out: bool = False, after_s: float = 0.0, is_away: bool = False, is_lost: bool = False
    ) -> None:
        super().__init__(text)
        self.timed_out, self.after_s, self.is_away, self.is_lost = timed_out, after_s, is_away, is_lost


class Refused(Exception):
    """This request cannot be answered; other requests can."""


class Unreachable(Exception):
    """No request can be answered now. `timed_out` and `is_away`: as in the last try's RetryableError."""

    def __init__(self, text: str, *, timed_out: bool = False, is_away: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.is_away = timed_out, is_away


class ModelServer:
    """A client of one resource of a model server. Many threads may use it at once; each `ask` is one request with its
    retries. Connections stay open for later requests until `close`."""

    def __init__(
        self, url: str, resource: str, *, api_key: str | None, timeout_s: float, tries: int, section: str
    ) -> None:
        """`url`: where the API begins. `resource`: the path below it, such as `completions`. `section`: the section of
        the run file that errors name.

        ConfigError for an invalid url, or a key that an HTTP header cannot hold."""
        if api_key is not None:
            address.check_key(api_key, f"{section}.api_key")
        parts = split_url(url, section)
        self.where = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/{resource}"
        self._http, self._resource = HttpClient(parts, key=api_key or ""), f"/{resource}"
        self._timeout_s, self._tries, self._section = timeout_s, tries, section
        self.num_full = 0
        """Number of answers so far with FULL."""

    def ask(self, body: dict[str, Any], call: Call | None = None, *, waits_once: bool = False) -> dict[str, Any]:
        """Return the answer to a POST. Raises Refused, or Unreachable after all tries. `waits_once`: a try that took
        the whole time limit is the last one."""
        call = call or Call()
        last = RetryableError("")
        for number in range(self._tries):
            if number and self.pause(number, call, at_least_s=last.after_s):
                break
            try:
                return self.ask_once(body, call)
            except RetryableError as error:
                call.num_retried += 1
                last = error
                if waits_once and error.timed_out and not error.is_away:
                    raise Unreachable(f"{self.where}: {last}", timed_out=True) from None
        raise Unreachable(
            f"{self.where}: {last}, after {self._tries} tries; is the server up?",
            timed_out=last.timed_out,
            is_away=last.is_away,
        )

    def ask_once(self, body: dict[str, Any], call: Call) -> dict[str, Any]:
        """Return the answer without a second try. Raises RetryableError where another try may help."""
        try:
            content = json.dumps(body).encode()
            answer = self._http.ask("POST", self._resource, content, timeout_s=self._timeout_s, call=call)
        except RequestCancelled:
            raise Refused("aborted") from None
        except AnswerTooLong as error:
            raise Refused(str(error)) from None
        except RequestFailed as error:
            is_away = not error.timed_out or not error.was_sent
            raise RetryableError(str(error), timed_out=error.timed_out, is_away=is_away, is_lost=True) from None
        if answer.status == 200:
            return _object(answer.body)
        text = _object(answer.body).get("error", answer.body[:300].decode(errors="replace"))
        said = self._http.hidden(f"{answer.status}: {text.get('message', text) if isinstance(text, dict) else text}")
        if answer.status in MISTAKEN:
            raise Unreachable(f"{self.where}: {said}; mend url, model or api_key in [{self._section}]")
        if answer.status in BUSY:
            status, after_s = answer.status, answer.retry_after_s
            self.num_full += status == FULL
            raise RetryableError(said, after_s=after_s, is_away=status in AWAY, is_lost=status in GONE)
        raise Refused(f"the server answered {said}")

    def pause(self, number: int, call: Call, *, at_least_s: float = 0.0) -> bool:
        """Wait before try `number`, counted from 0; return whether the request was cancelled meanwhile. The wait is
        randomised, so that requests that failed together do not return together. `at_least_s` is what the server asked
        for; it is capped at the time limit of an answer."""
        return call.cancelled.wait(max(pause_s(number, PAUSE_S), min(at_least_s, self._timeout_s)))

    def watch(self) -> ServerWatch | None:
        """Return a watch over the server; None if it is not there."""
        with contextlib.suppress(OSError):
            return ServerWatch(self._http.connect())
        return None

    def close(self) -> None:
        """Close the connections that are idle. Those in use are closed when their requests end."""
        self._http.close()


class ServerWatch:
    """An idle connection that shows a caller that the server still runs.

    While the connection is open, the server has not ended, so it still has the version that it was given.
    `ModelServer.watch` makes it; its caller closes it. A server may close idle connections for its own reasons, but
    vLLM and SGLang close only connections that were used. Behind a proxy the connection shows only that the proxy
    runs."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option in WATCHED:  # a host that is gone, or that is back after a restart, does not report that by itself
            connection.setsockopt(*option)
        self._socket = connection

    @property
    def is_open(self) -> bool:
        """Whether the server has been there since the watch began."""
        try:
            self._socket.recv(1)  # the connection ended, or the server wrote something before closing it
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def split_url(url: str, section: str) -> SplitResult:
    """Return the parts of a server's url. ConfigError, which names `section` of the run file, if the url is invalid or
    contains a key."""
    parts = address.split_url(url)
    if parts is None or parts.username is not None:
        raise ConfigError(
            f"{section}.url: expected http://HOST:PORT/v1 or https://, without keys in it; those come by "
            'api_key = "env:NAME"'
        )
    return parts


def _object(answer: bytes) -> dict[str, Any]:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
