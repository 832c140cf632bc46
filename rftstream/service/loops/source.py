"""The loop of a source: a role that writes without consuming a topic. A socket or a future wakes it as well as the log.

The step says what is written next, the loop commits it, and tells the step. If the commit was lost, the loop looks for
the records on the log before it writes anything else. It knows where to look, since before each commit it notes where
the partitions end.

Before the first transaction the step has seen everything on the topics that it follows, also what a predecessor had in
the middle of a commit when it died. A source that follows its own output therefore knows what it has written.

Any number of workers write at the same time, each under a transactional id of its own; nobody claims the role.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import cast

from rftstream.contracts.control import DesiredState
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.service.followed import FollowedTopics
from rftstream.service.loops.commit import TransactionWriter
from rftstream.service.loops.output_lookup import OutputLookup
from rftstream.service.role import Publish, Role, RoleContext, SourceStep
from rftstream.service.service import MAX_IDLE_S, Service
from rftstream.transport.base import Member, Producer, Reader


class SourceService(Service):
    """The loop of a worker of a source. `service_of` makes it, and a driver calls `tick` and `wait` in turns.

    The first ticks wait for the run's manifest, and until the step has seen what stood on the followed topics. The
    others write what the step returns. `drain` lets the step end what it has begun; `done` is true when that is on the
    log. `close` comes last."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(SourceStep, role.step)
        self._followed = FollowedTopics(
            self.transport,
            self.spec.follows,
            lambda record: self.take_followed(record, self.step.follow),
            rule=self.rule,
            summarised=self.spec.summarised,
            see=self.step.follow,
        )
        self._writer = TransactionWriter(
            self.role, self._open_producer, when_aborted=self.back_off, when_lost=self.back_off
        )
        self._lookup = OutputLookup(self.transport, bodies=True)
        self._caught_up = False
        """Whether the step has seen all that stood on the followed topics when the manifest was there."""
        self.wakeups = lambda: self.step.wakeups() if self._listens() else ()
        self._pending: tuple[Publish, ...] = ()
        """Records of the next transaction, kept until they are on the log."""
        self._pending_records: list[NewRecord] = []

    def _open_producer(self) -> Producer:
        # The id is unique even if two workers have the same name: otherwise they would fence each other for ever.
        return self.transport.producer(f"{self.role}.{self.process}.{socket.gethostname()}.{os.getpid()}")

    def sources(self) -> Sequence[Reader | Member]:
        """Return the reader; `wait` looks at the step's own wake-ups, too."""
        return [self._followed.reader]

    def drain(self) -> None:
        """Take nothing more in from outside, and end what was taken in."""
        super().drain()
        self.step.draining()

    def close(self) -> None:
        """Close the step and the clients."""
        self.step.close()
        self._writer.close()
        self._followed.close()

    def health(self) -> dict[str, object]:
        """Return what people see: how much is being written, and what the step reports."""
        return {**super().health(), "pending": len(self._pending), **self.step.health()}

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        """Follow the log, and write what the step has to be written."""
        followed = self._followed.hand_on()
        if self.finished is not None:
            self.done = True
            return 0.0
        if self._draining and (self.manifest is None or not self._caught_up):
            self.done = True  # it has taken nothing in yet
            return 0.0
        if self.manifest is None:
            return MAX_IDLE_S
        if self.backing_off_s() > 0:
            return min(self.backing_off_s(), MAX_IDLE_S)
        if not self._catch_up():
            return 0.0 if followed else MAX_IDLE_S
        published = self._publish_next()
        if self._draining and not self._pending and not (self._takes() and self.step.busy):
            self.done = True
            return 0.0
        if followed or published:
            return 0.0
        if self._pending or not self._takes():
            return min(self.backing_off_s() or MAX_IDLE_S, MAX_IDLE_S)
        return min(self.step.idle_s(), MAX_IDLE_S)

    def _takes(self) -> bool:
        """Return whether the step may begin something new: a run that pauses or ends takes nothing in."""
        return self.desired is DesiredState.running

    def _listens(self) -> bool:
        """Return whether the step will read from its wake-ups in the next tick. If it will not, they would end every
        wait at once."""
        return self._caught_up and self._takes() and not self._pending and self.backing_off_s() <= 0

    def _catch_up(self) -> bool:
        """Return whether all that stood on the followed topics when the worker started has been seen.

        A predecessor may have died in the middle of a commit: its transaction is waited for."""
        self._caught_up = self._caught_up or self._followed.caught_up(settled=True)
        return self._caught_up

    # ------------------------------------------------------------------------------------------ committing

    def _publish_next(self) -> bool:
        """Write one transaction, or resolve one that is in doubt. Return False if nothing was written or found out."""
        if self._writer.is_in_doubt:
            self._writer.resolve(self._look_up)
            return True
        if not self._pending and self._takes():
            with self._step_seconds.time():
                self._pending = self.step.advance()
            self._pending_records = self.encode(self._pending)
        return bool(self._pending) and self._commit()

    def _commit(self) -> bool:
        records = self._pending_records
        if not self._writer.has_begun:
            self._writer.begin()
        self._lookup.note_ends({TopicPartition(record.topic, record.partition) for record in records})
        if not self._writer.commit(records, positions={}):
            return False
        self._acknowledge()
        return True

    def _look_up(self) -> None:
        """Find out whether a transaction in doubt is on the log."""
        if self._lookup.holds(self._pending_records):
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell the step that what was pending is on the log. The step answers others then, so it must survive."""
        with self._writer.in_doubt():  # should the log not answer now, the records are looked for again
            self.transport.admin.make_durable()
        outputs, self._pending, self._pending_records = self._pending, (), []
        self.step.committed(outputs)
        self.progressed()
