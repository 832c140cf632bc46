"""A client of a served model: any server with OpenAI's HTTP API. Standard library alone; keys go nowhere but there."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
from typing import Any
from urllib.parse import urlsplit

from rftstream.config import secrets
from rftstream.errors import ConfigError

PAUSE_S = 0.5
"""Seconds before the second try; twice as long before each further try."""

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Answers after which another try may help."""

MISTAKEN = frozenset({401, 403, 404})
"""Answers that every request would get."""

MAX_ANSWER_BYTES = 256 << 20
"""The most bytes of an answer: many times what logprobs of the longest prompts take."""


class RetryableError(Exception):
    """Another try may help: nobody was there, or nobody had time. `timed_out`: there was no answer within its time."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Refused(Exception):
    """This request cannot be answered; others can."""


class Unreachable(Exception):
    """No request can be answered now. `timed_out`: the last try had no answer within its time."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Call:
    """One request on its way."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    def connect(self, connection: http.client.HTTPConnection) -> None:
        """Note the connection that the request goes over, so that `cancel` can close it."""
        with self._lock:
            self._connection = connection

    def cancel(self) -> None:
        """Cancel the request: its thread gives up, and the server sees that nobody listens any more."""
        self.cancelled.set()
        with self._lock:
            if self._connection is not None and self._connection.sock is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    self._connection.sock.shutdown(socket.SHUT_RDWR)


class ModelServer:
    """A client of one resource of a model server. Many threads may use it at once; each `ask` is a request with its
    tries."""

    def __init__(
        self, url: str, resource: str, *, api_key: str | None, timeout_s: float, tries: int, section: str
    ) -> None:
        """`url`: where the API begins; `resource`: what of it is asked, e.g. `completions`; `section`: of the run
        file, for errors. ConfigError for a url that is none, or a key that no header can hold."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"{section}.url: expected http://HOST:PORT/v1 or https://, without keys in it; those come by "
                'api_key = "env:NAME"'
            )
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):  # http.client would say so with the key in it
            raise ConfigError(
                f"{section}.api_key: found a space, a line break or another sign that no header can hold (it is not "
                "shown here), expected the key alone; set the environment variable without it"
            )
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = f"{parts.path.rstrip('/')}/{resource}"
        self.where = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._api_key, self._timeout_s, self._tries, self._section = api_key, timeout_s, tries, section

    def ask(self, body: dict[str, Any], call: Call | None = None) -> dict[str, Any]:
        """Return the answer to a POST. Raises Refused, or Unreachable after all tries."""
        call = call or Call()
        pause_s, last = PAUSE_S, RetryableError("")
        for number in range(self._tries):
            if number and call.cancelled.wait(pause_s * 2 ** (number - 1)):
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
            status, answer = self._post(body, call)
        except (OSError, http.client.HTTPException) as error:
            text = self._hidden(f"{type(error).__name__}: {error}")
            raise RetryableError(text, timed_out=isinstance(error, TimeoutError)) from None
        if status == 200:
            return _object(answer)
        text = _object(answer).get("error", answer[:300].decode(errors="replace"))
        said = self._hidden(f"{status}: {text.get('message', text) if isinstance(text, dict) else text}")
        if status in MISTAKEN:
            raise Unreachable(f"{self.where}: {said}; mend url, model or api_key in [{self._section}]")
        if status in BUSY:
            raise RetryableError(said)
        raise Refused(f"the server answered {said}")

    def _hidden(self, text: str) -> str:
        """Return the text without the key: servers repeat keys that they refuse."""
        return secrets.hidden(text if not self._api_key else text.replace(self._api_key, "***"))

    def _post(self, body: dict[str, Any], call: Call) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection.connect()
            call.connect(connection)
            if call.cancelled.is_set():
                raise Refused("aborted")
            connection.request("POST", self._path, json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
            if len(answer) > MAX_ANSWER_BYTES:
                raise Refused(f"the server's answer is longer than {MAX_ANSWER_BYTES:,} bytes")
            return response.status, answer
        finally:
            connection.close()


def _object(answer: bytes) -> dict[str, Any]:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
