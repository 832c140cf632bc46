"""Tells whether a reward failed because a service that it asks is away: the next one that asks it would fail, too."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Iterator

SUMMARY_S = 60.0
"""Seconds after a line about absences in which short ones are counted; then one line sums them up."""
LONG_AFTER = 3
"""Number of failures in a row after which an absence is no short one."""
PAUSES_S = (1.0, 3.0, 9.0, 27.0, 60.0)
"""Seconds before the next try of a service that is away: after its first failure, its second, and so on."""

_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


def pause_s(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return PAUSES_S[min(num_failures, len(PAUSES_S)) - 1]


class Absences:
    """This decides what is said of a reward's service that is away. One that is asked too much refuses a part
    of each batch, again and again: that is said once, then it is counted. A ScoringQueue makes it for each reward.

        failed(now, 1)     an absence begins: True, so it is said
        ended(now)         the service answers again: True, since its absence was said
        failed(now + 5, 1)   another one: False, it is counted
        ended(now + 6)     False
        take_summary(now + 60)  (1, 1.0): one absence, of a second
    """

    def __init__(self) -> None:
        self._said_at = -math.inf
        self._began_at: float | None = None
        self._is_said = False
        self._num_unsaid = 0
        self._unsaid_s = 0.0

    def failed(self, now: float, num_failures: int) -> bool:
        """Record a failure, of so many in a row. Return whether to say it."""
        if self._began_at is None:
            self._began_at = now
            self._is_said = now - self._said_at >= SUMMARY_S and not self._num_unsaid
        self._is_said |= num_failures >= LONG_AFTER
        if self._is_said:
            self._said_at = now
        return self._is_said

    def ended(self, now: float) -> bool:
        """Record that the service answers again. Return whether to say it."""
        began_at, self._began_at = self._began_at, None
        if self._is_said or began_at is None:
            self._said_at = now
            return True
        self._num_unsaid += 1
        self._unsaid_s += now - began_at
        return False

    def take_summary(self, now: float) -> tuple[int, float] | None:
        """Return the number of absences that were not said, and their seconds, when it is time to say it."""
        if not self._num_unsaid or now - self._said_at < SUMMARY_S:
            return None
        found = self._num_unsaid, self._unsaid_s
        self._said_at, self._num_unsaid, self._unsaid_s = now, 0, 0.0
        return found


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
