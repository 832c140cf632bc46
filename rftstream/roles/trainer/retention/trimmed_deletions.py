"""Carries out the trainer's deletions: everything that a `Trimmed` record names, and old weights.

Before any deletion a durable record on the log names it. So a process that was suspended deletes, whenever it resumes,
only what was given up while it was in force: it can be late, not wrong. A recorded deletion that is not possible yet is
owed. The trainer retries it while it works and before it leaves a finished run. Otherwise a later process does it
(weights/trimming.py)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from rftstream.clock import Clock
from rftstream.contracts.control import Trimmed
from rftstream.contracts.versions import VersionName
from rftstream.errors import LogRefused, RftError, TransportError, WeightsError
from rftstream.service.role import FOREVER, Log
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.trimming import delete_trimmed
from rftstream.weights.version_parts import FOLDER, parse_object_name

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Seconds before a failed deletion is retried. The pause doubles with each failure."""
LONGEST_PAUSE_S = 30.0
"""Longest pause between two tries, in seconds."""
OWED_S = 90.0
"""Most seconds that the trainer of a finished run waits for owed deletions. This is longer than the transaction of a
dead process stays open (PRODUCER_TIMEOUT_S, and a broker checks every ten seconds)."""


class TrimmedDeletions:
    """Carries out recorded deletions, and remembers those that it still owes. `workers/trainer.py` makes one for each
    process.

    In a process that holds the role, the step calls `begin_anew` at each recovery, `absorb` for each `Trimmed` that it
    reads, and then `carry_out` once. While it works it calls `absorb` and `carry_out` whenever one of its own `Trimmed`
    records is on the log, and `delete_owed` in each slice. When the run is finished it calls `may_leave` until that is
    true. In a process that starts when the run is finished, the loop calls only `after_the_end`."""

    def __init__(self, transport: Transport, store: ObjectStore, clock: Clock, *, compacts: bool) -> None:
        """`compacts` tells whether `partials` is compacted, too."""
        self._transport = transport
        self._store = store
        self._checkpoints = CheckpointStore(store)
        self._clock = clock
        self._compacts = compacts
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget recorded and owed deletions, since the log is read again."""
        self.said: Trimmed | None = None
        """The newest record of deletions; None if there is none."""
        self._again_at: float | None = None
        """Time of the next try of owed deletions; None if none are owed."""
        self._pause_s = FIRST_PAUSE_S
        self._may_pass = False
        """Whether owed deletions may soon be possible, for example after another process's open transaction. False if
        rights are missing."""
        self._ended_at: float | None = None
        """Time of the first call of `may_leave`; None before."""

    def absorb(self, trimmed: Trimmed) -> None:
        """Apply the next record of deletions."""
        self.said = trimmed

    def carry_out(self) -> None:
        """Carry out the recorded deletion, if there is one. Parts that cannot be deleted now are owed."""
        if self.said is not None:
            self._owe(delete_trimmed(self.said, self._transport, self._checkpoints, compacts=self._compacts))

    @property
    def owes(self) -> bool:
        """Whether a recorded deletion may be incomplete."""
        return self._again_at is not None

    def again_in_s(self) -> float:
        """Return the seconds until owed deletions are retried; FOREVER if none are owed."""
        return FOREVER if self._again_at is None else max(0.0, self._again_at - self._clock.now())

    def delete_owed(self) -> None:
        """Retry owed deletions, if it is time."""
        if self.again_in_s() <= 0:
            self.carry_out()

    def delete_weights(self, names: Collection[VersionName]) -> None:
        """Delete the objects of the versions that an announcement lists as gone. The next announcement lists objects
        again that cannot be deleted now."""
        if not names:
            return
        try:
            self._transport.admin.make_durable()
            for object_name in self._store.list(FOLDER):
                if parse_object_name(object_name) in names:
                    self._store.delete(object_name)
        except (WeightsError, TransportError) as error:
            log.warning("%s; old weights are deleted after the next version", error)

    def may_leave(self) -> bool:
        """Return whether the process of a finished run may leave: no deletion is owed, or none can be carried out
        soon."""
        now = self._clock.now()
        self._ended_at = now if self._ended_at is None else self._ended_at
        if not self.owes:
            return True
        if self._may_pass and now - self._ended_at < OWED_S:
            return False
        log.warning("what was given up may still be there; `rftstream resume` deletes it, also of a run that has ended")
        return True

    def after_the_end(self, log_: Log) -> bool:
        """Carry out the deletions that the trainer of a finished run has left. Return False to be called again a moment
        later.

        Called in a process that starts when the run is finished. It needs no claim, since any process may carry out
        recorded deletions."""
        if not self.owes or self.again_in_s() <= 0:
            try:
                self.said = _newest_said(log_)
            except TransportError as error:
                self._owe([error])
            else:
                self._owe([])
                self.carry_out()
        return self.may_leave()

    def _owe(self, errors: Sequence[RftError]) -> None:
        """Schedule another try after a pause if there were errors. Without errors no deletion is owed."""
        if not errors:
            self._again_at, self._pause_s = None, FIRST_PAUSE_S
            return
        level = logging.WARNING if self._pause_s == FIRST_PAUSE_S else logging.DEBUG
        for error in errors:
            log.log(level, "%s; what was given up is deleted later, next try in %g s", error, self._pause_s)
        self._again_at = self._clock.now() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._may_pass = any(
            isinstance(error, TransportError) and error.retriable and not isinstance(error, LogRefused)
            for error in errors
        )


def _newest_said(log_: Log) -> Trimmed | None:
    """Return the newest record of deletions in force. Records out of force are not the trainer's.

    TransportError while another process's open transaction may hide it."""
    in_force = log_.rule.messages(log_.control(settled=True))
    return next((message for _, message in reversed([*in_force]) if isinstance(message, Trimmed)), None)
