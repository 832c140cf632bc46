"""The members of `scale.py`, each in a process of its own, or many in one.

`explore` is an explorer without an engine: the real loop (ConcurrentService) over the real transport, with a step that
waits where an engine would sample. `attend` is many members in one process, with the transport's member and nothing
else: to the brokers they are members like others, with connections and heartbeats of their own, which join, share out,
own partitions and ask for their positions; they fetch nothing and commit nothing. `explore_by_hand` is the same loop
as one would write it with kafka-python: no fencing by ownership, no saved work to restore, no topics to follow. Members
and their parent share a table in a file. Each member writes its own row, so that it may be killed at any instruction.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from kafka import KafkaConsumer, KafkaProducer
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError
from kafka.net.connection import KafkaConnection
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.clock import SystemClock
from rftstream.config.sections import RunConfig
from rftstream.contracts.arrays import Array
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.errors import ContractError, TransportError
from rftstream.roles.explorer import EXPLORER
from rftstream.runs.folder import RunFolder
from rftstream.service.loops.concurrent import ConcurrentService
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Publish, Role, RoleContext, Saved
from rftstream.transport.kafka.connection import BACKOFF_MS
from rftstream.transport.kafka.producer import BATCH_BYTES
from rftstream.transport.kafka.transport import KafkaTransport

COLUMNS = ("began_at", "ready_at", "owned", "owned_at", "first_commit_at", "commits", "rollouts", "commit_s", "redone")
"""Of a member's row, before the counts of its requests. Times are those of `time.monotonic`."""
REQUESTS = (
    "Fetch", "Heartbeat", "JoinGroup", "SyncGroup", "OffsetFetch", "Metadata", "ListOffsets", "FindCoordinator",
    "Produce", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn",
)  # fmt: skip
"""Kinds of requests that are counted."""
PACE, TOKENS, OPEN = 0, 1, 2
"""Columns of the parent's row, the first: seconds that a rollout takes, its tokens, and whether members may join."""
MAX_WAIT_S = 0.5
SESSION_S = 10.0
ATTEND_S = 0.25
"""Seconds in which each of many members in a process is looked at once. It joins while it is looked at."""
BY_HAND = "by-hand"
"""Name of the group of the members that are written by hand."""
TOKEN_BYTES = 9
"""Of a token in a rollout: id, logprob, mask."""


class Board:
    """The table that the parent and its members share. The parent makes it; a member opens it with its own row."""

    def __init__(self, path: Path, rows: int) -> None:
        shape = (rows, len(COLUMNS) + len(REQUESTS))
        if not path.exists():
            path.write_bytes(bytes(8 * shape[0] * shape[1]))
        self._table = np.memmap(path, dtype=np.float64, mode="r+", shape=shape)

    @property
    def pace_s(self) -> float:
        return float(self._table[0, PACE])

    @property
    def num_tokens(self) -> int:
        return int(self._table[0, TOKENS])

    @property
    def is_open(self) -> bool:
        return bool(self._table[0, OPEN])

    def open(self) -> None:
        """Let members join."""
        self._table[0, OPEN] = 1.0

    def order(self, *, pace_s: float, num_tokens: int) -> None:
        """Tell all members how long a rollout takes, and how long it is."""
        self._table[0, PACE], self._table[0, TOKENS] = pace_s, num_tokens

    def row(self, number: int) -> np.ndarray:
        return cast(np.ndarray, self._table[number])

    def column(self, name: str, numbers: Sequence[int]) -> np.ndarray:
        return np.array(self._table[list(numbers), COLUMNS.index(name)])

    def requests(self, numbers: Sequence[int]) -> Counter[str]:
        """Return how many requests of each kind these members have sent."""
        sums = self._table[list(numbers), len(COLUMNS) :].sum(axis=0)
        return Counter({name: int(count) for name, count in zip(REQUESTS, sums, strict=True)})


class _Line:
    """A member's own row."""

    def __init__(self, board: Board, number: int, *, counts: bool = True) -> None:
        """`counts`: it counts the requests of its process."""
        self._board, self._row = board, board.row(number)
        if counts:
            self._count_requests()
        self.set("began_at", time.monotonic())

    def wait(self) -> None:
        """Wait until members may join. What it takes to start an interpreter and clients is over."""
        self.set("ready_at", time.monotonic())
        while not self._board.is_open:
            time.sleep(0.1)

    def set(self, name: str, value: float) -> None:
        self._row[COLUMNS.index(name)] = value

    def add(self, name: str, value: float = 1.0) -> None:
        self._row[COLUMNS.index(name)] += value

    def owns(self, count: int) -> None:
        if count and not self._row[COLUMNS.index("owned_at")]:
            self.set("owned_at", time.monotonic())
        self.set("owned", count)

    def committed(self, num_rollouts: int, took_s: float) -> None:
        if not self._row[COLUMNS.index("first_commit_at")]:
            self.set("first_commit_at", time.monotonic())
        self.add("commits")
        self.add("rollouts", num_rollouts)
        self.add("commit_s", took_s)

    def _count_requests(self) -> None:
        """Count what the clients of this process send; the client has no public way to be asked by kind."""
        places = {name: len(COLUMNS) + index for index, name in enumerate(REQUESTS)}
        row, send = self._row, KafkaConnection._send_request

        def counted(connection: Any, request: Any, *arguments: Any, **options: Any) -> Any:
            place = places.get(type(request).__name__.removesuffix("Request"))
            if place is not None:
                row[place] += 1
            return send(connection, request, *arguments, **options)

        KafkaConnection._send_request = counted


# ------------------------------------------------------------------------------------------ an explorer's loop


class _Engine(ConcurrentStep):
    """Samples one rollout at a time, by waiting. ConcurrentService calls it as it calls an explorer's step. The next
    task is taken when the rollout is on the log, so that each transaction carries one rollout."""

    def __init__(self, board: Board, line: _Line, number: int) -> None:
        self._board, self._line = board, line
        self._chance = random.Random(number)
        self._item: Item | None = None
        self._share, self._begun, self._handed_at = 1.0, 0.0, 0.0

    @property
    def room(self) -> int:
        return 0 if self._item else 1

    def start(self, item: Item) -> None:
        self._item, self._handed_at = item, 0.0
        self._share, self._begun = self._chance.uniform(0.5, 1.5), time.monotonic()

    def advance(self) -> Sequence[Done]:
        if self._item is None or self._handed_at or self._left_s() > 0:
            return ()
        self._handed_at = time.monotonic()
        task, record = cast(Task, self._item.received.message), self._item.received.record
        rollout = _rollout(task, self._board.num_tokens, self._chance)
        return [Done(self._item.number, (Publish("rollouts", record.partition, rollout),))]

    def _left_s(self) -> float:
        # Asked anew each time: the parent may change the pace meanwhile.
        return self._begun + self._share * self._board.pace_s - time.monotonic()

    def idle_s(self) -> float:
        return FOREVER if self._item is None or self._handed_at else max(0.0, min(MAX_WAIT_S, self._left_s()))

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        if finished:
            self._line.committed(len(finished), time.monotonic() - self._handed_at)
            self._item = None

    def drop(self, numbers: Collection[int]) -> None:
        if self._item is not None and self._item.number in numbers:
            self._line.add("redone")
            self._item = None

    def not_begun(self) -> Collection[int]:
        return ()

    def forget(self, partitions: Collection[int]) -> None:
        pass

    def restore_partials(self, records: Sequence[Record]) -> None:
        pass

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        return ()

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        raise AssertionError(str(error))


def _rollout(task: Task, num_tokens: int, chance: random.Random) -> Rollout:
    """Return a rollout whose tokens and logprobs are as hard to compress as sampled ones."""
    sampled = np.frombuffer(chance.randbytes(2 * num_tokens), np.uint16).astype(np.int32)
    logprobs = -np.frombuffer(chance.randbytes(4 * num_tokens), np.uint32).astype(np.float32) / 2.0**31
    segment = Segment(
        token_ids=Array.of(sampled, "int32"),
        behavior_logprobs=Array.of(logprobs, "float32"),
        loss_mask=Array.of(np.ones(num_tokens, np.uint8), "uint8"),
        versions=(VersionSpan(start=0, count=num_tokens, trainer_epoch=1, version=0),),
    )
    return Rollout(
        ids=task.ids,
        status=RolloutStatus.completed,
        problem=task.problem,
        num_tokens=num_tokens,
        sampling=task.sampling,
        turns=(Turn(role="assistant", content="", num_tokens=num_tokens, finish_reason="stop"),),
        segments=(segment,),
    )


def explore(path: Path, rows: int, number: int, config: RunConfig, folder: RunFolder) -> None:
    """Be an explorer until the process is killed."""
    board = Board(path, rows)
    line = _Line(board, number)
    transport: Any = KafkaTransport(folder.run_id, config.transport, create=False)
    context = RoleContext(
        config=config,
        folder=folder,
        clock=SystemClock(),
        transport=transport,
        process=f"explorer-{number}",
        make_store=_no_store,
        check_manifest=lambda manifest: None,
    )
    role = Role(spec=EXPLORER, step=_Engine(board, line, number))
    while (service := _service(role, context)) is None:
        time.sleep(MAX_WAIT_S)
    line.wait()
    while True:
        idle_s = service.tick()
        line.owns(cast(int, service.health()["partitions"]))
        if idle_s > 0:
            service.wait(min(idle_s, MAX_WAIT_S))


def attend(path: Path, rows: int, numbers: Sequence[int], config: RunConfig, folder: RunFolder) -> None:
    """Be members that have their hands full, until the process is killed."""
    board = Board(path, rows)
    lines = [_Line(board, number, counts=number == numbers[0]) for number in numbers]
    transport: Any = KafkaTransport(folder.run_id, config.transport, create=False)
    members = [
        transport.member(
            EXPLORER.name, EXPLORER.consumes, name=f"member-{number}",
            session_timeout_s=config.transport.session_timeout_s,
        )
        for number in numbers
    ]  # fmt: skip
    for line in reversed(lines):
        line.set("ready_at", time.monotonic())
    lines[0].wait()
    known: list[Any] = [{} for _ in members]
    while True:
        began = time.monotonic()
        for index, (member, line) in enumerate(zip(members, lines, strict=True)):
            member.poll(0)
            assignment = member.assignment()
            if assignment is known[index]:
                continue
            if new := [place for place, given in assignment.items() if known[index].get(place) != given]:
                for place, position in member.committed(new).items():
                    member.seek(place, position.offset)
                member.pause(new)
            known[index] = assignment
            line.owns(len(assignment))
        time.sleep(max(0.0, ATTEND_S - (time.monotonic() - began)))


def _service(role: Role, context: RoleContext) -> ConcurrentService | None:
    """Return the loop, or None while the brokers do not answer."""
    try:
        return ConcurrentService(role, context)
    except TransportError:
        return None


def _no_store(patience_s: float | None) -> Any:
    raise AssertionError("these members fetch no weights")


# ------------------------------------------------------------------------------------------ the same by hand


def explore_by_hand(path: Path, rows: int, number: int, servers: str, run_id: str) -> None:
    """Be a consumer and a producer until the process is killed."""
    board = Board(path, rows)
    line = _Line(board, number)
    chance = random.Random(number)
    source, target = f"{run_id}.tasks", f"{run_id}.rollouts"
    consumer = KafkaConsumer(
        source,
        bootstrap_servers=servers.split(","),
        group_id=f"{run_id}.{BY_HAND}",
        partition_assignment_strategy=[CooperativeStickyAssignor],
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=int(SESSION_S * 1000),
        metrics_enabled=False,
    )
    producer = KafkaProducer(
        bootstrap_servers=servers.split(","),
        transactional_id=f"{run_id}.{BY_HAND}.{number}",
        transaction_timeout_ms=int(SESSION_S * 1000),
        compression_type="zstd",
        retry_backoff_ms=BACKOFF_MS,
        batch_size=BATCH_BYTES,
        max_request_size=64 << 20,
        metrics_enabled=False,
    )
    producer.init_transactions()
    line.wait()
    waiting: list[Any] = []
    share, begun = 1.0, 0.0
    while True:
        left_s = begun + share * board.pace_s - time.monotonic()
        if waiting and left_s <= 0:
            _carry(producer, consumer, line, waiting.pop(0), target, chance.randbytes(TOKEN_BYTES * board.num_tokens))
        if waiting:
            consumer.pause(*consumer.assignment())
        elif consumer.paused():
            consumer.resume(*consumer.paused())
        for records in consumer.poll(timeout_ms=min(200, max(0, int(1000 * left_s))) or 200, max_records=1).values():
            if not waiting:
                share, begun = chance.uniform(0.5, 1.5), time.monotonic()
            waiting.extend(records)
        line.owns(len(consumer.assignment()))


def _carry(producer: Any, consumer: Any, line: _Line, record: Any, target: str, value: bytes) -> None:
    began, place = time.monotonic(), KafkaPartition(record.topic, record.partition)
    producer.begin_transaction()
    try:
        producer.send(target, value, record.key, partition=record.partition)
        positions = {place: OffsetAndMetadata(record.offset + 1, "", -1)}
        producer.send_offsets_to_transaction(positions, consumer.group_metadata())
        producer.commit_transaction()
    except KafkaError:  # the partition may be another's by now
        producer.abort_transaction()
        line.add("redone")
    else:
        line.committed(1, time.monotonic() - began)
