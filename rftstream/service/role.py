"""Roles: a role is a declaration, and a step that sees messages and returns messages.

A step never sees a client, a position of another process, or the wall clock (it gets a Clock). The loop polls,
decodes, calls the step, and commits what it returned together with the positions; a step that was interrupted is
built anew from the log.

    Concurrent roles (explorer, verifier): many items in hand, finished in any order, work shared by a group.
    Single roles (feeder, buffer, trainer, evaluator): one in force per run; reads by position; its outputs are whole
    transactions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError, ForeignRecord
from rftstream.models.device_lock import DeviceLock, FileLock
from rftstream.service.reading import read_between
from rftstream.service.records.in_force import RecordsInForce, writer_epoch
from rftstream.service.role_spec import RoleSpec
from rftstream.transport.base import Position, Transport

if TYPE_CHECKING:
    from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

StoreMaker = Callable[[float | None], "ObjectStore"]
"""Opens the run's object store, with `patience_s` of its own or None."""

LockMaker = Callable[[str], DeviceLock]
"""Opens the lock of a device that a trainer and engines share."""

ManifestCheck = Callable[["RunManifest"], None]
"""Raises ConfigError if the worker was given other settings than the run that the manifest describes."""

FOREVER = math.inf
"""The value of `idle_s` for a step that has nothing to do until a record arrives."""


@dataclass(frozen=True, slots=True)
class Received:
    """A record and its decoded message (None for a tombstone)."""

    record: Record
    message: Message | None


@dataclass(frozen=True, slots=True)
class Publish:
    """A message that a step wants on the log. The service adds headers and encodes it."""

    topic: str
    partition: int
    message: Message | None
    """None: a tombstone, which takes back what `key` had."""
    value: bytes | None = None
    """The message encoded, where a step needed the bytes itself."""
    key: bytes | None = None
    """The key of a tombstone; a message has its own."""


@dataclass(frozen=True, slots=True)
class Item:
    """One record in hand of a concurrent role."""

    number: int
    """Unique in this process; a record that comes back after a rebalance has another number."""
    received: Received


@dataclass(frozen=True, slots=True)
class Done:
    """An item that is finished, with what it yields; published together with its position."""

    number: int
    outputs: tuple[Publish, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The saved state of an unfinished item, from which a successor goes on."""

    number: int
    outputs: tuple[Publish, ...]
    leaves: bool = False
    """Whether the item is given back once this is on the log."""
    waits: bool = False
    """Whether somebody outside waits for it to be on the log: its transaction is due at once."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A record that a step found to be no part of what it reads: it goes to `dead`, and the run goes on."""

    record: Record
    why: str


class Wakeup(Protocol):
    """Something with a file descriptor that becomes readable, such as a socket or a SelfPipe."""

    def fileno(self) -> int:
        """Return the descriptor."""


class ConcurrentStep(Protocol):
    """The work of a concurrent role: many records in hand, finished in any order.

    `workers/<role>.py` makes one for each process, and ConcurrentService alone calls it, from one thread. In each slice
    it calls `follow` for what came on followed topics, `start` for as many records as there is `room`, `drop` for those
    whose partitions were lost, then `advance`. The results that `advance` returns are committed before anybody sees
    them, and then `committed` is called; a lost commit means that the record is started again. Worked example:
    VerifierStep."""

    @property
    def room(self) -> int:
        """Number of further items that the step takes. The service asks before each poll, and starts at most this
        many."""

    def follow(self, received: Received) -> None:
        """Take a record of a followed topic. Called for all of them in log order, from the first one on; of a topic
        that the role names in `summarised` perhaps a Summary first, and then what came after it. By default it is
        passed over."""
        return

    def start(self, item: Item) -> None:
        """Take an item in hand. Called at most `room` times a slice, with a message of a consumed topic; afterwards the
        item is in hand until `advance` hands out its Done or `drop` names it."""

    def drop(self, numbers: Collection[int]) -> None:
        """Forget items that are in hand: they are another worker's now, or given back. Nothing is handed
        out for any of them afterwards. Among them are items that `advance` handed out, if their partition was lost
        before that was on the log."""

    def not_begun(self) -> Collection[int]:
        """Return items that wait for something and have nothing to be saved. Called when the worker is to leave; the
        service then drops them."""

    def advance(self) -> Sequence[Done]:
        """Do a bounded slice of work; return what finished in it, each item once. Called in every slice, also with
        nothing in hand. StopRule: the run cannot go on; what was handed out before is committed first."""

    def idle_s(self) -> float:
        """Return for how many seconds `advance` need not be called: 0 while there is work, FOREVER if only a record
        brings some. Asked after a slice in which nothing happened."""

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Take note of items whose results are on the log for good: what `save` returned of `saved`, and what `advance`
        returned of `finished`. Called after each commit; who is outside may be answered now, not before. By default
        nothing happens: readers of the log see the results."""
        return

    def wakeups(self) -> Sequence[Wakeup]:
        """Return what ends a wait when it becomes readable, beside the log. `advance` must read from all of them, or
        every wait ends at once. Asked before each wait. By default only the log and the time wake the worker."""
        return ()

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return the one record that an undecodable one still yields downstream, and what goes with it. The service
        calls this instead of `start` if at least the ids could be read, and adds the dead letter."""

    def health(self) -> Mapping[str, object]:
        """Return what people see of its state. Called at any time between two slices."""
        return {}

    def close(self) -> None:
        """Release what the step holds. Called once, last; nothing that is still in hand is published. By default there
        is nothing to release."""
        return


class SavingStep(ConcurrentStep, Protocol):
    """The work of a role that `keeps` a topic, on which it saves what is not finished.

    For partitions that are new ConcurrentService calls `forget` once, then `restore_partials` until all is read, and
    only then `start` for their records. Worked example: ExplorerStep.
    """

    def forget(self, partitions: Collection[int]) -> None:
        """Forget what was known of these partitions of the kept topic. Called before they are read (again)."""

    def restore_partials(self, records: Sequence[Record]) -> None:
        """Take records of the kept topic, in partitions that this worker owns now. Called after `forget`, several
        times, in log order; tombstones included."""

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        """Return what is due to be saved. Called after `advance`, and only while everything that was saved before is on
        the log. `leaving`: the worker is to leave, and what can be saved is given back; the service drops it once the
        commit has succeeded."""


@dataclass(frozen=True, slots=True)
class SingleTransaction:
    """A transaction of a single role: its outputs, with the positions of its own group."""

    outputs: tuple[Publish, ...]
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None
    """Callback of the step for when the transaction is on the log. SingleService calls it before anything else of the
    step; not at all where the outcome is unknown, since then `recover` comes."""


class SingleStep(Protocol):
    """The work of a single role: the one process that is in force reads by position and publishes transactions.

    `workers/<role>.py` makes one for each process, and SingleService alone calls it, from one thread. After the claim
    is on the log comes `recover`; then, again and again, `absorb` for what was read and `advance` for the next
    transaction, whose `then` is called once it is on the log. After a lost producer, or a question to the log that
    failed in the middle, `recover` comes again and builds everything anew. `close` comes last. Worked example:
    FeederStep."""

    @property
    def outlives_the_run(self) -> bool:
        """Whether the step has work left when the run is finished; `done` then says when that work is done. Asked
        before the claim, and after each slice of reading once the run is finished."""
        return False

    def recover(self, log: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Build the state from the log and return from where each partition is read on. Called when `claim` is on the
        log and so no predecessor can write any more; whatever was known before is void. Afterwards the service reads
        from these positions, and `control` from where it stands."""

    def absorb(self, received: Received) -> Sequence[Foreign] | None:
        """Take a record that is in force. Called in log order for each partition; while the step is `full`, nothing
        more is polled of the topics that it consumes. Returns the records that turn out to be foreign, if any: this
        one, or some from before; the service dead-letters them."""

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Take note of a record whose body cannot be decoded. Called in place of `absorb`; the service dead-letters it
        with the next transaction.

        Foreign records (of no contract of the topic, or not in force) are dead-lettered without the step ever hearing
        of them."""
        return

    @property
    def full(self) -> bool:
        """Whether the step has enough in hand. Asked before each poll; while it has, the topics that the role consumes
        stay unread."""
        return False

    def advance(self) -> SingleTransaction | None:
        """Do a bounded slice of work; return the next transaction, if there is one. Called only when the transaction
        before is on the log (and its `then` was called), or after `recover`. If it raises TransportError, `recover`
        comes next."""

    def idle_s(self) -> float:
        """Return for how many seconds `advance` need not be called: 0 while there is work, FOREVER if only a record
        brings some. Asked after a slice in which nothing was read or published. By default only a record brings
        work."""
        return FOREVER

    def paused(self, paused: bool) -> None:
        """Begin nothing new while `paused`, and end what was begun. Called after `recover`, whenever `control` was
        read, and when the process is to leave. The same value may come again. By default the step goes on: what it does
        is bounded by what it is given."""
        return

    def draining(self) -> None:
        """Bring the run to its end: no new work is admitted. Called after `recover` and whenever `control` was read, as
        long as the user asks for it. By default the end comes by the log."""
        return

    @property
    def busy(self) -> bool:
        """Whether the step has begun something from which a transaction will come, even while it is paused. Asked while
        the process is to leave: the process goes on until this is False."""
        return False

    def leave(self) -> None:
        """Save a successor some work. Called at most once, when the process was told to leave and nothing is pending;
        `close` comes next. By default all that a successor needs is on the log."""
        return

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, ever. Asked in each slice; the process ends when this is True."""
        return False

    def health(self) -> Mapping[str, object]:
        """Return what people see of its state. Called at any time between two slices, also before `recover`."""

    def close(self) -> None:
        """Release what the step holds. Called once, last, also where `recover` was never called. By default there is
        nothing to release."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role as a process runs it: its declaration and its step."""

    spec: RoleSpec
    step: ConcurrentStep | SingleStep
    after_the_end: Callable[[Log], bool] | None = None
    """Work that a process of a single role does if the run is finished when the process starts, without taking the
    role. It is called until it returns True; None: there is none."""


class RunPlace(Protocol):
    """Where a run's files are on this machine."""

    @property
    def run_id(self) -> str:
        """The run's name on the log."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def model(self) -> Path:
        """The model, where it was made or fetched for the run."""

    @property
    def anchors(self) -> Path:
        """The newest anchor and the deltas since, where the object store is elsewhere."""

    @property
    def final(self) -> Path:
        """The trained model, once the run is finished."""

    @property
    def index(self) -> Path:
        """Folder of indexes of data files and of the log, so that they need not be read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The parts from which `workers.<role>.build` makes a role's step."""

    config: RunConfig
    folder: RunPlace
    clock: Clock
    transport: Transport
    process: str
    """Name of this process in logs and claims."""
    device: str | None = None
    """Where the arrays live; None: what the role's section says."""
    simulated: bool = False
    """Driven by a scheduler in one process: no children, no threads."""
    summary_every: int | None = None
    """After how many records a single role summarises a topic again; None: as `service/records/summaries.py` has it."""
    make_store: StoreMaker
    open_lock: LockMaker = FileLock
    check_manifest: ManifestCheck

    def open_store(self, *, patience_s: float | None = None) -> ObjectStore:
        """Return the run's object store. `patience_s` is for callers that have something better to do than to wait."""
        return self.make_store(patience_s)


class Log:
    """A log as it is read outside of the loop: by a recovering role, and by everybody who looks at a run."""

    def __init__(self, transport: Transport, rule: RecordsInForce | None = None) -> None:
        """Read through this transport. `rule` is that of a reader which goes on where this one ends."""
        self.transport = transport
        self.rule = rule or RecordsInForce(transport)

    def read(
        self,
        topic: str,
        *,
        start: Mapping[TopicPartition, int] | None = None,
        bodies: bool = True,
        settled: bool = False,
        partitions: Collection[int] | None = None,
    ) -> Iterator[Record]:
        """Yield everything on the topic (or on some of its partitions) up to its end at the time of the call. `settled`
        is as for `Admin.end_offsets`."""
        admin = self.transport.admin
        ends = admin.end_offsets(topic, settled=settled, partitions=partitions)
        begins = admin.begin_offsets(topic)
        positions = {place: max(begins[place], (start or {}).get(place, 0)) for place in ends}
        yield from read_between(self.transport, positions, ends, bodies=bodies)

    def messages(self, topic: str, *, start: Mapping[TopicPartition, int] | None = None) -> Iterator[Received]:
        """Yield what `read` yields, decoded; tombstones have no message. Records of foreign contracts and records that
        are not in force are passed over. ContractError for one that cannot be decoded and cannot be done without."""
        for record in self.read(topic, start=start):
            if record.value is not None and codec.is_foreign(record):
                log.error("%s: of no contract of this topic; passed over", record)
                continue
            try:
                yield Received(record, self.rule.decode(record))
            except ForeignRecord as error:
                log.error("%s; passed over", error)

    def is_claimed(self, record: Record) -> bool:
        """Return whether the role that writes the record's topic was ever claimed under the epoch that it names."""
        return self.rule.is_claimed(TOPICS[record.topic].writer or "", writer_epoch(record))

    def in_force(self, topic: str) -> Iterator[tuple[Record, Message | None]]:
        """Yield records in force, for callers that only look. Others, and records that cannot be decoded, are left out
        silently."""
        return self.rule.messages(self.read(topic))

    def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Return where the partitions of the topic end now."""
        return self.transport.admin.end_offsets(topic)

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        """Return the positions that a consumer group has committed."""
        return self.transport.admin.committed(group)
