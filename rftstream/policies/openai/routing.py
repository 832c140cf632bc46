"""Which of several model servers samples a rollout: the one that has computed the beginning of its prompts.

The siblings of a group share their first prompt, and the turns of a rollout share all that was said before. So the
group decides which server is asked first, by rendezvous hashing (Thaler and Ravishankar, 1998): each pair of server and
group has a number, and the lowest one wins. Nothing is kept for that: every explorer decides the same, before and after
a restart, and a server that comes or goes moves its own share alone. A rollout whose server is too full begins at the
next one of its group (consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2016), and stays there
as long as that one answers.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

LEAST_LOAD = 4
"""Requests that no server is too full for: so few rows are decoded in about the time of one."""
MAX_PLACED = 1 << 16
"""Rollouts whose server is remembered, many times those that an explorer has in hand."""
FAILURES = 3
"""Failures in a row after which a server is left alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds for which it is left alone at first, twice as long each further time, and at most."""
LONGEST_AFTER_S = 300.0
"""Most seconds for which a server is left alone because it wants to be."""


def ranked(key: str, names: Collection[str]) -> list[str]:
    """Return the names in the order in which the key prefers them. It depends on nothing but key and names; a name that
    is added or removed leaves the order of the others as it is."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{name}\x1f{key}".encode(), digest_size=16).digest())


def pause_after(count: int) -> float:
    """Return the seconds of the pause after a number of pauses."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count, 16))  # a server may be away for weeks


class Router:
    """The servers of rollouts. `OpenAiPolicy` makes it and calls `place` for each request."""

    def __init__(self, max_load: float) -> None:
        """`max_load`: how many times the mean load of the servers one may have before it gets no further rollouts."""
        self._max_load = max_load
        self._placed: OrderedDict[str, str] = OrderedDict()
        """Rollout -> server, the one that was asked for longest ago first."""

    def place(
        self,
        rollout: str,
        group: str,
        loads: Mapping[str, int],
        *,
        avoid: Collection[str] = (),
        draining: Collection[str] = (),
    ) -> str:
        """Return the server for a rollout's next request: its own if that one may be asked, else another, which is its
        own from then on. `loads`: the requests of each server that may be asked; one at least. `avoid`: servers that
        have failed at this request, taken only if there is no other. `draining`: servers that ask nothing until they
        have new weights; a rollout begins there only if all others are too full."""
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
    """Whether a server may be asked. `Engine` makes one and tells it how requests end.

    It is closed at first. After FAILURES in a row, or one that is enough, it is open: nothing is asked. When its pause
    is over a probe `is_due`. A probe that is answered closes it; one that is not makes the next pause twice as long."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._random = now, random.Random()
        self._num_in_a_row = 0
        self._due_at: float | None = None
        self.num_pauses = 0
        """Pauses since the server answered last."""

    @property
    def is_open(self) -> bool:
        """Whether the server is left alone."""
        return self._due_at is not None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a probe."""
        return self._due_at is not None and self._now() >= self._due_at

    def answered(self) -> None:
        """Note an answer to a request. One that was asked before the pause does not end it."""
        if self._due_at is None:
            self._num_in_a_row = self.num_pauses = 0

    def failed(self, *, is_enough: bool = False, after_s: float = 0.0) -> None:
        """Note that a request failed. `is_enough`: no other would fare better. `after_s`: for how long the server wants
        to be left alone; it is."""
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
