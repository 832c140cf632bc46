"""Single roles: one in force per run. Claim, recover from the log, then one transaction after the other.

Start (PROTOCOL "Single"): `Producer.start` fences every predecessor; *then* `control` is read to its end; then the
claim (newest epoch + 1) is the first transaction; only then the role reads its own state. A lost producer goes the
same way again, unless somebody else has claimed the role meanwhile.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from rftstream import metrics
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, DesiredState
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError, ForeignRecord, ProducerLost, RftError, TakenOver, TransportError
from rftstream.service.control_view import read_control
from rftstream.service.dead_letters import dead_letter
from rftstream.service.reading import read_to_ends
from rftstream.service.role import Log, Publish, Received, Role, RoleContext, SingleStep, SingleTransaction
from rftstream.service.service import MAX_IDLE_S, Service, begin_positions
from rftstream.transport.base import Producer

log = logging.getLogger(__name__)

TRANSACTIONS_A_TICK = 16
SLICE_S = 0.1
"""After so long a tick begins no further transaction: signals and `control` are looked at between two ticks."""

PRODUCER_TIMEOUT_S = 60.0


class SingleService(Service):
    """The loop of a single role. A process (or the simulation) makes it and calls `start`, then `tick` again and again:
    it claims the role, recovers, and works until the run is finished, somebody else takes over (TakenOver), or `drain`
    was called and nothing is pending. `close` comes last."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(SingleStep, role.step)
        self.after_the_end = role.after_the_end
        self.claim: Claim | None = None
        self._tried: Claim | None = None
        """The claim that it wrote last; after an unknown commit only the log can tell whether it is there."""
        self._known_epoch: int | None = None
        """Of its own claim, before that of the newest when it began: whoever has a newer one took over."""
        self._producer: Producer | None = None
        self._pending: SingleTransaction | None = None
        self._letters: list[Publish] = []
        self._buried: set[bytes] | None = None
        """Keys of this role's letters on `dead`, once they have to be known."""
        self._recovered = False
        self._consumed: list[TopicPartition] = []
        self._full = False
        self._fenced_starts = 0

    def start(self) -> None:
        """Open the reader of `control`; the rest is read once the role is claimed."""
        self._reader = self.transport.reader(begin_positions(self.transport, ("control",)))

    def close(self) -> None:
        """Close the step and the clients."""
        self.step.close()
        if self._producer is not None:
            self._producer.close()
        super().close()

    def health(self) -> dict[str, object]:
        """Return what people see: the epoch, and what the step reports."""
        epoch = self.claim.epoch if self.claim else None
        return {**super().health(), "epoch": epoch, **self.step.health()}

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Return where the reader stands on the topics that the role consumes."""
        if not self._recovered or self._reader is None:
            return {}
        return {place: self._reader.position(place) for place in self._consumed}

    def drain(self) -> None:
        """Leave now if nothing is begun, else as soon as what was begun is on the log."""
        super().drain()
        if self._is_free():
            self._leave()
        else:
            self.step.paused(True)  # what it has begun it ends

    def _is_free(self) -> bool:
        return self._pending is None and not (self._recovered and self.step.busy)

    def _leave(self) -> None:
        if self._recovered:
            self.step.leave()
        self.done = True

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        """Claim and recover if need be; then read, and publish transactions for a while."""
        if not self._recovered:
            wait = self._take_over()
            if wait:
                return wait
        began = self.clock.now()
        absorbed = self._absorb()
        if self._finished_for_us():
            self.done = True
            return 0.0
        published = 0
        if self.backing_off_s() <= 0:
            while published < TRANSACTIONS_A_TICK and self._publish_next():
                published += 1
                ends = self._draining or self.step.done
                if ends or self.step.full != self._full or self.clock.now() - began > SLICE_S:
                    break
        if self._draining and self._is_free():
            self._leave()
            return 0.0
        if not self._recovered or absorbed or published:
            return self.backing_off_s()
        return max(min(self.step.idle_s(), MAX_IDLE_S), self.backing_off_s())

    def _finished_for_us(self) -> bool:
        """When the run is finished everybody leaves at once, but for who says that it has something left to do."""
        return self.step.done or (self.finished is not None and not self.step.outlives_the_run)

    # ------------------------------------------------------------------------------------------ claiming

    def _take_over(self) -> float:
        """Claims the role and recovers; seconds to wait if that has to be tried again."""
        if self.backing_off_s() > 0:
            return self.backing_off_s()
        if self.claim is None and not self._may_start():
            return MAX_IDLE_S
        if self.done:
            return 0.0
        try:
            self._claim()
        except ProducerLost as error:
            self._read_control()
            self._check_taken_over()
            self._fenced_starts += 1
            wait = (derive_seed(self.context.config.run.seed, self.process, self._fenced_starts) % 1000) / 1000
            log.info("%s before the claim was on the log; starting again in %.2f s", error, wait)
            self._retry_at = self.clock.now() + wait
            return wait or 0.001
        self._recover()
        return 0.0

    def _may_start(self) -> bool:
        """The feeder makes the run; everybody else waits for its manifest. Nobody starts on a finished run."""
        self._read_control()
        if self.finished is not None and not self.step.outlives_the_run:
            last_work = self.after_the_end
            self.done = last_work is None or last_work(Log(self.transport))
            return self.done
        return self.manifest is not None or self.spec.makes_the_run

    def _claim(self) -> None:
        if self._known_epoch is not None:
            self._read_control()
            self._check_taken_over()  # before a start would fence whoever did
        if self._producer is not None:
            self._producer.close()
        name = f"{self.context.folder.run_id}.{self.role}"
        self._producer = self.transport.producer(name, timeout_s=PRODUCER_TIMEOUT_S)
        self._producer.start()  # Also ends what a predecessor has open, which nobody else could read past.
        # Another role's open transaction must not hide a claim: two processes would be in force under one epoch.
        self._read_control(settled=True)
        before = self.claims.get(self.role)
        if self._known_epoch is None:
            self._known_epoch = before.epoch if before else 0
        self._check_taken_over()
        self._tried = claim = Claim(
            role=self.role,
            epoch=before.epoch + 1 if before else 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=self.process,
            claimed_at=self.clock.now(),
        )
        self._producer.commit(self.encode([Publish("control", 0, claim)], epoch=claim.epoch))
        self.claim = claim
        self._known_epoch = claim.epoch
        self.claims[self.role] = claim
        self.transport.admin.make_durable()  # no epoch comes twice: objects have names by it
        if before is not None:
            log.info(
                "%s takes over from %s, process %d on %s (epoch %d -> %d)",
                self.process,
                before.process,
                before.pid,
                before.host,
                before.epoch,
                claim.epoch,
            )

    def _read_control(self, *, settled: bool = False) -> None:
        """`control` to its end; what is there now decides who is in force."""
        assert self._reader is not None
        ends = self.transport.admin.end_offsets("control", settled=settled)
        for records in read_to_ends(self.transport, self._reader, ends):
            with self._or_again(records) as taken:
                for record in records:
                    if record.topic == "control":
                        self._absorb_control(self.decode(record))
                    taken.append(record)

    def _absorb_control(self, received: Received | ContractError) -> None:
        if isinstance(received, ContractError):
            log.error("%s; skipped", received)
            return
        self.control(received)

    @contextmanager
    def _or_again(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Of what was polled, `control` is read again from the first record on that was not taken."""
        taken: list[Record] = []
        try:
            yield taken
        except TransportError:
            left = next((record for record in records[len(taken) :] if record.topic == "control"), None)
            if left is not None and self._reader is not None:
                self._reader.seek(left.place, left.offset)
            raise

    def _check_taken_over(self) -> None:
        """Raises TakenOver if somebody else's claim is newer than what this process knows."""
        newest, known = self.claims.get(self.role), self._known_epoch or 0
        if newest is None or newest.epoch <= known:
            return
        if newest == self._tried:
            self._known_epoch = newest.epoch
            return
        raise TakenOver(
            f"{self.role}: {newest.process}, process {newest.pid} on {newest.host}, took over with epoch "
            f"{newest.epoch} (this one knew {known}); this process ends"
        )

    @contextmanager
    def _unless_taken_over(self) -> Iterator[None]:
        """What looks like a broken log or a rule to stop by may be the view of a process that was away: its successor
        has gone on meanwhile, and deleted what itself needs no more."""
        try:
            yield
        except RftError as error:
            if error.retriable or isinstance(error, TakenOver):
                raise
            self._recovered = False  # should the log not answer now, everything is read again
            newest = read_control(self.transport, settled=True).claims.get(self.role)
            if newest is not None:
                self.claims[self.role] = newest
            self._check_taken_over()
            raise

    def _recover(self) -> None:
        assert self.claim is not None
        self._pending = None
        self._letters = []
        self._buried = None
        with self._unless_taken_over():
            positions: Mapping[TopicPartition, int] = self.step.recover(Log(self.transport, self.rule), self.claim)
        if self._reader is not None:
            control = {place: self._reader.position(place) for place in self.transport.admin.end_offsets("control")}
            self._reader.close()
        self._reader = self.transport.reader({**control, **positions})
        self._consumed = [place for place in positions if place.topic in self.spec.consumes]
        self._full = False
        self._tell()
        self._recovered = True
        self.progressed()
        log.info("in force with epoch %d", self.claim.epoch)

    # ------------------------------------------------------------------------------------------ working

    def _absorb(self) -> bool:
        assert self._reader is not None
        if self.step.full != self._full:
            self._full = self.step.full
            (self._reader.pause if self._full else self._reader.resume)(self._consumed)
        records = self._reader.poll()
        try:
            with self._or_again(records) as taken, self._unless_taken_over():
                for record in records:
                    self._take(record)
                    taken.append(record)
        except TransportError:
            self._recovered = False  # what was polled is not delivered again, so everything is read anew
            raise
        if any(record.topic == "control" for record in records):
            self._check_taken_over()
            self._tell()
        return bool(records)

    def _tell(self) -> None:
        """What the run should do."""
        self.step.paused(self._draining or self.desired is DesiredState.paused)
        if self.desired is DesiredState.draining:
            self.step.draining()

    def _take(self, record: Record) -> None:
        received = self.decode(record)
        if record.topic == "control":
            self._absorb_control(received)
            if isinstance(received, ContractError):
                return
        if isinstance(received, ContractError):
            self._bury(record, received)
        else:
            for foreign in self.step.absorb(received) or ():
                self._bury(foreign.record, ForeignRecord(f"foreign: {foreign.why}", where=str(foreign.record)))

    def _bury(self, record: Record, error: ContractError) -> None:
        reason = "foreign" if isinstance(error, ForeignRecord) else "undecodable"
        letter = dead_letter(record, role=self.role, reason=reason, detail=str(error), tries=1, now=self.clock.now())
        if record.topic not in self.spec.consumes:
            log.error("%s; passed over", error)
        elif not self._is_buried(letter):
            log.error("%s; message sent to dead", error)
            metrics.DEAD.labels(self.role, reason).inc()
            self._letters.append(letter)
        if not codec.is_foreign(record) and not isinstance(error, ForeignRecord):
            self.step.undecodable(record, error)

    def _is_buried(self, letter: Publish) -> bool:
        """Whether `dead` has it: what lies behind the committed position is read again after a restart."""
        if self._buried is None:
            mine = self.role.encode()
            self._buried = {
                record.key or b""
                for record in Log(self.transport).read("dead", bodies=False, settled=True)
                if record.header("role") == mine
            }
        assert letter.message is not None
        return codec.key_of(letter.message) in self._buried

    def _publish_next(self) -> bool:
        """One slice of the step's work and its transaction; False when there is nothing to publish now."""
        if self._pending is None:
            transaction = self._advance()
            if transaction is None and self._letters:
                transaction = SingleTransaction(())
            if transaction is None:
                return False
            self._pending = SingleTransaction((*transaction.outputs, *self._letters), transaction.positions)
            self._letters = []
        return self._commit(self._pending)

    def _advance(self) -> SingleTransaction | None:
        try:
            with self._step_seconds.time(), self._unless_taken_over():
                return self.step.advance()
        except TransportError:
            self._recovered = False  # what it has decided so far nobody knows, and it would not decide it again
            raise

    def _commit(self, transaction: SingleTransaction) -> bool:
        assert self._producer is not None and self.claim is not None
        records = self.encode(transaction.outputs, epoch=self.claim.epoch)
        try:
            with self._commit_seconds.time():
                self._producer.commit(records, positions=transaction.positions, group=self.role)
        except ProducerLost as error:
            metrics.TRANSACTIONS.labels(self.role, "lost").inc()
            log.warning("%s; looking at the log", error)
            self._recovered = False
            return False
        except TransportError as error:
            if not error.retriable:
                raise
            metrics.TRANSACTIONS.labels(self.role, "aborted").inc()
            self.back_off(error)
            return False
        metrics.TRANSACTIONS.labels(self.role, "committed").inc()
        self.count_out(records)
        self._pending = None
        self.step.committed(transaction)
        self.progressed()
        return True
