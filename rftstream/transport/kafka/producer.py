"""Transactions on Kafka. After an error, either nothing of the transaction is visible, or the producer is lost.

A transaction has four parts, in this order: begin, records, positions, commit. The broker is told at the beginning
which partitions take part, and while the records are on their way which group does. The positions stay the last that is
sent before the commit. After an error the producer aborts the transaction. The broker accepts no abort once a commit
has begun, so an accepted abort proves that nothing is visible. If the abort is not accepted (the producer was fenced,
the transaction timed out, or there is no answer), the producer is lost. It is not used again, and `start` makes a new
client.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kafka import KafkaProducer as Client
from kafka import errors as kafka_errors
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream import faults
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import (
    AssignmentLost,
    ConfigError,
    ProducerLost,
    TransactionAborted,
    TransportError,
)
from rftstream.transport.base import Position, Snapshot, TopicSettings
from rftstream.transport.checks import check_commit, check_metadata, too_large
from rftstream.transport.kafka.client import compat
from rftstream.transport.kafka.connection import KafkaClientFactory, is_passing, named

log = logging.getLogger(__name__)

DELIVERY_S = 30.0
"""Seconds after which the client stops trying to deliver a record."""
WATCHDOG_S = 45.0
"""Seconds that the calls of one transaction may take together. If they fail, the abort may take as many seconds again.
The client's own `flush`, `commit_transaction` and `abort_transaction` have no time limits, nor has the wait for its
positions.

This is longer than DELIVERY_S: a transaction is not abandoned while the client still tries to deliver its records."""

MAX_UNSENT_BYTES = 32 << 20
"""Bytes after which the producer waits for delivery. `send` does not block, and the client has no limit of its own."""

BATCH_BYTES = 512 << 10
"""Size of a batch, in bytes. It is below admin.OVERHEAD_BYTES, and every topic accepts batches of at least that many
bytes. So the broker never refuses a record only because it shares a batch with other records."""

LINGER_MS = 50
"""Milliseconds for which a batch that is not full waits for more records of its transaction. The last batches wait
less: the end of the transaction sends them."""

_OF_THE_GROUP = (
    kafka_errors.CommitFailedError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.UnknownMemberIdError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.FencedInstanceIdError,
)


class KafkaProducer:
    """`Producer` on Kafka. `KafkaTransport.producer` makes it; `start` makes the client.

    The calls of a transaction run in a separate thread. After `watchdog_s` seconds without a result the producer
    abandons that thread and is lost."""

    def __init__(
        self,
        clients: KafkaClientFactory,
        transactional_id: str,
        *,
        timeout_s: float,
        settings: Callable[[str], TopicSettings],
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        self._clients = clients
        self._id = clients.name(transactional_id)
        self._timeout_s = timeout_s
        self._settings = settings
        self._watchdog_s = watchdog_s
        self._client: Client | None = None
        self._hand: _Hand | None = None

    def start(self) -> None:
        self.close()
        faults.at("before_start")
        client = self._clients.producer(
            client_id=self._id,
            transactional_id=self._id,
            transaction_timeout_ms=int(self._timeout_s * 1000),
            compression_type="zstd",
            batch_size=BATCH_BYTES,
            linger_ms=LINGER_MS,
            max_request_size=64 << 20,
            max_block_ms=int(max(10.0, self._timeout_s) * 1000),
            delivery_timeout_ms=int(DELIVERY_S * 1000),
        )
        try:
            client.init_transactions()
        except kafka_errors.KafkaError as error:
            _end(client)
            raise self._clients.reworded(error, f"producer {self._id}: could not start") from None
        self._client, self._hand = client, _Hand(self._id)
        faults.at("after_start")

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position] | None = None,
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        client, hand = self._client, self._hand
        owner = check_commit(self._id, positions, group, snapshot, has_begun=client is not None)
        assert client is not None and hand is not None, "both are there, or none"
        self._check(records, positions or {}, snapshot)
        if not records and not positions:
            # The client would end an empty transaction without asking the broker. So committing it would not even tell
            # whether this producer is fenced.
            return
        offsets = {
            self._clients.partition(place): OffsetAndMetadata(position.offset, position.metadata, -1)
            for place, position in (positions or {}).items()
        }
        token: Any = snapshot.token if snapshot is not None else ConsumerGroupMetadata(self._clients.name(owner or ""))
        faults.at("before_commit")
        try:
            hand.do(lambda: self._transact(client, records, offsets, token), self._watchdog_s)
        except TransportError:
            raise
        except _Expired:
            self._lose()
            raise ProducerLost(
                f"producer {self._id}: no answer from {self._clients.servers} for {self._watchdog_s:g} s, so the"
                f" transaction may have been committed: start the producer again and read what is on the log, as"
                f" workers do by themselves; check that the broker is up"
            ) from None
        except (kafka_errors.KafkaError, OSError, ValueError, AssertionError) as error:
            self._give_up(client, hand, error, positions or {})

    def close(self) -> None:
        client, hand, self._client, self._hand = self._client, self._hand, None, None
        if hand is not None:
            hand.end()
        if client is not None:
            _end(client)

    def _transact(
        self, client: Client, records: Sequence[NewRecord], offsets: Mapping[Any, OffsetAndMetadata], token: Any
    ) -> None:
        client.begin_transaction()
        parts = compat.TransactionParts(client, token if offsets else None)
        name = self._clients.name
        places = {(record.topic, record.partition) for record in records}
        partitions = {(topic, number): KafkaPartition(name(topic), number) for topic, number in places}
        parts.begin(partitions.values())
        num_unsent = 0
        sent: list[Any] = []
        for record in records:
            partition = partitions[record.topic, record.partition]
            sent.append(parts.send(partition, record.key, record.value, record.headers))
            num_unsent += record.num_bytes
            if num_unsent >= MAX_UNSENT_BYTES:
                client.flush()
                num_unsent = 0
        if sent:
            client.flush()
            _check_delivery(sent)
        if offsets:
            parts.send_positions(offsets)
        faults.at("in_commit")
        client.commit_transaction()
        faults.at("after_commit")

    def _give_up(self, client: Client, hand: _Hand, error: Exception, places: Collection[TopicPartition]) -> None:
        """Abort the transaction. If the abort fails or a record was not delivered, raise ProducerLost. Otherwise raise
        AssignmentLost if `error` is one of `_OF_THE_GROUP`, and TransactionAborted if not. If the client lacks rights,
        raise the error about these rights instead, whether the abort failed or not."""
        forbidden = _forbidden(client, error)  # asked first: the client forgets its error when it aborts
        try:
            hand.do(client.abort_transaction, self._watchdog_s)
        except (_Expired, kafka_errors.KafkaError, OSError, ValueError, AssertionError) as other:
            self._lose()
            if forbidden is not None:
                raise self._clients.reworded(forbidden, f"producer {self._id}: commit") from None
            raise ProducerLost(
                f"producer {self._id}: the transaction failed ({named(error)}) and could not be aborted"
                f" ({named(other)}), so it may have been committed, or another process may have fenced this producer;"
                f" start the producer again and read what is on the log, as workers do by themselves"
            ) from None
        if isinstance(error, _Undelivered):
            # The client's sequence numbers are now ahead of the broker's, which would refuse what comes next.
            self._lose()
            raise ProducerLost(
                f"producer {self._id}: transaction aborted, since a record could not be delivered ({error.args[0]});"
                f" start the producer again and read what is on the log, as workers do by themselves"
            ) from None
        if isinstance(error, _OF_THE_GROUP):
            raise AssignmentLost(
                f"producer {self._id}: the group assigned its partitions again after the snapshot for"
                f" {', '.join(map(str, places))} was taken ({named(error)}); take a new snapshot, and commit only the"
                f" results of partitions that are still owned"
            ) from None
        if forbidden is not None:
            raise self._clients.reworded(forbidden, f"producer {self._id}: commit") from None
        if not is_passing(error):
            log.warning("producer %s: transaction aborted after %s", self._id, named(error))
        raise TransactionAborted(
            f"producer {self._id}: transaction aborted after {named(error)}; commit it again"
        ) from None

    def _lose(self) -> None:
        client, hand, self._client, self._hand = self._client, self._hand, None, None
        if hand is not None:
            hand.end()
        # Closing may hang, too. A thread that hangs there ends with the process.
        threading.Thread(target=_end, args=(client,), name=f"end of {self._id}", daemon=True).start()

    def _check(
        self, records: Sequence[NewRecord], positions: Mapping[TopicPartition, Position], snapshot: Snapshot | None
    ) -> None:
        """Check the transaction before anything is sent. After a refusal by the broker the producer may be lost."""
        known: dict[str, TopicSettings] = {}
        for record in records:
            settings = known.get(record.topic)
            if settings is None:
                settings = known[record.topic] = self._settings(record.topic)
            if not 0 <= record.partition < settings.partitions:
                raise ConfigError(
                    f"{record.topic}[{record.partition}]: no such partition, the topic has {settings.partitions}"
                )
            if record.num_bytes > settings.max_record_bytes:
                raise too_large(record, settings.max_record_bytes)
        for place, position in positions.items():
            check_metadata(place, position)
            if snapshot is not None and place not in snapshot.assignment:
                raise AssignmentLost(
                    f"group {snapshot.group}, {place}: not owned when the snapshot was taken; drop the work of this"
                    f" partition"
                )


class _Expired(Exception):
    """A call took longer than its time limit."""


class _Undelivered(kafka_errors.KafkaError):  # type: ignore[misc]
    """The client has stopped trying to deliver a record of the transaction."""


def _check_delivery(sent: Sequence[Any]) -> None:
    """Raise the error of the first record that failed, and _Undelivered if the client has stopped trying to deliver it.

    The client, version 3.0.12, fails the records that it could not deliver within DELIVERY_S, and does not tell its
    transaction: `flush` returns, and the positions are committed without the records."""
    for record in sent:
        try:
            record.get(DELIVERY_S)
        except kafka_errors.RetriableError as error:
            raise _Undelivered(named(error)) from error


class _Hand:
    """A thread for calls that may hang. The caller waits for their results with a time limit."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"hand of {name}", daemon=True).start()

    def do(self, what: Callable[[], None], limit_s: float) -> None:
        """Run a call in the thread, and raise its error here if it fails. _Expired after `limit_s` seconds."""
        self._todo.put(what)
        try:
            error = self._done.get(timeout=limit_s)
        except queue.Empty:
            raise _Expired from None
        if error is not None:
            raise error

    def end(self) -> None:
        """End the thread when its last call has returned."""
        self._todo.put(None)

    def _work(self) -> None:
        while (what := self._todo.get()) is not None:
            try:
                what()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)


def _end(client: Client | None) -> None:
    try:
        if client is not None:
            client.close(timeout=0.5)
    except Exception as error:  # This does no harm: the broker aborts an open transaction after its time limit.
        log.info("closing a producer: %s", error)
        compat.force_close(client)


def _forbidden(client: Client, error: Exception) -> BaseException | None:
    """Return the client's error about missing rights, or None. The client either raises this error, or raises a general
    error and stores this one."""
    causes = (error, compat.last_error(client))
    return next((cause for cause in causes if isinstance(cause, kafka_errors.AuthorizationError)), None)
