"""Claims of single roles on `control`. The newest claim of a role says which process holds it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rftstream.contracts.control import Claim
from rftstream.errors import RftError, TakenOver
from rftstream.service.control_view import read_control
from rftstream.service.role import RoleContext
from rftstream.service.single_reader import SingleReader

log = logging.getLogger(__name__)


def new_claim(role: str, epoch: int, *, process: str, now: float) -> Claim:
    """Return a claim of a role by this process, whose name on the log is `process`."""
    return Claim(role=role, epoch=epoch, host=socket.gethostname(), pid=os.getpid(), process=process, claimed_at=now)


class RoleClaim:
    """A single role's claim by this process. It also notices that another process has claimed the role.

    SingleService makes it together with itself. To take the role it calls `look_before_start`, starts its producer, and
    calls `take`. While it holds the role it calls `check` after each look at `control`, and works inside of
    `unless_taken_over`."""

    def __init__(self, role: str, context: RoleContext, reader: SingleReader, claims: dict[str, Claim]) -> None:
        """`claims` are the newest claims by role; the loop keeps them up to date with what `reader` brings."""
        self.newest: Claim | None = None
        """The newest claim of this process that is on the log for certain; None before the first one."""
        self._role, self._context, self._reader, self._claims = role, context, reader, claims
        self._tried: Claim | None = None
        """The claim that was written last. If its commit was lost, only the log can tell whether it is there."""
        self._known_epoch: int | None = None
        """The epoch of this process's own claim, and before there is one, the newest epoch when it first looked. A
        claim with a higher epoch is another process's."""

    def look_before_start(self) -> None:
        """Raise TakenOver if another process has taken over: starting a producer would fence it."""
        if self._known_epoch is not None:
            self._reader.read_control()
            self.check()

    def take(self, write: Callable[[Claim], None]) -> Claim:
        """Claim the role with the next epoch, and return the claim. Called when the producer has been started, so that
        no other process can write a claim unnoticed. `write` commits the claim; what it raises is passed on."""
        # Another role's open transaction must not hide a claim: two processes would be in force under one epoch.
        self._reader.read_control(settled=True)
        before = self._claims.get(self._role)
        if self._known_epoch is None:
            self._known_epoch = before.epoch if before else 0
        self.check()
        epoch = before.epoch + 1 if before else 1
        self._tried = claim = new_claim(self._role, epoch, process=self._context.process, now=self._context.clock.now())
        write(claim)
        self.newest = claim
        self._known_epoch = claim.epoch
        self._claims[self._role] = claim
        self._context.transport.admin.make_durable()  # objects are named by the epoch, so none may come twice
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
        """Raise TakenOver if another process's claim is newer than what this process knows."""
        newest, known = self._claims.get(self._role), self._known_epoch or 0
        if newest is None or newest.epoch <= known:
            return
        if newest == self._tried:
            self._known_epoch = newest.epoch
            return
        raise TakenOver(
            f"{self._role}: {newest.process}, process {newest.pid} on {newest.host}, took over with epoch "
            f"{newest.epoch} (this one knew {known}); this process ends"
        )

    @contextmanager
    def unless_taken_over(self) -> Iterator[None]:
        """Raise TakenOver in place of an error, if another process has taken over.

        What looks like a broken log, or like a rule to stop by, may be the view of a process that was away: its
        successor has gone on meanwhile, and has deleted what it does not need any more itself."""
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
