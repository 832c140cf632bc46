"""A circuit breaker: notices across rollouts that a reward hangs, and that it comes back.

One rollout that hangs costs a time limit, and so does each of its tries. Where all of them hang nobody should wait for
each of them; but a reward that hangs on one problem must cost the other problems nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

HUNG_IN_A_ROW = 6
"""Tries that have to hang one after the other before a breaker gives up ..."""
GROUPS_IN_A_ROW = 3
"""... if they were of so many groups: siblings share a problem, and hang together."""
HUNG_ANYHOW = 16
"""Or so many tries one after the other, however few groups there are."""
SLOW_SHARE = 0.5
"""Of the time limit: an error that took so long is as bad as no result."""


def is_slow(reason: str | None, seconds: float, slow_s: float) -> bool:
    """Whether a try that gave no score is taken for one that hung."""
    return reason == "timeout" or (reason != "missing_checker" and seconds >= slow_s)


class Tried(Protocol):
    """What a breaker needs to know of a rollout."""

    @property
    def number(self) -> int:
        """The number that the queue gave to its request."""

    @property
    def group_id(self) -> str:
        """The group of the rollout; siblings share a problem."""


_Tried = TypeVar("_Tried", bound=Tried)


class Breaker:
    """The breaker of one reward. A ScoringQueue makes it, tells it how each try ended, and asks it what may be tried.

    closed      Everything may be tried.
    suspicious  A try hung. One rollout at a time is tried (the probe), if possible of a group that has not hung; the
                others wait. As soon as anything comes back the breaker is closed again.
    given up    So many probes hung in a row that nothing is tried twice, and what waits is given up when the probe
                gives nothing, and before that if the probe takes long. The next one that comes is the next probe, so
                that a reward that recovers closes the breaker.

    Its state follows from the order of what it is told; it has no clock.
    """

    def __init__(self) -> None:
        self.probe: int | None = None
        """Number of the rollout that is being tried, unless the breaker is closed."""
        self.num_hung = 0
        """Tries that hung in a row; those that were under way together count as one."""
        self.reason = ""
        self.detail = ""
        """Detail of the last try that hung."""
        self._groups: set[str] = set()

    @property
    def closed(self) -> bool:
        """Whether everything may be tried."""
        return self.num_hung == 0

    @property
    def given_up(self) -> bool:
        """Whether so many tries hung that nothing is tried twice."""
        enough = self.num_hung >= HUNG_IN_A_ROW and len(self._groups) >= GROUPS_IN_A_ROW
        return enough or self.num_hung >= HUNG_ANYHOW

    def hung(self, tried: Sequence[Tried], reason: str, detail: str) -> None:
        """Note that a try gave nothing. `tried`: the rollout, or those of a batch, of which any may be the cause."""
        probed = any(one.number == self.probe for one in tried)
        if self.closed or probed:
            self.num_hung += 1
        if probed:
            self.probe = None
        if len(tried) == 1:
            self._groups.add(tried[0].group_id)
        self.reason, self.detail = reason, detail

    def came_back(self) -> None:
        """Close: the reward gave a score, or an error in good time."""
        self.probe = None
        self.num_hung = 0
        self._groups.clear()

    def not_tried(self, number: int) -> None:
        """Note that a rollout came back untried: what it was with took its process along."""
        if number == self.probe:
            self.probe = None

    def choose(self, held: Sequence[_Tried]) -> _Tried:
        """Return which of these to try next: the first one of a group that has not hung, else the first one."""
        return next((one for one in held if one.group_id not in self._groups), held[0])
