"""Tells whether a reward failed because a service that it asks is away: the next one that asks it would fail, too."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

PAUSES_S = (1.0, 3.0, 9.0, 27.0, 60.0)
"""Seconds before the next try of a service that is away: after its first failure, its second, and so on."""

_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


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
    if isinstance(error, BrokenPipeError):
        return False  # more often of a program that the reward began, and that did not read its input
    if isinstance(error, ConnectionError | socket.gaierror):
        return True
    return (isinstance(error, OSError) and error.errno in _NO_WAY) or _status(error) in AWAY


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, those that it was raised from, and those that they are groups of."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        if (one := left.pop()) is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left.append(one.__cause__ or one.__context__)  # also one that is hidden by `from None`, as httpcore does it
        if isinstance(one, BaseExceptionGroup):  # of the addresses of a host, or of tasks
            left += one.exceptions


def _status(error: BaseException) -> int | None:
    """Return the status of the response that the error carries, as those of httpx and requests do, or that it is, as
    those of urllib and aiohttp."""
    found = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    return found if isinstance(found, int) else None
