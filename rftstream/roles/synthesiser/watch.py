"""Tells when hardly anything that the model makes can be used."""

from __future__ import annotations

import logging
from collections import Counter, deque

from rftstream.contracts.problems import RejectedProblem

log = logging.getLogger(__name__)

WATCHED = 50
"""Problems over which the share of rejected ones is computed."""


class RejectWatch:
    """Counts the problems that were admitted and rejected lately. The step makes it and calls `note` for each problem
    that ended."""

    def __init__(self, warn_share: float) -> None:
        """`warn_share`: a larger share of rejected problems is reported."""
        self._warn_share = warn_share
        self._recent: deque[RejectedProblem | None] = deque(maxlen=WATCHED)
        """The last problems; None for one that was admitted."""
        self._silent = 0
        """Problems that have to end before it is said again."""

    def note(self, rejected: RejectedProblem | None) -> None:
        """Take the next problem that ended; None if it was admitted. Warn if too many were rejected."""
        self._recent.append(rejected)
        self._silent = max(0, self._silent - 1)
        if self.trouble() and not self._silent:
            self._silent = WATCHED
            log.warning("%s; `rftstream problems list RUN --rejected` shows them", self.trouble())

    def trouble(self) -> str:
        """Return a warning for people; empty if enough problems are admitted, or too few have ended to tell."""
        rejected = [one for one in self._recent if one is not None]
        if len(self._recent) < WATCHED or len(rejected) <= self._warn_share * WATCHED:
            return ""
        (reason, count), *_ = Counter(one.reason for one in rejected).most_common(1)
        last = next(one for one in reversed(rejected) if one.reason is reason)
        said = " ".join(last.said.split())[:100]
        return (
            f"{len(rejected)} of the last {WATCHED} problems that {last.made_by} made were rejected, {count} of them "
            f"as {reason}: {last.detail}; it said {said!r}"
        )
