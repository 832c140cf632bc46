"""Chooses one of several model servers for a rollout: the one that has computed the beginning of its prompts.

The siblings of a group share their first prompt, and the turns of a rollout share the conversation so far. So the group
decides which server comes first, by rendezvous hashing (Thaler and Ravishankar, 1998): each pair of server and group
has a number, and the lowest number wins. This needs no state: every explorer decides the same, before and after a
restart, and a server that comes or goes moves only its own share. If that server is too full, a rollout begins at the
next server of its group (consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2016), and stays
there while that server answers.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

LEAST_LOAD = 4
"""Number of requests for which no server is too full: so few rows take about the time of one."""
MAX_PLACED = 1 << 16
"""Number of rollouts whose server is remembered, many times the number of an explorer's active rollouts."""
FAILURES = 3
"""Failures in a row after which a server is paused."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds of the first pause, which doubles each time, and of the longest one."""
LONGEST_AFTER_S = 300.0
"""Longest pause in seconds that a server can ask for."""


def ranked(key: str, names: Collection[str]) -> list[str]:
    """Return the names in the key's order of preference. Only key and names decide it; adding or removing a name keeps
    the order of the others."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{name}\x1f{key}".encode(), digest_size=16).digest())


def pause_after(count: int) -> float:
    """Return the seconds of the pause after a number of pauses."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count, 16))  # a server may be away for weeks


class Router:
    """Assigns servers to rollouts. `OpenAiPolicy` makes it and calls `place` for each request."""

    def __init__(self, max_load: float) -> None:
        """`max_load`: load of a server, as a multiple of the mean load, above which it gets no further rollouts."""
        self._max_load = max_load
        self._placed: OrderedDict[str, str] = OrderedDict()
        """Rollout -> server, the least recently used first."""

    def place(
        self,
        rollout: str,
        group: str,
        loads: Mapping[str, int],
        *,
        avoid: Collection[str] = (),
        draining: Collection[str] = (),
    ) -> str:
        """Return the server for a rollout's next request: its own server if that is available, else another one, which
        becomes its own.

        `loads`: the requests of each available server; at least one. `avoid`: servers that failed at this request, used
        only if there is no other. `draining`: servers that accept no requests until they have new weights; a rollout
        begins there only if all others are too full."""
        own = self._placed.get(rollout)
        if own is None or own not in loads or own in avoid:
            own = self._choose(group, loads, avoid, draining)
        self._placed[rollout] = own
        self._placed.move_to_end(rollout)
        while len(self._placed) > MAX_PLACED:
            self._placed.popitem(last=False)
        return own

    def _choose(self, group: str, loads: Mapping[str, int], avoid: Collection[str], draining: Collection[str]) -> str:
        order = ranked(group, loads.keys() - avoid or loads.keys())
        bound = max(LEAST_LOAD, math.ceil(self._max_load * (sum(loads.values()) + 1) / len(loads)))
        free = [name for name in order if loads[name] < bound]
        return next((name for name in free if name not in draining), (free or order)[0])


class CircuitBreaker:
    """Decides whether a server may be called. `Engine` makes one and reports the results of requests to it.

    It is closed at first. After FAILURES in a row, or one decisive failure, it opens: no request is sent. When its
    pause is over, a probe `is_due`. An answered probe closes it; a failed one doubles the next pause."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._random = now, random.Random()
        self._num_in_a_row = 0
        self._due_at: float | None = None
        self.num_pauses = 0
        """Pauses since the server's last answer."""

    @property
    def is_open(self) -> bool:
        """Whether the server is paused."""
        return self._due_at is not None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a probe."""
        return self._due_at is not None and self._now() >= self._due_at

    def answered(self) -> None:
        """Record an answer to a request. An answer to a request sent before the pause does not end the pause."""
        if self._due_at is None:
            self._num_in_a_row = self.num_pauses = 0

    def failed(self, *, is_enough: bool = False, after_s: float = 0.0) -> None:
        """Record a failed request. `is_enough`: this failure alone is decisive. `after_s`: seconds of pause that the
        server asked for."""
        self._num_in_a_row += 1
        if self._due_at is None and (is_enough or after_s or self._num_in_a_row >= FAILURES):
            self._pause(after_s)

    def probe_answered(self) -> None:
        """End the pause."""
        self._due_at = None
        self.answered()

    def probe_failed(self, after_s: float = 0.0) -> None:
        """Begin the next pause."""
        self._pause(after_s)

    def _pause(self, at_least_s: float) -> None:
        pause_s = pause_after(self.num_pauses) * self._random.uniform(0.5, 1.5)
        self.num_pauses += 1
        self._due_at = self._now() + max(pause_s, min(at_least_s, LONGEST_AFTER_S))
