"""Claims of single roles on `control`. The newest claim of a role says which process holds it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rftstream.contracts.control import Claim
from rftstream.errors import RftError, TakenOver
from rftstream.service.control_view import read_control
from rftstream.service.loops.single_reader import SingleReader
from rftstream.service.role import RoleContext

log = logging.getLogger(__name__)

MAX_OVERTAKEN = 20
"""How often a process lets its predecessor claim the role again before it gives up."""
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 30.0
"""Seconds that the holder of a role waits for a successor's claim after it lost its producer: the first time, and at
most."""
CALM_S = 120.0
"""Seconds after which the next loss of a producer counts as the first one again."""


@dataclass(slots=True)
class GivesWay:
    """How long the holder of a role waits before it claims the role again. SingleService makes one.

    A successor fences the holder when it starts its producer, and may need long until its claim is on the log. If the
    holder claims the role again in the meantime, the successor has to start over. So the holder waits twice as long
    each time, until the wait is long enough for the successor."""

    until: float = 0.0
    """Time until which the holder waits, by the holder's own clock."""
    _wait_s: float = 0.0

    def next(self, now: float) -> float:
        """Start another wait and return its seconds."""
        is_first = now - self.until > CALM_S
        self._wait_s = FIRST_WAIT_S if is_first else min(MAX_WAIT_S, 2 * self._wait_s)
        self.until = now + self._wait_s
        return self._wait_s


def new_claim(role: str, epoch: int, *, process: str, now: float) -> Claim:
    """Return a claim of a role by this process. `process` is its name on the log."""
    return Claim(role=role, epoch=epoch, host=socket.gethostname(), pid=os.getpid(), process=process, claimed_at=now)


class RoleClaim:
    """A single role's claim by this process. It also notices a claim by another process.

    SingleService makes it when it is made itself. To claim the role, SingleService calls `look_before_start`, starts
    its producer, and calls `take`. While it holds the role it calls `check` whenever it has read `control`, and works
    inside of `unless_taken_over`."""

    def __init__(self, role: str, context: RoleContext, reader: SingleReader, claims: dict[str, Claim]) -> None:
        """`claims` are the newest claims by role. The loop updates them with the records that `reader` delivers."""
        self.newest: Claim | None = None
        """The newest claim of this process that is certainly on the log; None before the first one."""
        self._role, self._context, self._reader, self._claims = role, context, reader, claims
        self._tried: Claim | None = None
        """The claim that was written last. If its commit was lost, only the log can tell whether it was written."""
        self._known_epoch: int | None = None
        """The epoch of this process's own claim, or, before the claim, the newest epoch when this process first looked.
        A claim with a higher epoch belongs to another process."""
        self._predecessor: Claim | None = None
        """The claim that was the newest when this process first looked. This process replaces its holder."""
        self._num_overtaken = 0
        """How often the predecessor has claimed the role again before this process's own claim was on the log."""

    def look_before_start(self) -> None:
        """Raise TakenOver if another process has taken over. Starting a producer would fence that process."""
        if self._known_epoch is not None:
            self._reader.read_control()
            self.check()

    def take(self, write: Callable[[Claim], None]) -> Claim:
        """Claim the role with the next epoch, and return the claim. Called after the start of the producer, so that no
        other process can write a claim unnoticed. `write` commits the claim; its errors are passed on."""
        # Another role's open transaction must not hide a claim: two processes would be in force under one epoch.
        self._reader.read_control(settled=True)
        before = self._claims.get(self._role)
        if self._known_epoch is None:
            self._known_epoch, self._predecessor = before.epoch if before else 0, before
        self.check()
        epoch = before.epoch + 1 if before else 1
        self._tried = claim = new_claim(self._role, epoch, process=self._context.process, now=self._context.clock.now())
        write(claim)
        self.newest = claim
        self._known_epoch = claim.epoch
        self._claims[self._role] = claim
        self._context.transport.admin.make_durable()  # objects are named by the epoch, so no epoch may be used twice
        if before is not None:
            log.info(
                "%s takes over from %s, process %d on %s (epoch %d -> %d)",
                self._context.process,
                before.process,
                before.pid,
                before.host,
                before.epoch,
                claim.epoch,
            )
        return claim

    def check(self) -> None:
        """Raise TakenOver if there is a newer claim of another process."""
        newest, known = self._claims.get(self._role), self._known_epoch or 0
        if newest is None or newest.epoch <= known:
            return
        if newest == self._tried:
            self._known_epoch = newest.epoch
            return
        if self._is_predecessor_again(newest):
            self._num_overtaken += 1
            self._known_epoch = newest.epoch
            log.info("%s, which is to be replaced, has claimed %s again; trying once more", newest.process, self._role)
            return
        raise TakenOver(
            f"{self._role}: {newest.process}, process {newest.pid} on {newest.host}, took over with epoch "
            f"{newest.epoch} (this one knew {known}); this process ends"
        )

    def _is_predecessor_again(self, newest: Claim) -> bool:
        """Return whether the claim is from the predecessor again. The predecessor was fenced, found no new claim yet,
        and claimed the role again, without knowing that it is being replaced. The newer process wins all the same."""
        before = self._predecessor
        return (
            self.newest is None
            and before is not None
            and (before.host, before.pid, before.process) == (newest.host, newest.pid, newest.process)
            and self._num_overtaken < MAX_OVERTAKEN
        )

    @contextmanager
    def unless_taken_over(self) -> Iterator[None]:
        """Replace any error inside by TakenOver if another process has taken over.

        An apparent fault of the log, or an apparent reason to stop, may be the consequence of a long absence: the
        successor has worked meanwhile, and has deleted records that it no longer needs."""
        try:
            yield
        except RftError as error:
            if error.retriable or isinstance(error, TakenOver):
                raise
            newest = read_control(self._context.transport, settled=True).claims.get(self._role)
            if newest is not None:
                self._claims[self._role] = newest
            self.check()
            raise
