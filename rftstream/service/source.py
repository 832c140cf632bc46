"""Sources: roles that write without consuming a topic, woken by a socket or a future as well as by the log.

Per transaction: the step says what is written next, the loop notes where the partitions end, commits, and tells the
step. When the result of a commit is unknown, the loop looks for the records on the log before it writes anything else.
Before the first transaction the step has seen everything on the topics that it follows, also what a predecessor had in
the middle of a commit when it died. A source that follows its own output therefore knows what it has written.

Any number of workers write at the same time, each under a transactional id of its own; nobody claims the role.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import cast

from rftstream import metrics
from rftstream.contracts.control import DesiredState
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import ProducerLost, TransportError
from rftstream.service.output_lookup import OutputLookup
from rftstream.service.role import Publish, Role, RoleContext, SourceStep
from rftstream.service.service import MAX_IDLE_S, Service, begin_positions
from rftstream.transport.base import Producer

log = logging.getLogger(__name__)

LOG_LOOK_S = 0.2
"""Longest wait for the step's own wake-ups, in seconds; the log is looked at between two of them."""


class SourceService(Service):
    """Drives a SourceStep. A process or a scheduler makes it, calls `start`, then `tick` and `wait` in turns until it
    is `done`, then `close`."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(SourceStep, role.step)
        # Unique also if two workers were given the same name: they would fence each other for ever.
        name = f"{self.role}.{self.process}.{socket.gethostname()}.{os.getpid()}"
        self._producer: Producer = self.transport.producer(name)
        self._producer_started = False
        self._lookup = OutputLookup(self.transport, bodies=True)
        self._ends: dict[TopicPartition, int] | None = None
        """What has to be read before the first transaction."""
        self._caught_up = False
        self._pending: tuple[Publish, ...] = ()
        """What is written next; kept until it is on the log."""
        self._pending_records: list[NewRecord] = []
        self._is_unsure = False
        """Whether what is pending may be on the log already."""

    def start(self) -> None:
        self._reader = self.transport.reader(begin_positions(self.transport, ("control", *self.spec.follows)))

    def drain(self) -> None:
        super().drain()
        self.step.draining()

    def close(self) -> None:
        self.step.close()
        self._producer.close()
        super().close()

    def health(self) -> dict[str, object]:
        return {**super().health(), "pending": len(self._pending), **self.step.health()}

    def wait(self, timeout_s: float) -> None:
        """Block until the log or one of the step's wake-ups has something, or the time is up."""
        wakeups = self.step.wakeups() if self._listens() else ()
        if not wakeups:
            super().wait(timeout_s)
            return
        poll = select.poll()
        for wakeup in wakeups:
            poll.register(wakeup.fileno(), select.POLLIN)
        # Not every transport has a file descriptor to wait on, so the next tick looks at the log.
        poll.poll(min(timeout_s, LOG_LOOK_S) * 1000)

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        followed = self.follow(self.step.follow)
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
        """Whether the step may begin something new: a run that pauses or ends takes nothing in."""
        return self.desired is DesiredState.running

    def _listens(self) -> bool:
        """Whether the step would read from its wake-ups in the next tick; else they would end every wait at once."""
        return self._caught_up and self._takes() and not self._pending and self.backing_off_s() <= 0

    def _catch_up(self) -> bool:
        """Return whether all that stood on the followed topics when the worker started has been seen.

        A predecessor may have died in the middle of a commit: its transaction is waited for."""
        if self._caught_up:
            return True
        assert self._reader is not None
        if self._ends is None:
            ends = dict(self.transport.admin.end_offsets("control"))
            for topic in self.spec.follows:
                ends |= self.transport.admin.end_offsets(topic, settled=True)
            self._ends = ends
        self._caught_up = all(self._reader.position(place) >= end for place, end in self._ends.items())
        return self._caught_up

    # ------------------------------------------------------------------------------------------ committing

    def _publish_next(self) -> bool:
        """One transaction; False when there is nothing to write now."""
        if self._is_unsure:
            return self._settle()
        if not self._pending and self._takes():
            with self._step_seconds.time():
                self._pending = self.step.advance()
            self._pending_records = self.encode(self._pending)
        return bool(self._pending) and self._commit()

    def _commit(self) -> bool:
        records = self._pending_records
        if not self._producer_started:
            self._producer.start()
            self._producer_started = True
        self._lookup.note_ends({TopicPartition(record.topic, record.partition) for record in records})
        try:
            with self._commit_seconds.time():
                self._producer.commit(records)
        except ProducerLost as error:
            metrics.TRANSACTIONS.labels(self.role, "lost").inc()
            self._producer_started = False
            self._is_unsure = True
            self.back_off(error)
            return False
        except TransportError as error:
            if not error.retriable:
                raise
            metrics.TRANSACTIONS.labels(self.role, "aborted").inc()
            self.back_off(error)
            return False
        metrics.TRANSACTIONS.labels(self.role, "committed").inc()
        self.count_out(records)
        self._acknowledge()
        return True

    def _settle(self) -> bool:
        """Find out whether the last commit is on the log. Starting the producer first ends what it had open."""
        self._producer.start()
        self._producer_started = True
        if self._lookup.holds(self._pending_records):
            self._acknowledge()
        self._is_unsure = False
        return True

    def _acknowledge(self) -> None:
        """Tell the step that what was pending is on the log, for whoever it answers to: it must survive from here."""
        self._is_unsure = True  # should the log not answer now, it is looked for again
        self.transport.admin.make_durable()
        self._is_unsure = False
        outputs, self._pending, self._pending_records = self._pending, (), []
        self.step.committed(outputs)
        self.progressed()
