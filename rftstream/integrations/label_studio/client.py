"""A client of Label Studio's HTTP API.

The user has a personal access token, which is valid for long. With it the client gets access tokens that are valid for
five minutes. The client keeps one in memory, and gets the next when the server answers 401. Each request has a single
time limit. Only reads are tried again here. Before a write is repeated, the caller checks whether it was done.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlencode

from rftstream.config import secrets
from rftstream.errors import ConfigError, LabelStudioError
from rftstream.http.address import hide, split_url
from rftstream.http.client import BUSY, Answer, Call, HttpClient, RequestFailed

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "RFTSTREAM_LABEL_STUDIO_TOKEN"
READ_TRIES = 3
PAUSE_S = 0.5
"""Seconds before the second try of a read; twice as long before the third."""
_SHOWN = 300
"""Most characters of a server's answer that an error quotes."""


@dataclass(frozen=True, slots=True)
class PersonalToken:
    """The source of the personal access token. It is read again for each access token, so that a new token in the file
    takes effect."""

    file: Path | None = None
    """File with the token. None: the token is in the environment variable."""

    @property
    def where(self) -> str:
        """Return the place of the token, for errors."""
        return TOKEN_VARIABLE if self.file is None else str(self.file)

    def read(self) -> str:
        """Return the token. ConfigError if there is none, if others may read its file, or if it is of the old kind."""
        token = self._content().strip()
        if not token:
            raise ConfigError(
                f"{self.where}: found no token, expected a personal access token of Label Studio; make one there under "
                "Account & Settings, and put it into the variable, or into a file for --token-file"
            )
        if token.count(".") != 2 or not token.isascii() or any(sign.isspace() for sign in token):
            raise ConfigError(
                f"{self.where}: found perhaps a legacy token, expected a personal access token (three parts with dots "
                "between them); make one in Label Studio under Account & Settings > Personal Access Token"
            )
        return token

    def _content(self) -> str:
        if self.file is None:
            return os.environ.get(TOKEN_VARIABLE, "")
        try:
            with self.file.open(encoding="utf-8", errors="replace") as file:
                mode = os.fstat(file.fileno()).st_mode
                if stat.S_ISREG(mode) and mode & 0o007:
                    raise ConfigError(f"{self.file}: everybody may read this token; chmod 600 {self.file}")
                return file.read(65_536)
        except OSError as error:
            raise ConfigError(
                f"{self.file}: {error.strerror or error}; expected a file with a personal access token"
            ) from None


@dataclass(slots=True)
class RequestCounts:
    """The counts of the client's requests. The maker of the client reads them."""

    requests: int = 0
    refreshes: int = 0
    """Number of access tokens that were requested."""
    tries_again: int = 0


class LabelStudio:
    """Client of the Label Studio at a URL. One thread makes and uses it; another thread may call `cancel`."""

    def __init__(self, url: str, token: PersonalToken, *, timeout_s: float = 30.0) -> None:
        """`timeout_s`: time limit of one request in seconds, answer included. ConfigError for an invalid URL."""
        self.url = url.rstrip("/")
        self.counts = RequestCounts()
        self._http = HttpClient(_split(self.url))
        self._token, self._timeout_s = token, timeout_s
        self._access = ""
        self._under_way = Call()

    def cancel(self) -> None:
        """Cancel the current request and all later ones. Each raises LabelStudioError."""
        self._under_way.cancel()

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the server's answer to a GET. LabelStudioError after several tries."""
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        return self._called("GET", f"{path}?{query}" if query else path)

    def post(self, path: str, body: Any) -> Any:
        """Return the server's answer to a POST. After LabelStudioError the request may have been done, or may be done
        later."""
        return self._called("POST", path, body)

    def patch(self, path: str, body: Any) -> Any:
        """Return the server's answer to a PATCH. After LabelStudioError the request may have been done, or may be done
        later."""
        return self._called("PATCH", path, body)

    # ------------------------------------------------------------------------------------------ tokens

    def _called(self, method: str, path: str, body: Any = None) -> Any:
        answer = None
        if self._access:
            answer = self._sent(method, path, body, self._access)
        if answer is None or answer.status == 401:  # no token yet, or it has expired: the request was not done
            self._access = self._new_access()
            answer = self._sent(method, path, body, self._access)
        return self._checked(method, path, answer)

    def _new_access(self) -> str:
        """Return a new access token. ConfigError if the personal access token is refused."""
        path, token = "/api/token/refresh/", self._token.read()
        self.counts.refreshes += 1
        answer = self._sent("POST", path, {"refresh": token}, "")
        if answer.status in (400, 401, 403):
            raise ConfigError(
                f"{self.url}: refuses the personal access token of {self._token.where} ({answer.status}: "
                f"{self._said(answer, token)}), expected one that is not revoked or expired, of this server; make "
                "another under Account & Settings"
            )
        found = self._checked("POST", path, answer)
        access = found.get("access") if isinstance(found, dict) else None
        if not isinstance(access, str) or not access.isascii() or not access:
            raise LabelStudioError(f"{self.url}{path}: found no access token in the answer, expected `access`")
        return access

    # ------------------------------------------------------------------------------------------ requests

    def _sent(self, method: str, path: str, body: Any, access: str) -> Answer:
        """Send a request. A read is sent again if it fails."""
        tries = READ_TRIES if method == "GET" or path == "/api/token/refresh/" else 1
        for number in range(tries):
            is_last = number == tries - 1
            try:
                answer = self._sent_once(method, path, body, access)
            except RequestFailed as error:
                if is_last or self._under_way.cancelled.is_set():
                    raise LabelStudioError(self._unreachable(method, path, error)) from None
            else:
                if is_last or answer.status not in BUSY:
                    return answer
            self.counts.tries_again += 1
            self._under_way.cancelled.wait(PAUSE_S * 2**number)
        raise AssertionError("the last try returns or raises")

    def _sent_once(self, method: str, path: str, body: Any, access: str) -> Answer:
        self.counts.requests += 1
        headers = {"Accept": "application/json", "Connection": "close"}
        if access:
            headers["Authorization"] = f"Bearer {access}"
        content = None if body is None else json.dumps(body).encode()
        return self._http.ask(method, path, content, headers=headers, timeout_s=self._timeout_s, call=self._under_way)

    def _checked(self, method: str, path: str, answer: Answer) -> Any:
        """Return the JSON of an answer. LabelStudioError explains an error."""
        where = f"{self.url}{path.partition('?')[0]}"
        location = answer.headers.get("location", "")
        if 300 <= answer.status < 400:
            raise LabelStudioError(
                f"{where}: leads to {secrets.hidden(location)[:_SHOWN]}, expected Label Studio itself; give "
                "--url as the browser shows it"
            )
        if not 200 <= answer.status < 300:
            hint = {
                401: "; the access token was new: is the clock of the server right?",
                403: "; the user of the token needs the right to do this",
            }.get(answer.status, "")
            raise LabelStudioError(
                f"{method} {where}: {answer.status}: {self._said(answer)}{hint}", status=answer.status
            )
        if not answer.body:
            return None
        kind = answer.headers.get("content-type", "bytes")
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            raise LabelStudioError(
                f"{where}: found {kind} that is no JSON, expected Label Studio; is --url right?"
            ) from None

    def _said(self, answer: Answer, token: str = "") -> str:
        """Return the server's error message, with secrets removed."""
        text = answer.body[: 4 * _SHOWN].decode(errors="replace")
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            found = json.loads(answer.body)
            text = str(found.get("detail", text))
            if errors := found.get("validation_errors"):
                text += f" {errors}"
        return hide(" ".join(text.split()), token, self._access)[:_SHOWN]

    def _unreachable(self, method: str, path: str, error: RequestFailed) -> str:
        said = f"no whole answer within {self._timeout_s:g} s" if error.timed_out else str(error)
        return f"{method} {self.url}{path.partition('?')[0]}: {said}; is Label Studio up, and is --url right?"


def _split(url: str) -> SplitResult:
    parts = split_url(url)
    if parts is None or parts.username is not None or not url.isascii() or parts.query or parts.fragment:
        raise ConfigError(
            f"--url: got {secrets.hidden(url)[:_SHOWN]}, expected http://HOST:PORT or https://HOST, without a user"
        )
    return parts


def seconds_of(text: Any) -> float | None:
    """Return a time of Label Studio in seconds since 1970, or None if the text is no time."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None
