"""Updates the policy's weights: new weights are fetched while sampling continues, and loaded between two decoding
steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import KW_ONLY, dataclass, field

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import WeightsError, WeightsGone
from rftstream.policies.base import Policy
from rftstream.roles.explorer import EXPLORER
from rftstream.weights.deltas.delta import text_of
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.shared_memory import SharedTensors
from rftstream.weights.snapshot import RawTensor

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between a failed fetch and the next try."""
GIVE_UP_S = 60.0
"""Seconds for which a process that has no weights looks for an object that the store lacks. Then it ends, so that
others get what it holds. Its `weights.store` may name another place than that of the trainer."""
SAY_AGAIN_S = 20.0
"""Seconds after which the same problem is logged once more."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A version that is being fetched."""

    target: WeightsAnnounced
    tensors: Future[Mapping[str, RawTensor]]
    began: float


@dataclass(eq=False)
class WeightsUpdate:
    """The weights of an explorer's or a synthesiser's policy. The owner of the policy makes it, and asks `newer` in
    each slice of work. If there is a newer version, it calls `take_over` until the policy has loaded it. `close` ends
    the fetching.

    `fetching` has one thread, which fetches weights. `role` is the owner's role, for metrics."""

    policy: Policy
    follower: WeightsFollower
    fetching: Executor
    clock: Clock
    _: KW_ONLY
    role: str = EXPLORER.name
    _fetch: _Fetch | None = field(default=None, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _lacks_since: float | None = field(default=None, init=False)
    _said: tuple[str, float] = field(default=("", -SAY_AGAIN_S), init=False)
    """Text that was logged last, and when."""

    def newer(self) -> WeightsAnnounced | None:
        """Return the newest version in force, or None if the policy has loaded it."""
        newest = self.follower.newest()
        return None if newest is None or newest.name == self.policy.version else newest

    @property
    def retry_in_s(self) -> float:
        """Seconds until the next try after a failed one; not above 0 if no try is scheduled."""
        return self._retry_at - self.clock.now()

    def take_over(self, newest: WeightsAnnounced, *, is_sampling: bool, began: float) -> bool:
        """Load the newest version if it is fetched, otherwise continue to fetch it. Return False if the trainer was
        replaced meanwhile; the caller then asks `newer` again. WeightsError if the policy has no weights yet and none
        can be fetched, or the store has lacked them for `GIVE_UP_S`. `is_sampling` tells whether the load delays a
        rollout, and `began` since when, by `time.perf_counter`."""
        if self._retry_at > self.clock.now():
            return True
        fetch = self._fetch or self._begin_fetch(newest)
        if is_sampling and self._goes_on_meanwhile() and not fetch.tensors.done():
            self._fetch = fetch
            return True
        self._fetch = None
        current, taken, problem = self.policy.version, fetch.target.name, None
        try:
            tensors = fetch.tensors.result()
        except WeightsError as error:
            problem = error
        if self.follower.find(taken) is None:  # the trainer was replaced meanwhile
            return False
        if problem is not None:
            if current is None and (not problem.retriable or self._has_given_up(problem)):
                raise problem
            self._retry_at = self.clock.now() + RETRY_S
            reached = self.follower.held()
            if reached is None or current is None or not _is_of_use(reached, current, newest.name):
                goes_on = "nothing is sampled before one can be loaded"
                self._say(f"going on with version {text_of(current)}" if current else goes_on, problem)
                return True
            taken, tensors = reached
            log.warning("%s; going on with version %s", problem, text_of(taken))
        self.policy.load(tensors, taken)
        now = time.perf_counter()
        metrics.WEIGHTS_FETCH_SECONDS.labels(self.role).observe(now - fetch.began)
        metrics.SAMPLING_HELD_UP_SECONDS.labels(self.role).observe(now - began if is_sampling else 0.0)
        metrics.VERSION.labels(self.role).set(taken.version)
        if (announced := self.follower.find(taken)) is not None and announced.announced_at:
            metrics.WEIGHTS_TIMESTAMP.labels(self.role).set(announced.announced_at)
        return True

    def close(self) -> None:
        """End the fetching. Waiting fetches are cancelled."""
        self.fetching.shutdown(cancel_futures=True)

    def _begin_fetch(self, newest: WeightsAnnounced) -> _Fetch:
        return _Fetch(newest, self.fetching.submit(self.follower.fetch, newest), time.perf_counter())

    def _say(self, what: str, problem: WeightsError) -> None:
        """Log what is done about a problem, the same not at each try. The first version that a process looks for may
        be one that a new trainer has just taken away: that is said at the second try."""
        text, now = f"{problem}; {what}", self.clock.now()
        if self._lacks_since is not None and now - self._lacks_since < RETRY_S:
            return log.info("%s", text)
        if text != self._said[0] or now - self._said[1] >= SAY_AGAIN_S:
            self._said = text, now
            log.warning("%s", text)

    def _has_given_up(self, problem: WeightsError) -> bool:
        if not isinstance(problem, WeightsGone):
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = self.clock.now()
        return self._lacks_since is not None and self.clock.now() - self._lacks_since >= GIVE_UP_S

    def _goes_on_meanwhile(self) -> bool:
        """Whether the current weights are still in force, so that sampling continues while newer ones are fetched."""
        current = self.policy.version
        return current is not None and self.follower.find(current) is not None


def _is_of_use(reached: tuple[VersionName, Mapping[str, RawTensor]], current: VersionName, newest: VersionName) -> bool:
    """Whether a fetched version belongs to the newest trainer and is newer than the current one. The current version
    also counts if it lies in memory that the policy reads itself: that memory may have changed before the policy read
    it."""
    name, tensors = reached
    if name == current:
        return isinstance(tensors, SharedTensors)
    return name.trainer_epoch == newest.trainer_epoch == current.trainer_epoch and name.version > current.version
