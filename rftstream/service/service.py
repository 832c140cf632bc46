"""The only service loop: poll -> step -> publish + commit, one bounded slice at a time.

A service is driven by `tick`, by a process (host.py) or by a seeded scheduler (rftstream.testing). This file holds
what both kinds share; concurrent.py and single.py hold the two ways of reading and committing.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import prometheus_client

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, DesiredState, RunFinished, RunManifest, RunState
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import ContractError, ProducerLost, TransportError
from rftstream.service.in_force import RecordsInForce
from rftstream.service.role import Publish, Received, Role, RoleContext
from rftstream.transport.base import Member, Reader, Transport

if TYPE_CHECKING:
    import prometheus_client


log = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
"""Of one wait: membership is kept up and deadlines are looked at this often."""

MAX_BACKOFF_S = 5.0

CALM_S = 15.0
"""So long after a try without another failure, the next one is a new trouble. Longer than what a question to a log that
is gone takes."""


class Service:
    """The loop of one worker of one role: what both kinds share. Its driver calls `start`, then `tick` until `done`,
    with `drain` in between if the worker is to leave, then `close`; all from one thread. The subclasses say how
    records become work and how work is committed."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        self.role = role.spec.name
        self.process = context.process
        self.done = False
        self.spec = role.spec
        self.context = context
        self.clock: Clock = context.clock
        self.transport: Transport = context.transport
        self.manifest: RunManifest | None = None
        self.finished: RunFinished | None = None
        self.desired = DesiredState.running
        self.claims: dict[str, Claim] = {}
        self.rule = RecordsInForce(self.transport)
        self.last_progress_at = self.clock.now()
        self._draining = False
        self._retry_at = 0.0
        self._failures = 0
        self._failing_since = 0.0
        self._reader: Reader | None = None
        self._followed: list[Record] = []
        """Records that were read and that nobody has looked at yet."""
        metrics.begin(self.role)
        role.spec.begin_metrics()
        # Looking a labelled metric up costs more than counting: these are counted at every tick.
        self._records_in: dict[str, prometheus_client.Counter] = {}
        self._step_seconds = metrics.STEP_SECONDS.labels(self.role)
        self._progress_at = metrics.PROGRESS.labels(self.role)
        self._commit_seconds = metrics.COMMIT_SECONDS.labels(self.role)

    # ------------------------------------------------------------------------------------------ for the driver

    def start(self) -> None:
        """Opens what it reads; never waits."""

    def tick(self) -> float:
        """One bounded slice of work; returns how many seconds it may idle."""
        try:
            return self.slice()
        except TransportError as error:
            # Whatever was asked of the log is asked again: what was begun is either certain or looked up there.
            if not error.retriable and not isinstance(error, ProducerLost):
                raise
            return self.back_off(error)

    def sources(self) -> Sequence[Reader | Member]:
        """What to wait on between two ticks."""
        return [self._reader] if self._reader is not None else []

    def wait(self, timeout_s: float) -> None:
        """Block until there may be something to do, or the time is up."""
        self.transport.wait(self.sources(), timeout_s)

    def drain(self) -> None:
        """Takes no new work; `done` becomes true when what is in hand is committed."""
        self._draining = True

    def close(self) -> None:
        """Close the clients; called once, last."""
        if self._reader is not None:
            self._reader.close()

    def health(self) -> dict[str, object]:
        """Return what people see of the worker's state."""
        return {
            "role": self.role,
            "process": self.process,
            "state": "draining" if self._draining else str(self.desired),
            "last_progress_at": self.last_progress_at,
            "failures_in_a_row": self._failures,
        }

    def measure(self) -> None:
        """Metrics that are looked up rather than counted as things happen. The lag is in offsets, not in records:
        counting those would mean reading them."""
        metrics.DISK_FREE.labels(self.role).set(shutil.disk_usage(self.context.folder.path).free)
        waiting = dict.fromkeys(self.spec.consumes, 0)
        done = self.done_up_to()
        for topic in {place.topic for place in done}:
            ends = self.transport.admin.end_offsets(topic)
            waiting[topic] = sum(max(0, ends[place] - done[place]) for place in ends if place in done)
        for topic, count in waiting.items():
            metrics.LAG.labels(self.role, topic).set(count)

    # ------------------------------------------------------------------------------------------ for subclasses

    def slice(self) -> float:
        """As `tick`; may leave at any question to the log that fails for now."""
        raise NotImplementedError

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Per partition that it consumes now, the offset from which on there is work left."""
        return {}

    def progressed(self) -> None:
        """Note that something was committed: the failures so far have passed."""
        self.last_progress_at = self.clock.now()
        self._progress_at.set(self.last_progress_at)
        self._failures = 0

    def back_off(self, error: Exception) -> float:
        """Remembers a passing failure; seconds until the next try. Raises it when it has not passed for too long."""
        if self._failures == 0 or self.clock.now() - self._retry_at > CALM_S:
            self._failures, self._failing_since = 0, self.clock.now()
        elif self.clock.now() - self._failing_since > self.context.config.transport.patience_s:
            raise error
        wait = min(MAX_BACKOFF_S, 0.05 * 2.0**self._failures)
        self._failures += 1
        self._retry_at = self.clock.now() + wait
        level = logging.WARNING if self._failures > 3 else logging.INFO
        log.log(level, "%s; trying again in %.2f s (failure %d)", error, wait, self._failures)
        return wait

    def backing_off_s(self) -> float:
        """Return the seconds until the next try; 0 if nothing has failed."""
        return max(0.0, self._retry_at - self.clock.now())

    def control(self, received: Received) -> None:
        """A record of `control`: who is in force, what the run should do."""
        message = received.message
        key = (received.record.key or b"").decode(errors="replace")
        match message:
            case RunManifest():
                self.manifest = message
                self.context.check_manifest(message)
            case RunState():
                self.desired = message.state
            case RunFinished():
                self.finished = message
            case Claim():
                known = self.claims.get(message.role)
                if known is None or message.epoch > known.epoch:
                    self.claims[message.role] = message
            case None if key == "finished":
                self.finished = None
            case None if key == "state":
                self.desired = DesiredState.running
            case _:
                pass

    def follow(self, see: Callable[[Received], None]) -> bool:
        """Hand on what is new on `control` and the followed topics; returns whether there was any."""
        assert self._reader is not None
        self._followed += self._reader.poll()
        num_followed = len(self._followed)
        while self._followed:  # judging a record may ask the log, which may not answer for now
            record = self._followed[0]
            received = self.decode(record)
            if isinstance(received, ContractError):
                log.error("%s; skipped", received)
            elif record.topic == "control":
                self.control(received)
            else:
                see(received)
            del self._followed[0]
        return bool(num_followed)

    def decode(self, record: Record) -> Received | ContractError:
        """The record with its message, or why there is none: ForeignRecord if it is not in force."""
        counter = self._records_in.get(record.topic)
        if counter is None:
            counter = self._records_in[record.topic] = metrics.RECORDS_IN.labels(self.role, record.topic)
        counter.inc()
        try:
            return Received(record, self.rule.decode(record))
        except ContractError as error:
            return error

    def encode(self, outputs: Sequence[Publish], *, epoch: int = 0) -> list[NewRecord]:
        """Return the records of what a step wants published. `epoch`: that of a single role's claim."""
        run = self.context.folder.run_id
        return [
            NewRecord(output.topic, output.partition, output.key, None)
            if output.message is None
            else codec.to_record(
                output.message, output.topic, output.partition, run=run, writer_epoch=epoch, value=output.value
            )
            for output in outputs
        ]

    def count_out(self, records: Sequence[NewRecord]) -> None:
        """Count records that are on the log, for the metrics."""
        counts: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        for record in records:
            counts[record.topic] += 1
            num_bytes[record.topic] += record.num_bytes
        for topic, count in counts.items():
            metrics.RECORDS_OUT.labels(self.role, topic).inc(count)
            metrics.BYTES_OUT.labels(self.role, topic).inc(num_bytes[topic])


def begin_positions(transport: Transport, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """The first offsets of all partitions of some topics."""
    positions: dict[TopicPartition, int] = {}
    for topic in topics:
        positions.update(transport.admin.begin_offsets(topic))
    return positions
