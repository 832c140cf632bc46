"""A circuit breaker, which detects across rollouts that a reward hangs, and that it works again.

A rollout that hangs costs a time limit, and so does each of its tries. When all rollouts hang, nobody should wait for
each of them. A reward that hangs on one problem must cost the other problems nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

HUNG_IN_A_ROW = 6
"""Number of consecutive hung tries after which a breaker gives up, if they come from GROUPS_IN_A_ROW groups."""
GROUPS_IN_A_ROW = 3
"""Number of groups that these tries must come from: siblings share a problem, and hang together."""
HUNG_ANYHOW = 16
"""Number of consecutive hung tries after which a breaker gives up, regardless of their groups."""
SLOW_SHARE = 0.5
"""Share of the time limit. An error that took at least this share counts as a hung try."""


FINAL_REASONS = frozenset({"missing_checker", "no_reward"})
"""Reasons that a further try would not change."""


def is_slow(reason: str | None, seconds: float, slow_s: float) -> bool:
    """Return whether a try without a score counts as hung. `seconds`: the try's duration; `slow_s`: the limit."""
    return reason == "timeout" or (reason not in FINAL_REASONS and seconds >= slow_s)


class Tried(Protocol):
    """A rollout as the breaker sees it. `queue.Pending` implements it."""

    @property
    def number(self) -> int:
        """Return the number that the queue gave to the rollout's request."""

    @property
    def group_id(self) -> str:
        """Return the group of the rollout; siblings share a problem."""


_Tried = TypeVar("_Tried", bound=Tried)


class Breaker:
    """The breaker of one reward. A ScoringQueue makes it, reports the result of each try to it, and asks it which
    rollouts may be tried.

    closed      Everything may be tried.
    suspicious  A try hung, or a service that the reward asks is away. One rollout at a time is tried (the probe), if
                possible of a group that has not hung; the others wait. As soon as anything comes back the breaker is
                closed again.
    given up    So many probes hung in a row that nothing is tried twice, and what waits is given up when the probe
                gives nothing, and before that if the probe takes long. The next one that comes is the next probe, so
                that a reward that recovers closes the breaker.

    The order of the reports alone determines its state; it has no clock.
    """

    def __init__(self) -> None:
        self.probe: int | None = None
        """Number of the rollout that is being tried as the probe; None if the breaker is closed."""
        self.num_hung = 0
        """Number of consecutive hung tries. Tries that ran at the same time count as one."""
        self.reason = ""
        self.detail = ""
        """Detail of the last hung try."""
        self._groups: set[str] = set()

    @property
    def closed(self) -> bool:
        """Return whether everything may be tried."""
        return self.num_hung == 0

    @property
    def given_up(self) -> bool:
        """Return whether the reward is given up. Then nothing is tried twice, since too many tries hung."""
        enough = self.num_hung >= HUNG_IN_A_ROW and len(self._groups) >= GROUPS_IN_A_ROW
        return enough or self.num_hung >= HUNG_ANYHOW

    def hung(self, tried: Sequence[Tried], reason: str, detail: str) -> None:
        """Record that a try gave no result. `tried` is the rollout, or a batch in which any rollout may be the
        cause."""
        probed = any(one.number == self.probe for one in tried)
        if self.closed or probed:
            self.num_hung += 1
        if probed:
            self.probe = None
        if len(tried) == 1:
            self._groups.add(tried[0].group_id)
        self.reason, self.detail = reason, detail

    def came_back(self) -> None:
        """Close the breaker, since the reward gave a score, or an error quickly."""
        self.probe = None
        self.num_hung = 0
        self._groups.clear()

    def not_tried(self, number: int) -> None:
        """Record that a rollout came back untried, since another one killed its process or took too long."""
        if number == self.probe:
            self.probe = None

    def choose(self, held: Sequence[_Tried]) -> _Tried:
        """Return the rollout to try next: the first of a group that has not hung, else the first of all."""
        return next((one for one in held if one.group_id not in self._groups), held[0])
