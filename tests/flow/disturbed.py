"""What goes wrong at a point of somebody's work, and work that goes on in spite of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from random import Random

import pytest

from rftstream.errors import ProducerLost, TransactionAborted
from rftstream.service.loops.single import SingleService
from rftstream.testing import MemoryRun, RoleDriver
from rftstream.testing.faults import Kill

at_commits = pytest.mark.parametrize(("point", "fault"), [
    ("before_commit", Kill), ("after_commit", Kill), ("before_commit", ProducerLost), ("after_commit", ProducerLost),
    ("before_commit", TransactionAborted),
])  # fmt: skip


class FaultAt:
    """The fault of a log or of a store: at a point of a process, of anybody without one, an error is raised or a
    function called; at each nth visit, or now and then, and so many times at most."""

    def __init__(
        self,
        point: str,
        then: type[BaseException] | Callable[[], object],
        process: str | None = None,
        *,
        every: int = 1,
        most: float = inf,
        share: float = 1.0,
    ) -> None:
        self.point, self.then, self.process = point, then, process
        self.every, self.most, self.share = every, most, share
        self.num_visits, self.count = 0, 0
        self._random = Random(3)

    def __call__(self, point: str, process: str | None = None) -> None:
        if point != self.point or (self.process and process not in (self.process, None)):
            return
        self.num_visits += 1
        if self.num_visits % self.every or self.count >= self.most or self._random.random() >= self.share:
            return
        self.count += 1
        if isinstance(self.then, type):
            raise self.then("simulated")
        self.then()


def gave_way(driver: RoleDriver) -> bool:
    """Let the time pass for which the holder of a role that lost a commit waits for a successor's claim. Return whether
    there was any."""
    service = driver.service
    left_s = service._gives_way.until - driver.run.clock.now() if isinstance(service, SingleService) else 0.0
    driver.run.clock.advance(max(left_s, 0.0))
    return left_s > 0


def work_on(driver: RoleDriver, **limits: float) -> None:
    """Work until there is nothing to do. One that is killed is started again."""
    while True:
        try:
            driver.work(**limits)
            if not gave_way(driver):
                return
        except Kill:
            driver.restart()


def restarting(driver: RoleDriver, every: int) -> Callable[[], None]:
    """Return what lets it work, and starts it anew before each nth time."""
    times = count(1)

    def work() -> None:
        if next(times) % every == 0:
            driver.restart()
        driver.work()

    return work


def tick_on(driver: RoleDriver, ticks: int = 6) -> None:
    """Likewise, a little: what comes meanwhile comes while a commit is tried again, or after one was lost."""
    for _ in range(ticks):
        try:
            driver.run.clock.advance(driver.tick())
        except Kill:
            driver.restart()


def copy_on(
    target: MemoryRun, point: str, copy: Callable[[], object], meanwhile: Callable[[int], object] = lambda kills: None
) -> int:
    """Kill a copy at its first, second or third visit of the point until it gets through, and return how often."""
    for kills in range(41):
        target.log.fault = target.store.fault = FaultAt(point, Kill, every=1 + (kills + 1) % 3, most=1)
        try:
            copy()
            break
        except Kill:
            meanwhile(kills + 1)
    target.log.fault = target.store.fault = None
    copy()
    return kills
