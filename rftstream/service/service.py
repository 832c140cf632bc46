"""The common part of the two loops: how a worker is driven, how errors are handled, and how a record is judged.

A loop does one bounded slice of work for each `tick`. A process calls `tick` (launch/host.py), or a scheduler that
draws every decision from a seed (rftstream.testing). The loops themselves are in concurrent.py and single.py."""

from __future__ import annotations

import logging
import math
import select
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config import secrets
from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import ConfigError, ContractError, LogTruncated, ProducerLost, TransportError
from rftstream.service.control_view import ControlView
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.records.losses import check_beginnings, check_jumps
from rftstream.service.role import Publish, Received, Role, RoleContext, Wakeup
from rftstream.transport.base import Jump, Member, Reader, Transport
from rftstream.version import __version__

if TYPE_CHECKING:
    import prometheus_client

log = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
"""Longest wait between two slices, in seconds. Membership is renewed and deadlines are checked at least this often."""

LOG_LOOK_S = 0.2
"""Longest wait for a step's own wakeups, in seconds. The log is read between two such waits."""

MAX_BACKOFF_S = 5.0
"""Longest pause before a failed action is tried again, in seconds."""

CALM_S = 15.0
"""Seconds without a failure after which the next failure counts as a new one. This is longer than a request to an
unreachable log takes to fail."""

AHEAD_S, TOLD_EVERY_S = 60.0, 600.0
"""Seconds that a record may be written ahead of this machine's clock, and seconds between two warnings of one that is
further ahead."""


class Service:
    """The loop of one worker of one role. `service_of` (roles/build.py) makes the subclass for the role's kind. The
    constructor opens the readers, and raises TransportError if the log does not answer.

    A driver then calls `tick` and `wait` in turns until `done` is true, and `close` last, all from one thread. It calls
    `drain` in between if the worker is to leave. Subclasses implement `slice`: how records become work, and how work is
    committed."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        self.role = role.spec.name
        """Name of the role."""
        self.process = context.process
        """Name of this worker in logs and claims."""
        self.done = False
        """Whether the worker has no work left and can be closed."""
        self.wakeups: Callable[[], Sequence[Wakeup]] = lambda: ()
        """Returns the wakeups that end a wait, beside the log."""
        self.spec = role.spec
        self._writes = frozenset(role.spec.writes())
        self.context = context
        self.clock: Clock = context.clock
        self.transport: Transport = context.transport
        self.view = ControlView()
        """State of the run according to `control`."""
        self.claims = self.view.claims
        self.rule = RecordsInForce(self.transport)
        self._jumps: list[Jump] = []
        """Jumps over deleted records that were not checked yet."""
        check_beginnings(self.transport, context.folder.run_id, role.spec.reads(context.config))
        self.last_progress_at = self.clock.stamp()
        self._draining = False
        self._future_at = math.inf
        """Records that were written later than this are reported: the clock of their writer or this one is wrong."""
        self._quiet_until = 0.0
        self._retry_at = 0.0
        self._failures = 0
        self._failing_since = 0.0
        self._failure = ""
        metrics.begin(self.role, __version__)
        role.spec.begin_metrics()
        # Looking up a labelled metric costs more than counting, and these are counted at every tick.
        self._records_in: dict[str, prometheus_client.Counter] = {}
        self._step_seconds = metrics.STEP_SECONDS.labels(self.role)
        self._progress_at = metrics.PROGRESS.labels(self.role)

    # ------------------------------------------------------------------------------------------ for the driver

    def tick(self) -> float:
        """Do one bounded slice of work, and return how many seconds the worker may idle. RecordsDeleted if records that
        the worker had to read are lost."""
        now = self.clock.now()
        self._future_at = now + AHEAD_S if now >= self._quiet_until else math.inf
        try:
            idle_s = self.slice()
            self._jumps += self.transport.jumps()
            check_jumps(self.transport, self.context.folder.run_id, self.role, self._jumps)
            self._jumps.clear()
            return idle_s
        except LogTruncated as error:
            metrics.LOST.labels(self.role, error.topic).inc(error.num_lost)
            raise
        except TransportError as error:
            # Repeating is safe: every question to the log can be asked again, and unfinished work is either certain or
            # looked up there.
            if not error.retriable and not isinstance(error, ProducerLost):
                raise
            return self.back_off(error)

    def sources(self) -> Sequence[Reader | Member]:
        """Return what to wait on between two ticks."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Block until there may be work, or until the timeout."""
        if not (wakeups := self.wakeups()):
            self.transport.wait(self.sources(), timeout_s)
            return
        poll = select.poll()
        for wakeup in wakeups:
            poll.register(wakeup.fileno(), select.POLLIN)
        # Not every transport has a file descriptor to wait on, so the next tick looks at the log.
        poll.poll(min(timeout_s, LOG_LOOK_S) * 1000)

    def drain(self) -> None:
        """Take no new work from now on. `done` becomes true once the work in hand is committed."""
        self._draining = True

    def pause_run(self, reason: str) -> None:
        """Ask for a pause of the whole run, with the next transaction. Only single roles do this; other roles ignore
        the call."""

    def close(self) -> None:
        """Close the step and the clients. Called once, last."""
        raise NotImplementedError

    def health(self) -> dict[str, object]:
        """Return the worker's state for `/health`."""
        return {
            "role": self.role,
            "process": self.process,
            "state": "draining" if self._draining else str(self.view.desired),
            "last_progress_at": self.last_progress_at,
            "failures_in_a_row": self._failures,
            "failure": self._failure if self.clock.now() - self._retry_at <= CALM_S else "",
            "throttled_s": round(getattr(self.transport, "throttled_s", 0.0), 1),  # of a log that is kept by servers
        }

    def measure(self) -> None:
        """Set the metrics that are looked up rather than counted. The lag is in offsets, since counting records would
        mean reading them."""
        metrics.DISK_FREE.labels(self.role).set(shutil.disk_usage(self.context.folder.path).free)
        metrics.THROTTLED.set(getattr(self.transport, "throttled_s", 0.0))
        waiting = dict.fromkeys(self.spec.consumes, 0)
        done = self.done_up_to()
        for topic in {place.topic for place in done}:
            ends = self.transport.admin.end_offsets(topic)
            waiting[topic] = sum(max(0, ends[place] - done[place]) for place in ends if place in done)
        for topic, count in waiting.items():
            metrics.LAG.labels(self.role, topic).set(count)

    # ------------------------------------------------------------------------------------------ for subclasses

    def slice(self) -> float:
        """Do the work of `tick`. It may raise in the middle, whenever a request to the log fails for now."""
        raise NotImplementedError

    def done_up_to(self) -> Mapping[TopicPartition, int]:
        """Return, for each partition that the worker consumes now, the first offset with unfinished work."""
        return {}

    def progressed(self) -> None:
        """Reset the failures so far, since a commit has succeeded."""
        self.last_progress_at = self.clock.stamp()
        self._progress_at.set(self.last_progress_at)
        self._failures, self._failure = 0, ""

    def back_off(self, error: Exception) -> float:
        """Count a temporary failure, and return the seconds until the next try. Raise the failure if all tries have
        failed for too long."""
        if self._failures == 0 or self.clock.now() - self._retry_at > CALM_S:
            self._failures, self._failing_since = 0, self.clock.now()
        elif self.clock.now() - self._failing_since > self.context.config.transport.patience_s:
            raise error
        wait = min(MAX_BACKOFF_S, 0.05 * 2.0**self._failures)
        self._failures, self._failure = self._failures + 1, secrets.hidden(str(error))
        self._retry_at = self.clock.now() + wait
        level = logging.WARNING if self._failures > 3 else logging.INFO
        log.log(
            level,
            "%s; trying again in %.2f s (failure %d), and giving up after %g s of them (transport.patience_s)",
            error,
            wait,
            self._failures,
            self.context.config.transport.patience_s,
        )
        return wait

    def backing_off_s(self) -> float:
        """Return the seconds until the next try; 0 if nothing has failed."""
        return max(0.0, self._retry_at - self.clock.now())

    def control(self, received: Received) -> None:
        """Apply a record of `control`: a claim, or a change of what the run should do."""
        self.view.absorb(received.record.key, received.message)
        if isinstance(received.message, RunManifest):
            self.context.check_manifest(received.message)

    def take_followed(self, record: Record, see: Callable[[Received], None]) -> None:
        """Apply a record of `control` or of a followed topic. `see` is called with the latter."""
        received = self.decode(record)
        if isinstance(received, ContractError):
            log.error("%s; skipped", received)
        elif record.topic == "control":
            self.control(received)
        else:
            see(received)

    def decode(self, record: Record) -> Received | ContractError:
        """Return the record with its message, or the error if there is none: ForeignRecord for a record that is not in
        force."""
        counter = self._records_in.get(record.topic)
        if counter is None:
            counter = self._records_in[record.topic] = metrics.RECORDS_IN.labels(self.role, record.topic)
        counter.inc()
        if record.timestamp_s > self._future_at:
            self._tell_of_the_future(record)
        try:
            return Received(record, self.rule.decode(record))
        except ContractError as error:
            return error

    def _tell_of_the_future(self, record: Record) -> None:
        now = self.clock.now()
        self._quiet_until, self._future_at = now + TOLD_EVERY_S, math.inf
        log.warning(
            "%s was written %.0f s ahead of the clock of this machine (%s): this clock or that of the writer's machine "
            "is wrong; set it",
            record,
            record.timestamp_s - now,
            socket.gethostname(),
        )

    def encode(self, outputs: Sequence[Publish], *, epoch: int = 0) -> list[NewRecord]:
        """Return the encoded records of a step's outputs. `epoch` is that of a single role's claim. ConfigError for a
        topic that the role's declaration does not name, since rights on a log are granted by the declaration."""
        run = self.context.folder.run_id
        for topic in {output.topic for output in outputs} - self._writes:
            raise ConfigError(
                f"{self.role}: writes to {topic!r}, expected one of {', '.join(sorted(self._writes)) or 'no topic'}; "
                "name it in `produces` of the role's declaration"
            )
        return [
            NewRecord(output.topic, output.partition, output.key, None)
            if output.message is None
            else codec.to_record(
                output.message, output.topic, output.partition, run=run, writer_epoch=epoch, value=output.value
            )
            for output in outputs
        ]
