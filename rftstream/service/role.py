"""Roles: a role is a declaration, and a step that receives messages and returns messages.

A step never uses a client, a position of another process, or the wall clock (it gets a Clock). The loop polls, decodes,
calls the step, and commits the returned records together with the positions. A step that was interrupted is rebuilt
from the log.

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

import msgspec

from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.topics import TOPICS
from rftstream.desk import Desk
from rftstream.errors import ContractError, ForeignRecord
from rftstream.models.device_lock import DeviceLock, FileLock
from rftstream.service.reading import read_between
from rftstream.service.records.in_force import CONTROL, RecordsInForce, writer_epoch
from rftstream.service.role_spec import RoleSpec
from rftstream.transport.base import Position, Transport

if TYPE_CHECKING:
    from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

StoreMaker = Callable[[float | None], "ObjectStore"]
"""Opens the run's object store, with its own `patience_s` or None for the run's setting."""

LockMaker = Callable[[str], DeviceLock]
"""Opens the lock of a device that a trainer and engines share."""

ManifestCheck = Callable[["RunManifest"], None]
"""Raises ConfigError if the worker's settings are not those of the run that the manifest describes."""

FOREVER = math.inf
"""The value of `idle_s` for a step that has nothing to do until a record arrives."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A record and its decoded message (None for a tombstone)."""

    record: Record
    message: Message | None


class Publish(msgspec.Struct, frozen=True, gc=False):
    """A message that a step wants on the log. The service adds headers and encodes it."""

    topic: str
    partition: int
    message: Message | None
    """The message; None for a tombstone, which withdraws the record of `key`."""
    value: bytes | None = None
    """The encoded message, if the step has encoded it already."""
    key: bytes | None = None
    """The key of a tombstone. A message has its own key."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """One record in hand of a concurrent role."""

    number: int
    """Unique in this process. A record that returns after a rebalance gets another number."""
    received: Received


class Done(msgspec.Struct, frozen=True, gc=False):
    """A finished item with its outputs, which are published together with its position."""

    number: int
    outputs: tuple[Publish, ...]
    also: tuple[int, ...] = ()
    """Further items of the same partition that these outputs finish: all of them in one transaction, or none."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The saved state of an unfinished item, from which a successor continues."""

    number: int
    outputs: tuple[Publish, ...]
    leaves: bool = False
    """Whether the item is given back once the state is on the log."""
    waits: bool = False
    """Whether a client outside of the log waits for this state. Its transaction is then due at once."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A record that does not belong to what the step reads. It goes to `dead`, and the run goes on."""

    record: Record
    why: str


class Wakeup(Protocol):
    """Something with a file descriptor that becomes readable, such as a socket or a SelfPipe."""

    def fileno(self) -> int:
        """Return the descriptor."""


class ConcurrentStep(Protocol):
    """The work of a concurrent role: many records in hand, finished in any order.

    `workers/<role>.py` makes one for each process, and ConcurrentService alone calls it, from one thread. In each slice
    it calls `follow` for new records of followed topics, `start` for as many records as there is `room`, `drop` for
    records of lost partitions, then `advance`. The results of `advance` are committed before any other process sees
    them, and then `committed` is called. After a lost commit the record is started again. Worked example:
    VerifierStep."""

    @property
    def room(self) -> int:
        """Number of further items that the step accepts. The service asks before each poll, and starts at most this
        many."""

    def follow(self, received: Received) -> None:
        """Apply a record of a followed topic. Called for all of them in log order, from the first one on. A topic that
        the role names in `summarised` may start with a Summary instead, followed by the records after it. By default
        records are ignored."""
        return

    def may_join(self) -> bool:
        """Return whether the step can do work. The worker joins its group, and gets partitions, once this is so. Asked
        in each slice before that; `advance` is not called yet. By default a worker joins at once."""
        return True

    def start(self, item: Item) -> None:
        """Take an item in hand. Called at most `room` times a slice, with a message of a consumed topic. The item stays
        in hand until `advance` returns its Done or `drop` names it."""

    def drop(self, numbers: Collection[int]) -> None:
        """Forget items that are in hand: another worker owns them now, or they are given back. Return nothing for them
        afterwards. Items that `advance` already returned may be among them, if their partition was lost before the
        commit."""

    def not_begun(self) -> Collection[int]:
        """Return items that are still waiting and have nothing to be saved. Called when the worker is to leave. The
        service then drops them."""

    def advance(self) -> Sequence[Done]:
        """Do a bounded slice of work. Return the items that finished in it, each once. Called in every slice, also with
        nothing in hand. StopRule if the run cannot go on; items that were returned earlier are committed first."""

    def idle_s(self) -> float:
        """Return for how many seconds `advance` need not be called: 0 while there is work, FOREVER if only a new record
        brings work. Asked after a slice in which nothing happened."""

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Note the items whose results are on the log for good: those that `save` returned (`saved`) and those that
        `advance` returned (`finished`). Called after each commit. Clients outside of the log may be answered from now
        on, not before. By default nothing happens: readers of the log see the results."""
        return

    def wakeups(self) -> Sequence[Wakeup]:
        """Return objects that end a wait when they become readable, beside the log. `advance` must read from all of
        them, otherwise every wait ends at once. Asked before each wait. By default only the log and the time wake the
        worker."""
        return ()

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return the one record that an undecodable record still yields downstream, and any further outputs. The
        service calls this instead of `start` if at least the ids could be read. The service adds the dead letter."""

    def hold_undecodable(self, item: Item, ids: RolloutIds, error: ContractError) -> bool:
        """Return whether the step takes an undecodable record in hand, as in `start`. The item has no message, and
        `advance` returns its Done. Asked before `undecodable`. By default the record is finished at once."""
        return False

    def health(self) -> Mapping[str, object]:
        """Return the step's state for `/health`. Called at any time between two slices."""
        return {}

    def close(self) -> None:
        """Release the step's resources. Called once, last. Items that are still in hand are not published. By default
        there is nothing to release."""
        return


class SavingStep(ConcurrentStep, Protocol):
    """The work of a role that `keeps` a topic, on which it saves unfinished work.

    For new partitions ConcurrentService calls `forget` once, then `restore_partials` until all records are read, and
    only then `start` for their records. Worked example: ExplorerStep."""

    def forget(self, partitions: Collection[int]) -> None:
        """Forget all knowledge of these partitions of the kept topic. Called before they are read, also for the second
        time."""

    def restore_partials(self, records: Sequence[Record]) -> None:
        """Read records of the kept topic, in partitions that this worker owns now. Called after `forget`, several
        times, in log order, with tombstones included."""

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        """Return the states that are due to be saved. Called after `advance`, and only when all earlier states are on
        the log. `leaving` means that the worker is to leave: items that can be saved are given back, and the service
        drops them after the commit."""


@dataclass(frozen=True, slots=True)
class SingleTransaction:
    """A transaction of a single role: its outputs, and the positions of its consumer group."""

    outputs: tuple[Publish, ...]
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None
    """Callback of the step for when the transaction is on the log. SingleService calls it before any other method of
    the step. It is not called if the outcome is unknown, since `recover` follows then."""


class SingleStep(Protocol):
    """The work of a single role: the one process that holds the role reads by position and publishes transactions.

    `workers/<role>.py` makes one for each process, and SingleService alone calls it, from one thread. After the claim
    is on the log it calls `recover`. Then it calls, again and again, `absorb` for each record and `advance` for the
    next transaction, whose `then` is called once the transaction is on the log. After a lost producer, or when the log
    did not answer in the middle of the work, `recover` is called again and rebuilds everything. `close` comes last.
    Worked example: FeederStep."""

    @property
    def outlives_the_run(self) -> bool:
        """Whether the step has work left after the run is finished. `done` then tells when that work is done. Asked
        before the claim, and after each slice of reading once the run is finished."""
        return False

    def check(self, manifest: RunManifest) -> None:
        """Raise ConfigError if the step's data are not the run's. Called before the claim, so that a process that
        cannot do the work takes it from nobody. By default there is nothing to compare."""
        return

    def recover(self, log: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Build the state from the log, and return the position from which each partition is read. Called when `claim`
        is on the log, so that no predecessor can write any more. All earlier state is void. Afterwards the service
        reads from these positions, and `control` from its current position."""

    def absorb(self, received: Received) -> Sequence[Foreign] | None:
        """Apply a record that is in force. Called in log order for each partition. While the step is `full`, the
        consumed topics are not polled. Return the records that turn out to be foreign, if any: this one or earlier
        ones. The service dead-letters them."""

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Note a record whose body cannot be decoded. Called in place of `absorb`. The service dead-letters the record
        with the next transaction.

        The step is not called for foreign records (of no contract of the topic, or not in force); they are
        dead-lettered directly."""
        return

    @property
    def full(self) -> bool:
        """Whether the step has enough records in hand. Asked before each poll. While this is true, the consumed topics
        are not read."""
        return False

    def advance(self) -> SingleTransaction | None:
        """Do a bounded slice of work. Return the next transaction, if there is one. Called only after `recover`, or
        when the previous transaction is on the log and its `then` was called. If it raises TransportError, `recover`
        comes next."""

    def idle_s(self) -> float:
        """Return for how many seconds `advance` need not be called: 0 while there is work, FOREVER if only a new record
        brings work. Asked after a slice in which nothing was read or published. By default only a record brings
        work."""
        return FOREVER

    def paused(self, paused: bool) -> None:
        """Start no new work while `paused`, and finish the work that was begun. Called after `recover`, whenever
        `control` was read, and when the process is to leave. The same value may come again. By default the step ignores
        the pause, since its input limits its work."""
        return

    def draining(self) -> None:
        """Bring the run to its end: admit no new work. Called after `recover` and whenever `control` was read, as long
        as the user asks for it. By default the step learns of the end from the log."""
        return

    @property
    def busy(self) -> bool:
        """Whether the step has begun work that will end in a transaction, even while it is paused. Asked while the
        process is to leave. The process stays until this is False."""
        return False

    def leave(self) -> None:
        """Save work for a successor. Called when the process is to leave and nothing is pending; `close` comes next. If
        the step is `busy` for long, it is called before that, too, again and again: the step then drops what it has
        begun, if a successor can do that again. By default everything that a successor needs is on the log."""
        return

    @property
    def done(self) -> bool:
        """Whether no work is left for ever. Asked in each slice. The process ends when this is True."""
        return False

    def health(self) -> Mapping[str, object]:
        """Return the step's state for `/health`. Called at any time between two slices, also before `recover`."""

    def close(self) -> None:
        """Release the step's resources. Called once, last, even if `recover` was never called. By default there is
        nothing to release."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role as a process runs it: its declaration and its step."""

    spec: RoleSpec
    step: ConcurrentStep | SingleStep
    after_the_end: Callable[[Log], bool] | None = None
    """Work for a process that starts when the run is finished. The process does it without a claim. It is called until
    it returns True. None if there is no such work."""


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
        """Path of the model, if it was made or downloaded for the run."""

    @property
    def anchors(self) -> Path:
        """Folder of the newest anchor and the deltas since then. Used if the object store is on another machine."""

    @property
    def final(self) -> Path:
        """Folder of the trained model of a finished run."""

    @property
    def index(self) -> Path:
        """Folder of indexes of data files and of the log, which save reading them again."""


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
    """Device of the arrays; None for the setting in the role's section."""
    simulated: bool = False
    """Whether a scheduler drives all roles in one process, without children and threads."""
    summary_every: int | None = None
    """Number of records after which a single role summarises a topic again; None for the values in
    `service/records/summaries.py`."""
    make_store: StoreMaker
    open_lock: LockMaker = FileLock
    check_manifest: ManifestCheck
    desk: Desk | None = None
    """The desk of a loop outside of the role that does the role's work (`rftstream.join`); None if there is none."""

    def open_store(self, *, patience_s: float | None = None) -> ObjectStore:
        """Return the run's object store. Callers that should not wait long for the store pass their own
        `patience_s`."""
        return self.make_store(patience_s)


class Log:
    """Reads a log outside of the loop. Recovering roles use it, and tools that inspect a run."""

    def __init__(self, transport: Transport, rule: RecordsInForce | None = None) -> None:
        """`rule` is the rule of a reader that will continue where this one ends."""
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
        """Yield all records of the topic (or of some of its partitions) up to its end at the time of the call.
        `settled` is as for `Admin.end_offsets`."""
        ends = self.ends(topic, settled=settled, partitions=partitions)
        begins = self.transport.admin.begin_offsets(topic)
        positions = {place: max(begins[place], (start or {}).get(place, 0)) for place in ends}
        yield from read_between(self.transport, positions, ends, bodies=bodies)

    def control(self, *, settled: bool = False) -> Iterator[Record]:
        """Yield the records of `control` up to its end, without those of which its summary says that later ones have
        replaced or withdrawn them."""
        start = self.rule.begin_control()
        yield from start.records
        yield from self.read(CONTROL.topic, start={CONTROL: start.offset}, settled=settled)

    def messages(self, topic: str, *, start: Mapping[TopicPartition, int] | None = None) -> Iterator[Received]:
        """Yield the records of `read`, or of `control`, with their messages, None for tombstones. Foreign records are
        skipped. ContractError for an undecodable record that a reader needs."""
        for record in self.control() if topic == CONTROL.topic else self.read(topic, start=start):
            if record.value is not None and codec.is_foreign(record):
                log.error("%s: of no contract of this topic; passed over", record)
                continue
            try:
                yield Received(record, self.rule.decode(record))
            except ForeignRecord as error:
                log.error("%s; passed over", error)

    def is_claimed(self, record: Record) -> bool:
        """Return whether the role that writes the record's topic was ever claimed under the record's epoch."""
        return self.rule.is_claimed(TOPICS[record.topic].writer or "", writer_epoch(record))

    def in_force(self, topic: str) -> Iterator[tuple[Record, Message | None]]:
        """Yield records in force, for tools that only read. Foreign and undecodable records are left out silently."""
        return self.rule.messages(self.read(topic))

    def ends(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the current ends of the topic's partitions, or of some of them. `settled` is as for
        `Admin.end_offsets`."""
        return self.transport.admin.end_offsets(topic, settled=settled, partitions=partitions)

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        """Return the positions that a consumer group has committed."""
        return self.transport.admin.committed(group)
