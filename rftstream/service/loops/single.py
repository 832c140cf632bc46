"""The loop of a single role: one process holds the role, and writes one transaction after the other.

The start has four steps, in this order (docs/architecture.md, "Claims"):

1. Start the producer. That fences every predecessor, so that none of them can commit any more.
2. Read `control` to its end. A claim that is newer than this process expects means that another process has taken over.
3. Claim the role with the next epoch, as the first transaction.
4. Recover: the step reads its own state from the log.

A worker whose commit was lost takes these steps again. So does a worker that got no answer from the log in the middle
of its work, since its step may have decided only half of something.

A lost commit may mean that a successor has started its producer and has not written its claim yet. So the worker first
waits for such a claim, longer each time. If it claimed the role again at once, it would fence its successor."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, DesiredState, RunState
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError, ForeignRecord, ProducerLost, TransportError
from rftstream.service.dead_letters import UnsentLetters
from rftstream.service.loops.commit import TransactionWriter
from rftstream.service.loops.single_reader import SingleReader
from rftstream.service.records.summaries import SummaryWriter, summarised_by
from rftstream.service.role import Log, Publish, Received, Role, RoleContext, SingleStep, SingleTransaction
from rftstream.service.role_claim import GivesWay, RoleClaim
from rftstream.service.service import MAX_IDLE_S, Service
from rftstream.transport.base import Member, Reader

log = logging.getLogger(__name__)

TRANSACTIONS_A_TICK = 16
"""Most transactions in one tick."""

SLICE_S = 0.1
"""Seconds after which a tick begins no further transaction, so that signals and `control` are checked between two
ticks."""

FINISH_S = 10.0
"""Seconds for which a worker that is told to leave waits for work in progress. The rest of its time is for saving what
is done."""

PRODUCER_TIMEOUT_S = 60.0
"""Seconds after which the log aborts an open transaction. The start of a successor aborts it at once."""


@dataclass(frozen=True, slots=True)
class InForce:
    """The loop's state while it holds the role. SingleService makes it after a recovery, and drops it before the next
    one."""

    claim: Claim
    letters: UnsentLetters


class SingleService(Service):
    """The loop of a single role. `service_of` makes it, and a driver calls `tick` again and again.

    The first ticks wait for the run's manifest, claim the role, and recover. Later ticks read and publish, until one of
    three things happens: the run is finished, another process takes over (TakenOver), or `drain` was called and nothing
    is pending. `close` comes last."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        super().__init__(role, context)
        self.step = cast(SingleStep, role.step)
        self._after_the_end = role.after_the_end
        self._reader = SingleReader(self.transport, self.rule, self._take_control)
        self._claim = RoleClaim(self.role, context, self._reader, self.claims)
        self._writer = TransactionWriter(
            self.role,
            lambda: self.transport.producer(f"{context.folder.run_id}.{self.role}", timeout_s=PRODUCER_TIMEOUT_S),
            when_aborted=self.back_off,
            when_lost=lambda error: log.warning(
                "%s; looking at the log for who took over, for %g s", error, self._gives_way.next(self.clock.now())
            ),
        )
        self._summaries = SummaryWriter(self.transport, summarised_by(self.role), context.summary_every)
        self._in_force: InForce | None = None
        """State while the role is held; None if the role must be claimed, or claimed again."""
        self._pending: SingleTransaction | None = None
        """The transaction that must be on the log before the step is asked for another."""
        self._fenced_starts = 0
        self._leave_at = math.inf
        self._gives_way = GivesWay()

    def sources(self) -> Sequence[Reader | Member]:
        """Return the reader."""
        return [self._reader.reader]

    def close(self) -> None:
        """Close the step and the clients."""
        self.step.close()
        self._writer.close()
        self._reader.close()

    def health(self) -> dict[str, object]:
        """Return the values for `/health`: the epoch, and the values that the step reports."""
        claim = self._claim.newest
        return {**super().health(), "epoch": claim.epoch if claim else None, **self.step.health()}

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Return the read positions of the topics that the role consumes."""
        return self._reader.positions() if self._in_force is not None else {}

    def drain(self) -> None:
        """Leave now if no work was begun. Otherwise leave as soon as that work is on the log."""
        super().drain()
        self._leave_at = self.clock.now() + FINISH_S
        if not self._leave_if_free():
            self.step.paused(True)  # the step finishes the work that it has begun

    def pause_run(self, reason: str) -> None:
        """Ask for a pause of the whole run with the next transaction, unless the run is paused already."""
        if self._in_force is not None and self.view.desired is DesiredState.running:
            state = RunState(state=DesiredState.paused, by=self.role, reason=reason, since=self.clock.now())
            self._in_force.letters.put(Publish("control", 0, state))

    def _leave_if_free(self) -> bool:
        """Leave, unless the step has begun work that will end in a transaction. Return whether the worker has left."""
        in_force = self._in_force is not None
        if self._pending is not None or (in_force and self.step.busy):
            return False
        if in_force:
            self.step.leave()
        self.done = True
        return True

    # ------------------------------------------------------------------------------------------ the loop

    def slice(self) -> float:
        """Claim the role and recover if necessary. Then read, and publish transactions for a while."""
        in_force = self._in_force or self._take_over()
        if isinstance(in_force, float):
            return in_force
        began = self.clock.now()
        if began >= self._leave_at and self.step.busy:
            self.step.leave()
        absorbed = self._absorb(in_force)
        if self.step.done or (self.view.finished is not None and not self.step.outlives_the_run):
            self.done = True
            return 0.0
        published = 0
        if self.backing_off_s() <= 0:
            while published < TRANSACTIONS_A_TICK and self._publish_next(in_force):
                published += 1
                ends = self._draining or self.step.done
                if ends or self.step.full != self._reader.is_paused or self.clock.now() - began > SLICE_S:
                    break
        if self._draining and self._leave_if_free():
            return 0.0
        if self._in_force is None or absorbed or published or self._pending is not None:
            return self.backing_off_s()
        return max(min(self.step.idle_s(), MAX_IDLE_S), self.backing_off_s())

    # ------------------------------------------------------------------------------------------ taking the role

    def _take_over(self) -> InForce | float:
        """Claim the role and recover. If that is not possible yet, return the seconds to wait."""
        if self.backing_off_s() > 0:
            return self.backing_off_s()
        if (left_s := self._gives_way.until - self.clock.now()) > 0:
            self._claim.look_before_start()
            return left_s  # a claim ends the wait early
        if self._claim.newest is None and not self._may_claim():
            return 0.0 if self.done else MAX_IDLE_S
        try:
            self._claim_anew()
        except ProducerLost as error:
            self._reader.read_control()
            self._claim.check()
            self._fenced_starts += 1
            wait = (derive_seed(self.context.config.run.seed, self.process, self._fenced_starts) % 1000) / 1000
            log.info("%s before the claim was on the log; starting again in %.2f s", error, wait)
            self._retry_at = self.clock.now() + wait
            return wait or 0.001
        return self._in_force or 0.0

    def _may_claim(self) -> bool:
        """Return whether the run exists and needs the role. Set `done` if it does not need the role.

        A finished run needs only a role that outlives it. A role with work after the end does that work without a
        claim, in as many tries as it takes. The role that makes the run need not wait for the manifest."""
        self._reader.read_control()
        if self.view.finished is not None and self._after_the_end is not None:
            self.done = self._after_the_end(Log(self.transport))
            return False
        if self.view.finished is not None and not self.step.outlives_the_run:
            self.done = True
            return False
        if self.view.manifest is not None:
            self.step.check(self.view.manifest)
        return self.view.manifest is not None or self.spec.makes_the_run

    def _claim_anew(self) -> None:
        """Start the producer, claim the role, and recover. Recovery also tells what became of a transaction in
        doubt."""
        self._claim.look_before_start()
        self._writer.resolve(self._claim_and_recover)

    def _claim_and_recover(self) -> None:
        """Claim the role and let the step recover. The producer must have been started."""
        claim = self._claim.take(
            lambda claim: self._writer.producer.commit(self.encode([Publish("control", 0, claim)], epoch=claim.epoch))
        )
        self._pending = None
        self._summaries.begin()
        with self._claim.unless_taken_over():
            positions = self.step.recover(Log(self.transport, self.rule), claim)
        self._reader.read_from(positions, self.spec.consumes)
        _tell(self.step, self.view.desired, is_leaving=self._draining)
        self._in_force = InForce(claim, UnsentLetters(self.transport, self.role, self.clock))
        self.progressed()
        log.info("in force with epoch %d", claim.epoch)

    # ------------------------------------------------------------------------------------------ reading

    def _absorb(self, in_force: InForce) -> bool:
        """Read new records from the log. Return whether there were any."""
        records = self._reader.poll(full=self.step.full)
        try:
            with self._reader.taking(records) as taken, self._claim.unless_taken_over():
                for record in records:
                    self._take(in_force, record)
                    taken.append(record)
        except TransportError:
            self._in_force = None  # polled records are not delivered again, so the step recovers
            raise
        if any(record.topic == "control" for record in records):
            self._claim.check()
            _tell(self.step, self.view.desired, is_leaving=self._draining)
        return bool(records)

    def _take(self, in_force: InForce, record: Record) -> None:
        received = self._take_control(record) if record.topic == "control" else self.decode(record)
        if received is None:
            return
        if isinstance(received, ContractError):
            self._put_aside(in_force, record, received)
            return
        for foreign in self.step.absorb(received) or ():
            error = ForeignRecord(f"foreign: {foreign.why}", where=str(foreign.record))
            self._put_aside(in_force, foreign.record, error)

    def _take_control(self, record: Record) -> Received | None:
        """Apply a record of `control`. Return None if it cannot be decoded or is not in force."""
        received = self.decode(record)
        if isinstance(received, ContractError):
            log.error("%s; skipped", received)
            return None
        self.control(received)
        return received

    def _put_aside(self, in_force: InForce, record: Record, error: ContractError) -> None:
        """Dead-letter a record that cannot be processed, if the role consumes its topic."""
        if record.topic in self.spec.consumes:
            in_force.letters.add(record, error)
        else:
            log.error("%s; passed over", error)
        if not codec.is_foreign(record) and not isinstance(error, ForeignRecord):
            self.step.undecodable(record, error)

    # ------------------------------------------------------------------------------------------ writing

    def _publish_next(self, in_force: InForce) -> bool:
        """Let the step do a slice of work, and write its transaction. Return False if nothing was written."""
        if self._pending is None:
            self._summaries.look()  # this may fail for now, and nothing is decided yet
            transaction = self._advance(in_force)
            if transaction is None and (in_force.letters or self._summaries):
                transaction = SingleTransaction(())
            if transaction is None:
                return False
            added = (*in_force.letters.take(), *self._summaries.take())
            self._pending = replace(transaction, outputs=(*transaction.outputs, *added))
        return self._commit(in_force, self._pending)

    def _advance(self, in_force: InForce) -> SingleTransaction | None:
        try:
            with self._step_seconds.time(), self._claim.unless_taken_over():
                return self.step.advance()
        except TransportError:
            self._in_force = None  # nobody knows what the step has decided so far, and it would not decide that again
            raise

    def _commit(self, in_force: InForce, transaction: SingleTransaction) -> bool:
        records = self.encode(transaction.outputs, epoch=in_force.claim.epoch)
        if not self._writer.commit(records, positions=transaction.positions, group=self.role):
            if self._writer.is_in_doubt:
                self._in_force = None  # the claim and the step's own output tell what became of the transaction
            return False
        self._pending = None
        self._summaries.committed(transaction.outputs)
        transaction.then()
        self.progressed()
        return True


def _tell(step: SingleStep, desired: DesiredState, *, is_leaving: bool) -> None:
    """Tell a step what the run should do."""
    step.paused(is_leaving or desired is DesiredState.paused)
    if desired is DesiredState.draining:
        step.draining()
