"""The loop of a concurrent role. Workers share partitions, and each worker finishes many records in any order.

A polled record is in hand until the step has finished it. The step's outputs for a record are a pending result. A
transaction commits several pending results, in three steps:

1. Take a snapshot of the partitions that this worker owns.
2. Choose the results whose partitions still have the assignment number under which their records were polled.
3. Commit the results with a position for each partition. All records below the position's offset are finished. The
   position's metadata tells which records above that offset are finished, too (tracker.py).

The log refuses the commit if a partition has changed hands since the snapshot. A worker drops the work of a partition
that it lost. The next owner does that work again.

A role may declare a topic for its unfinished work (`RoleSpec.keeps`). It saves this work there, in transactions of the
same kind. The next owner of a partition reads the saved work before it starts (owned_partitions.py)."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import cast

from rftstream import metrics
from rftstream.contracts import codec
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError, ForeignRecord, StopRule
from rftstream.service.dead_letters import dead_letter, reason_of
from rftstream.service.loops.commit import TransactionWriter
from rftstream.service.loops.owned_partitions import OwnedPartitions
from rftstream.service.loops.results import InHand, PendingResult, PendingResults, SavedRecords
from rftstream.service.loops.tracker import PartitionTracker
from rftstream.service.reading import begin_positions
from rftstream.service.records.in_force import CONTROL, RecordsInForce
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Log, Received, Role, RoleContext, SavingStep
from rftstream.service.role_spec import RoleSpec
from rftstream.service.service import MAX_IDLE_S, Service
from rftstream.transport.base import Member, Position, Reader, Transport

log = logging.getLogger(__name__)


class ConcurrentService(Service):
    """The loop of a worker of a concurrent role. `service_of` makes it, and a driver calls `tick` again and again.

    Each tick calls `slice` once, even before the run has a manifest. The worker joins its group once the run has a
    manifest and the step may. After `drain` it takes no new records. It gives back the records in hand that the step's
    `not_begun` names, and saves or finishes the others. `done` is true when nothing is in hand and all results are on
    the log. `close` comes last."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(ConcurrentStep, role.step)
        self.wakeups = self.step.wakeups
        self._followed = FollowedTopics(
            self.transport,
            self.spec,
            self.rule,
            take=lambda record: self.take_followed(record, self.step.follow),
            see=self.step.follow,
        )
        names = _producer_names(self.role, self.process)
        self._writer = TransactionWriter(
            self.role,
            lambda: self.transport.producer(next(names)),
            when_aborted=self.back_off,
            when_lost=self.back_off,
        )
        self._partitions: OwnedPartitions | None = None
        """The partitions of this worker; None until it has joined its group."""
        self._in_hand: dict[int, InHand] = {}
        self._next_number = 0
        self._results = PendingResults(self.clock)
        self._saved_records = SavedRecords(self.transport, self.spec.keeps)
        self._stop: StopRule | None = None
        """The rule by which the run must end, or None. It is raised once all results are on the log."""
        self._num_in_hand = metrics.IN_HAND.labels(self.role)

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        """Do one round: follow the log, poll records, let the step work, save unfinished work, and commit.

        Each part does only a little work. Return how many seconds the worker may idle: 0 if anything happened in this
        round."""
        followed = self._followed.hand_on()
        if self.view.finished is not None:
            self.done = True
            return 0.0
        if self.view.manifest is None:
            return MAX_IDLE_S
        if self._partitions is None and not self._draining and not self._followed.caught_up():
            return 0.0 if followed else MAX_IDLE_S  # otherwise the step would act on state that is long outdated
        if self._partitions is None:
            if not self._draining and not self.step.may_join():
                return 0.0 if followed else min(self.step.idle_s(), MAX_IDLE_S)
            self._partitions = self._join()
        with self._partitions.working():
            return self._work(self._partitions, followed=followed)

    def _work(self, partitions: OwnedPartitions, *, followed: bool) -> float:
        # If the log is slower than the step, results must not fill the memory.
        stops = self._draining or self._stop is not None or self._results.is_full
        taken = partitions.poll(0 if stops else max(0, self.step.room), self._drop)
        for record, assignment in partitions.records():
            self._begin(record, assignment)

        finished = self._advance()
        for done in finished:
            self._finish(done)

        saved = self._save()
        busy = bool(followed or taken or finished or saved)
        committed = self._commit_if_due(partitions, busy=busy)
        self._num_in_hand.set(len(self._in_hand) + len(self._results))

        if self._stop is not None and not self._results:
            raise self._stop
        if self._draining and not self._in_hand and not self._results:
            self.done = True
            return 0.0
        if busy or committed:
            return 0.0
        idle_s = min(self.step.idle_s(), MAX_IDLE_S)
        if self._results:
            idle_s = min(idle_s, max(self._results.due_in_s(), self.backing_off_s(), 0.001))
        return idle_s

    def _join(self) -> OwnedPartitions:
        self._writer.begin()
        member = self.transport.member(
            self.role,
            self.spec.consumes,
            name=self.process,
            session_timeout_s=self.context.config.transport.session_timeout_s,
        )
        log.info("joined the %ss", self.role)
        return OwnedPartitions(self.transport, self.spec, self.step, member)

    # ------------------------------------------------------------------------------------------ records in hand

    def _begin(self, record: Record, assignment: int) -> None:
        """Take a record in hand. If it can be decoded, give it to the step; otherwise finish it at once."""
        number = self._next_number
        self._next_number += 1
        work = InHand(record.place, assignment, record.offset)
        received = self.decode(record)
        if not isinstance(received, ContractError) and received.message is None:
            received = ContractError("$: got no value (a tombstone), expected a message", where=str(record))
        if isinstance(received, ContractError):
            self._in_hand[number] = work
            self._undecodable(Item(number, Received(record, None)), work, received)
        else:
            self.step.start(Item(number, received))
            self._in_hand[number] = work

    def _undecodable(self, item: Item, work: InHand, error: ContractError) -> None:
        """Finish a record that cannot be decoded or is not in force: with a dead letter and, if the record is not
        foreign and its ids can be read, the step's outputs. The step may keep such a record in hand."""
        record = item.received.record
        log.error("%s; message sent to dead", error)
        reason = reason_of(error)
        metrics.DEAD.labels(self.role, reason).inc()
        now = self.clock.now()
        work.letters = (dead_letter(record, role=self.role, reason=reason, detail=str(error), tries=1, now=now),)
        is_foreign = codec.is_foreign(record) or isinstance(error, ForeignRecord)
        ids = None if is_foreign else codec.ids_from_headers(record)
        if ids is None:
            self._finish(Done(item.number, ()))
        elif not self.step.hold_undecodable(item, ids, error):
            self._finish(Done(item.number, self.step.undecodable(record, ids, error)))

    def _advance(self) -> Sequence[Done]:
        if self._stop is not None:
            return ()
        try:
            with self._step_seconds.time():
                return self.step.advance()
        except StopRule as rule:
            self._stop = rule
            return ()

    def _finish(self, done: Done) -> None:
        """Make a pending result of finished records. Do nothing if their partition was lost in the meantime."""
        work = self._in_hand.pop(done.number, None)
        if work is not None:
            also = {number: self._in_hand.pop(number) for number in done.also}
            letters = (letter for one in (work, *also.values()) for letter in one.letters)
            self._results.add(done.number, work, self.encode((*done.outputs, *letters)), also=also)

    def _save(self) -> bool:
        """Make pending results of the work that the step wants saved. Save nothing while an earlier save is pending."""
        if self.spec.keeps is None or not self._results.all_finish():
            return False
        saved = cast(SavingStep, self.step).save(leaving=self._draining)
        for item in saved:
            if item.outputs:
                work, records = self._in_hand[item.number], self.encode(item.outputs)
                self._results.add(item.number, work, records, finishes=False, waits=item.waits, leaves=item.leaves)
            elif item.leaves:
                self._give_back([item.number])
        return bool(saved)

    def _drop(self, place: TopicPartition) -> None:
        """Drop the work of a partition that was lost."""
        self._give_back([number for number, work in self._in_hand.items() if work.place == place])
        lost = [result for result in self._results if result.finishes and result.work.place == place]
        self.step.drop([number for result in lost for number in result.numbers])
        self._results.drop(place)

    def _give_back(self, numbers: Collection[int]) -> None:
        """Drop records that are in hand. The next owner of their partitions polls them again."""
        self.step.drop(numbers)
        for number in numbers:
            del self._in_hand[number]

    # ------------------------------------------------------------------------------------------ committing

    def _commit_if_due(self, partitions: OwnedPartitions, *, busy: bool) -> bool:
        """Resolve a transaction that is in doubt, or commit one if it is due. Return True if a transaction was
        resolved or committed. `busy` says that something happened in this round, so more results may come soon."""
        if self.backing_off_s() > 0:
            return False
        if self._writer.is_in_doubt:
            self._writer.resolve(lambda: self._look_up(partitions))
            return True
        if not self._results:
            return False
        nothing_else = not busy and self.step.idle_s() == FOREVER
        return self._results.is_due(nothing_else=nothing_else) and self._commit(partitions)

    def _commit(self, partitions: OwnedPartitions) -> bool:
        self._saved_records.look_at_ends(self._results)
        snapshot = partitions.snapshot()
        positions, fitting = partitions.positions_after(self._results.choose(snapshot.assignment))
        records = [record for result in fitting for record in result.records]
        if not fitting or not self._writer.commit(records, positions=positions, snapshot=snapshot):
            return False
        self._acknowledge(partitions, fitting, positions)
        self.progressed()
        return True

    def _look_up(self, partitions: OwnedPartitions) -> None:
        """Find out which results of a transaction in doubt are on the log. The committed positions tell which records
        are finished. The topic for unfinished work tells which saved work was written."""
        positions = partitions.stable_positions()
        saved = self._saved_records.there(self._results)
        finished = {place: PartitionTracker(position) for place, position in positions.items()}
        written = [
            result
            for result in self._results
            if (
                not any(finished[result.work.place].deliver(offset) for offset in result.offsets)
                if result.finishes
                else all((record.partition, record.key) in saved for record in result.records)
            )
        ]
        self._acknowledge(partitions, written, positions)

    def _acknowledge(
        self,
        partitions: OwnedPartitions,
        written: Sequence[PendingResult],
        positions: Mapping[TopicPartition, Position],
    ) -> None:
        """Record that these results are on the log, with these positions."""
        partitions.committed(positions, written)
        self._results.remove(written)
        if written:
            self.step.committed(
                [result.number for result in written if not result.finishes],
                [number for result in written if result.finishes for number in result.numbers],
            )
        self._give_back([result.number for result in written if result.leaves])

    # ------------------------------------------------------------------------------------------ for the driver

    def sources(self) -> Sequence[Reader | Member]:
        """Return what to wait for between ticks: the readers, and the group member while the step has room."""
        if self._partitions is None:
            return [self._followed.reader]
        has_room = self.step.room > 0 and not self._draining and not self._results.is_full
        return [self._followed.reader, *self._partitions.sources(has_room=has_room)]

    def drain(self) -> None:
        """Take no new work, and give back the records that the step's `not_begun` names. An explorer names tasks that
        it has not begun, and a verifier names rollouts that are being scored. The loop saves or finishes the rest."""
        super().drain()
        self._give_back(self.step.not_begun())

    def close(self) -> None:
        """Close the step and the clients. Another worker takes the records that are still in hand."""
        self.step.close()
        if self._partitions is not None:
            self._partitions.close()
        self._writer.close()
        self._followed.close()

    def health(self) -> dict[str, object]:
        """Return the values for `/health`: the number of records in hand, and the values that the step reports."""
        num_partitions = len(self._partitions) if self._partitions is not None else 0
        return {
            **super().health(),
            "in_hand": len(self._in_hand),
            "partitions": num_partitions,
            **self.step.health(),
        }

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Return the low-water offsets of the partitions that this worker owns."""
        return self._partitions.low_water() if self._partitions is not None else {}


def _producer_names(role: str, process: str) -> Iterator[str]:
    """Yield a transactional id for each producer of this process. The ids are unique even if two workers have the same
    name; with equal ids the workers would fence each other for ever."""
    for number in itertools.count(1):
        yield f"{role}.{process}.{socket.gethostname()}.{os.getpid()}.{number}"


# ------------------------------------------------------------------------------------------
#
# Reading `control` and the topics that a role follows. Every worker sees all records, from the first one on or from the
# newest summary on.


class FollowedTopics:
    """The reader of `control` and of the topics that a concurrent role follows. The loop makes it when it is made
    itself. It calls `hand_on` in each slice, asks `caught_up` before the step needs the state of these topics, and
    calls `close` last."""

    def __init__(
        self,
        transport: Transport,
        spec: RoleSpec,
        rule: RecordsInForce,
        *,
        take: Callable[[Record], None],
        see: Callable[[Received], None],
    ) -> None:
        """Open the reader of `control` and of the followed topics. TransportError if the log does not answer.

        `take` is called once for each record. If it raises, it is called again with the same record. `see` gets the
        summaries of topics before any record. `rule` judges the records that come after the summaries."""
        self._transport, self._topics = transport, ("control", *spec.follows)
        positions, log, control = begin_positions(transport, spec.follows), Log(transport, rule), rule.begin_control()
        positions[CONTROL] = control.offset
        for topic in spec.summarised:
            beginning = begin_with_summary(log, topic)
            positions |= beginning.positions
            for summary in beginning.received():
                see(summary)
        self.reader = transport.reader(positions)
        self._take = take
        self._unseen = list(control.records)
        """Records that were read and not passed on. The reader does not deliver them again."""
        self._ends: dict[TopicPartition, int] | None = None
        """Ends of the topics when `caught_up` was first called. The step must see all records below them before it
        starts. None before the first call."""
        self._caught_up = False

    def hand_on(self) -> bool:
        """Pass on new records. Return whether there were any."""
        self._unseen += self.reader.poll()
        num_unseen = len(self._unseen)
        while self._unseen:
            self._take(self._unseen[0])
            del self._unseen[0]
        return bool(num_unseen)

    def caught_up(self) -> bool:
        """Return whether all records were passed on that were on the log at the first call."""
        if not self._caught_up:
            if self._ends is None:
                self._ends = {}
                for topic in self._topics:
                    self._ends |= self._transport.admin.end_offsets(topic)
            self._caught_up = not self._unseen and all(
                self.reader.position(place) >= end for place, end in self._ends.items()
            )
        return self._caught_up

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
