"""Tells whether a reward failed because a service that it asks is away: the next one that asks it would fail, too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.error import HTTPError

PAUSES_S = (1.0, 3.0, 9.0, 27.0, 60.0)
"""Seconds before the next try of a service that is away: after its first failure, its second, and so on."""


def pause_s(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return PAUSES_S[min(num_failures, len(PAUSES_S)) - 1]


def is_away(error: BaseException) -> bool:
    """Return whether the error, or one that it was raised from, says that a service cannot be reached or asks for
    patience. The libraries that ask over HTTP chain their errors to those of the socket, or carry the response."""
    return any(map(_says_so, _chain(error)))


def _says_so(error: BaseException) -> bool:
    from rftstream.models.server_client import AWAY, Unreachable  # here, so that a child starts without it

    if isinstance(error, Unreachable):
        return error.is_away
    return isinstance(error, ConnectionError | socket.gaierror) or _status(error) in AWAY


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__  # also one that is hidden by `from None`, as httpcore does it


def _status(error: BaseException) -> object:
    """Return the status of the response that the error carries, as those of urllib, httpx and requests do."""
    if isinstance(error, HTTPError):
        return error.code
    return getattr(getattr(error, "response", None), "status_code", None)
