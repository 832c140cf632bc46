"""Concurrent roles: many records in hand, finished in any order, partitions shared with other workers.

Per transaction: take the snapshot of what is owned, keep only results whose partition is still under the assignment
they were started in, publish, and commit low-water positions with what is finished above them. A partition that is
lost takes its work with it; one that comes back starts afresh from the committed position.

A role that `keeps` a topic saves there what is not finished, under the same rules: its owner publishes it together with
the positions as they stand, and a new owner reads it before it begins (restore_partials.py).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from rftstream import metrics
from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import AssignmentLost, ContractError, ProducerLost, StopRule, TransportError
from rftstream.service.dead_letters import dead_letter
from rftstream.service.restore_partials import PartialsRestore
from rftstream.service.results import (
    MAX_TRANSACTION_BYTES,
    MAX_TRANSACTION_RECORDS,
    InHand,
    PendingResult,
    SavedRecords,
    choose_results,
    positions_with,
)
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Role, RoleContext, Saved, SavingStep
from rftstream.service.service import MAX_IDLE_S, Service, begin_positions
from rftstream.service.tracker import PartitionTracker
from rftstream.transport.base import Member, Position, Producer, Reader

log = logging.getLogger(__name__)

LINGER_S = 0.02
"""Finished results wait so long for others, so that a transaction is shared."""


class ConcurrentService(Service):
    """The loop of a worker of a concurrent role. A process (or the simulation) makes it and calls `start`, then `tick`
    again and again; the worker joins its group once the run has a manifest. `drain` gives back what was not begun and
    ends what was; `done` is true when that is on the log; `close` comes last."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(ConcurrentStep, role.step)
        self._member: Member | None = None
        self._producer: Producer | None = None
        self._num_producers = 0
        self._trackers: dict[TopicPartition, tuple[int, PartitionTracker]] = {}
        self._in_hand: dict[int, InHand] = {}
        self._next_number = 0
        self._polled: list[Record] = []
        """Delivered, and not begun."""
        self._results: list[PendingResult] = []
        self._is_unsure = False
        """Whether results may be on the log already."""
        self._recall: PartialsRestore | None = None
        self._saved_records = SavedRecords(self.transport, self.spec.keeps)
        self._oldest_result_at = 0.0
        self._stop: StopRule | None = None
        """The run's own rule ends it as soon as what is finished is on the log: the reason is told there, too."""
        self._num_in_hand = metrics.IN_HAND.labels(self.role)

    def start(self) -> None:
        """Open the reader of `control` and of what the role follows."""
        topics = ("control", *self.spec.follows)
        self._reader = self.transport.reader(begin_positions(self.transport, topics))

    def sources(self) -> Sequence[Reader | Member]:
        """Return the readers, and the membership while there is room for more."""
        sources = list(super().sources())
        if self._member is not None and self.step.room > 0 and not self._draining:
            sources.append(self._member)
        if self._recall is not None and self._recall.reader is not None:
            sources.append(self._recall.reader)
        return sources

    def drain(self) -> None:
        """What waits for something is left to a successor: it may never come, weights for one."""
        super().drain()
        self._give_back(self.step.not_begun())

    def close(self) -> None:
        """Close the step and the clients; what is in hand is another worker's."""
        self.step.close()
        if self._recall is not None:
            self._recall.close()
        if self._member is not None:
            self._member.close()
        if self._producer is not None:
            self._producer.close()
        super().close()

    def health(self) -> dict[str, object]:
        """Return what people see: what is in hand, and what the step reports."""
        return {
            **super().health(),
            "in_hand": len(self._in_hand),
            "partitions": len(self._trackers),
            **self.step.health(),
        }

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Return the low-water offsets of the partitions that this worker owns."""
        if self._member is None:
            return {}
        return {
            # Of a partition with nothing open only transaction markers may lie above the low-water.
            place: tracker.low_water if tracker.num_open else max(tracker.low_water, self._member.position(place))
            for place, (_, tracker) in self._trackers.items()
        }

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        """Follow, take records, let the step work, save and commit: each a little."""
        followed = self.follow(self.step.follow)
        if self.finished is not None:
            self.done = True
            return 0.0
        if self.manifest is None:
            return MAX_IDLE_S
        if self._member is None:
            self._join()
        taken = self._take()
        done = self._advance()
        self._collect(done)
        saved = self._save()
        committed = self._commit_if_due(idle=not (followed or taken or done or saved))
        self._num_in_hand.set(len(self._in_hand) + len(self._results))
        if self._stop is not None and not self._results:
            raise self._stop
        if self._draining and not self._in_hand and not self._results:
            self.done = True
            return 0.0
        if followed or taken or done or saved or committed:
            return 0.0
        idle = min(self.step.idle_s(), MAX_IDLE_S)
        if self._results:
            linger = max(0.0, self._oldest_result_at + LINGER_S - self.clock.now())
            idle = min(idle, max(linger, self.backing_off_s(), 0.001))
        return idle

    def _advance(self) -> Sequence[Done]:
        if self._stop is not None:
            return ()
        try:
            with self._step_seconds.time():
                return self.step.advance()
        except StopRule as rule:
            self._stop = rule
            return ()

    def _join(self) -> None:
        self._new_producer()
        self._member = self.transport.member(
            self.role,
            self.spec.consumes,
            name=self.process,
            session_timeout_s=self.context.config.transport.session_timeout_s,
        )
        log.info("joined the %ss", self.role)

    def _new_producer(self) -> None:
        if self._producer is not None:
            self._producer.close()
        self._num_producers += 1
        # Unique also if two workers were given the same name: they would fence each other for ever.
        unique = f"{self.role}.{self.process}.{socket.gethostname()}.{os.getpid()}.{self._num_producers}"
        self._producer = self.transport.producer(unique)
        self._producer.start()

    # ------------------------------------------------------------------------------------------ taking work

    def _take(self) -> bool:
        """Keeps the membership up and takes as many records as there is room for."""
        assert self._member is not None
        room = 0 if self._draining or self._stop is not None else max(0, self.step.room)
        self._polled += self._member.poll(max_records=max(0, room - len(self._polled)))
        changed = self._follow_assignment()
        self._polled = [record for record in self._polled if record.place not in changed]
        num_polled = len(self._polled)
        while self._polled:  # whoever asks the log may fail for now, and what was polled is not delivered again
            record = self._polled[0]
            entry = self._trackers.get(record.place)
            if entry is not None and entry[1].deliver(record.offset):
                self._begin(record, entry[0])
            del self._polled[0]
        return bool(num_polled or changed)

    def _follow_assignment(self) -> set[TopicPartition]:
        """Drops what was lost and positions what is new; a partition that was away begins again from its position."""
        assert self._member is not None
        owned = self._member.assignment()
        lost = [place for place, (number, _) in self._trackers.items() if owned.get(place) != number]
        for place in lost:
            self._lose(place)
        new = self._position({place: number for place, number in owned.items() if place not in self._trackers})
        if lost or new:
            metrics.REBALANCES.labels(self.role).inc()
            metrics.PARTITIONS.labels(self.role).set(len(self._trackers))
            log.info("owns %d partitions (%d lost, %d new)", len(self._trackers), len(lost), len(new))
        return {*lost, *new}

    def _position(self, new: dict[TopicPartition, int]) -> Collection[TopicPartition]:
        """Those of which the work can be begun now: nothing is delivered of the others."""
        assert self._member is not None
        if self._recall is not None and self._recall.places != new:
            self._recall.close()
            self._recall = None
        if not new:
            return ()
        if self._recall is None:
            self._recall = PartialsRestore(self.transport, self._member, new, self.spec.keeps)
        if not self._recall.advance(cast(SavingStep, self.step)):
            return ()
        for place, position in self._recall.positions.items():
            self._trackers[place] = (new[place], PartitionTracker(position))
            self._member.seek(place, position.offset)
        self._recall.close()
        self._recall = None
        return new

    def _lose(self, place: TopicPartition) -> None:
        del self._trackers[place]
        numbers = [number for number, work in self._in_hand.items() if work.place == place]
        for number in numbers:
            del self._in_hand[number]
        self.step.drop(numbers)
        self._results = [result for result in self._results if result.work.place != place]

    def _begin(self, record: Record, assignment: int) -> None:
        number = self._next_number
        self._next_number += 1
        work = InHand(record.place, assignment, record.offset)
        received = self.decode(record)
        if not isinstance(received, ContractError) and received.message is None:
            received = ContractError("$: got no value (a tombstone), expected a message", where=str(record))
        if isinstance(received, ContractError):
            self._in_hand[number] = work
            self._collect([self._undecodable(number, record, received)])
        else:
            self.step.start(Item(number, received))
            self._in_hand[number] = work

    def _undecodable(self, number: int, record: Record, error: ContractError) -> Done:
        log.error("%s; message sent to dead", error)
        metrics.DEAD.labels(self.role, "undecodable").inc()
        letter = dead_letter(
            record, role=self.role, reason="undecodable", detail=str(error), tries=1, now=self.clock.now()
        )
        ids = None if codec.is_foreign(record) else codec.ids_from_headers(record)
        if ids is None:
            return Done(number, (letter,))
        return Done(number, (*self.step.undecodable(record, ids, error), letter))

    # ------------------------------------------------------------------------------------------ committing

    def _collect(self, done: Sequence[Done]) -> None:
        for finished in done:
            work = self._in_hand.pop(finished.number, None)
            if work is not None:
                self._add(finished, work)

    def _add(self, one: Done | Saved, work: InHand) -> None:
        if not self._results:
            self._oldest_result_at = self.clock.now()
        records = self.encode(one.outputs)
        num_bytes = sum(record.num_bytes for record in records)
        leaves = isinstance(one, Saved) and one.leaves
        self._results.append(PendingResult(one.number, work, records, num_bytes, isinstance(one, Done), leaves))

    def _save(self) -> bool:
        """One after the other: nothing is handed out to be saved while something that was may not be on the log."""
        if self.spec.keeps is None or not all(result.finishes for result in self._results):
            return False
        saved = cast(SavingStep, self.step).save(leaving=self._draining)
        for one in saved:
            if one.outputs:
                self._add(one, self._in_hand[one.number])
            elif one.leaves:
                self._give_back([one.number])
        return bool(saved)

    def _give_back(self, numbers: Collection[int]) -> None:
        self.step.drop(numbers)
        for number in numbers:
            del self._in_hand[number]

    def _commit_if_due(self, *, idle: bool) -> bool:
        if self.backing_off_s() > 0:
            return False
        if self._is_unsure:
            self._settle()
            return True
        if not self._results:
            return False
        num_bytes = sum(result.num_bytes for result in self._results)
        waited = self.clock.now() - self._oldest_result_at
        nothing_else = idle and self.step.idle_s() == FOREVER
        if not (
            nothing_else
            or waited >= LINGER_S
            or num_bytes >= MAX_TRANSACTION_BYTES
            or len(self._results) >= MAX_TRANSACTION_RECORDS
        ):
            return False
        return self._commit()

    def _commit(self) -> bool:
        assert self._member is not None and self._producer is not None
        self._saved_records.look_at_ends(self._results)
        snapshot = self._member.snapshot()
        positions, taken = positions_with(
            choose_results(self._results, snapshot.assignment), self._trackers, self._member
        )
        if not taken:
            return False
        records = [record for result in taken for record in result.records]
        try:
            with self._commit_seconds.time():
                self._producer.commit(records, positions=positions, snapshot=snapshot)
        except AssignmentLost as error:
            metrics.TRANSACTIONS.labels(self.role, "refused").inc()
            log.info("%s; its work is dropped", error)
            return False
        except ProducerLost as error:
            metrics.TRANSACTIONS.labels(self.role, "lost").inc()
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
        self._acknowledge(taken, positions)
        self.progressed()
        return True

    def _acknowledge(self, taken: Sequence[PendingResult], positions: Mapping[TopicPartition, Position]) -> None:
        """These are on the log, with these positions."""
        for place, position in positions.items():
            offsets = [result.work.offset for result in taken if result.finishes and result.work.place == place]
            self._trackers[place][1].committed(position, offsets)
        gone = {id(result) for result in taken}
        self._results = [result for result in self._results if id(result) not in gone]
        self._give_back([result.number for result in taken if result.leaves])
        self._oldest_result_at = self.clock.now()

    def _settle(self) -> None:
        """The commit may have happened: the committed positions tell which results are on the log, and the log itself
        what was saved. Nothing is published before that is known."""
        assert self._member is not None
        self._new_producer()
        positions = self._member.committed(list(self._trackers))
        there = self._saved_records.there(self._results)
        known = {place: PartitionTracker(position) for place, position in positions.items()}
        done = [
            result
            for result in self._results
            if (
                not known[result.work.place].deliver(result.work.offset)
                if result.finishes
                else all((record.partition, record.key) in there for record in result.records)
            )
        ]
        self._acknowledge(done, positions)
        self._is_unsure = False
