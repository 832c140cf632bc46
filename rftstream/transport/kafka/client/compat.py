"""Everything of ours that reaches into private parts of kafka-python stands here and, what is about consumers, in
`compat_consumer`, and nowhere else.

kafka-python 3.0.12 is the version that all of this was measured with. Each part below says what it is for and what the
client does without it. `tests/unit/transport/test_kafka_compat.py` fails when the client's own code behind a part
changes: look at the change then, and either drop the part or confirm it for the new version.

Importing this module changes parts of kafka-python (`_sock_recv`, `write`, `handshake`, `_build_transport`,
`_refresh_loop`, `run_once`, `_send_producer_data`), the level of its logger, and the selector's way of logging. What
makes it faster was measured for docs/decisions/0017. Each part has a row in the table of deploy/patches/README.md: the
proposal for kafka-python with which it goes, or why there is none.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import kafka.net.selector
from kafka import KafkaAdminClient, KafkaProducer
from kafka import errors as kafka_errors
from kafka.cluster import ClusterMetadata
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.producer.sender import Sender
from kafka.producer.transaction_manager import (
    AddOffsetsToTxnHandler,
    Priority,
    TransactionalRequestResult,
    TransactionManager,
    TransactionState,
    TxnOffsetCommitHandler,
)
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import Headers

log = logging.getLogger(__name__)

VERSION = "3.0.12"
"""The version of kafka-python that every part was measured with."""

HANDSHAKE_S = 30.0
"""Seconds for a TLS handshake; the client's own limit for a whole connection."""

_RECEIVE_BYTES = 64 << 10
"""Bytes that one call takes from a connection at most."""

_ANSWER_MS = 100.0
"""Milliseconds of one wait for an answer to a request of a transaction."""

_IDLE_MS = 60_000.0
"""Milliseconds of one wait of a producer that has nothing to send."""

_NOT_READY_S = 0.05
"""Seconds before a coordinator that could not be connected is tried again."""

# ---------------------------------------------------------------------------------------------- logging


def _log_no_trace(*_: object) -> None:
    """Log nothing.

    For 3.0.12: the selector asks eight times for each step of its own whether to log it."""


# For 3.0.12: when debugging, the client's logger prints its whole configuration, passwords included.
logging.getLogger("kafka").setLevel(logging.WARNING)
kafka.net.selector.log_trace = _log_no_trace

connection_log = logging.getLogger("kafka.net.manager")
"""The logger that says why a connection failed. The error that the client raises in the end does not say it."""

CONNECTION_FAILED = "Connection failed: %s"
"""The message, without its argument, that `connection_log` gets for each connection that failed."""

throttle_log = logging.getLogger("kafka.net.connection")
"""The logger that says that a broker makes this client wait, by its quotas. The client tells it in no other way."""

THROTTLED = "%s: %s throttled by broker (%d ms)"
"""The message, without its arguments, that `throttle_log` gets for each such answer."""

# ---------------------------------------------------------------------------------------------- connections


class NetClient(KafkaNetClient):  # type: ignore[misc]
    """The network of a client of ours. It does not warn of each step of its loop that takes 0.1 s, as steps do on a
    busy machine."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"slow_task_threshold_secs": 0.0} | settings)

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Return whether the node can take requests; False, after a short wait, where the client's own raises.

        For 3.0.12: upon that the producer forgets the request of a transaction whose coordinator it could not connect,
        and waits for the answer for ever."""
        try:
            return bool(super().await_ready(node_id, timeout_ms=timeout_ms))
        except kafka_errors.KafkaConnectionError:
            time.sleep(_NOT_READY_S)
            return False

    def stop(self) -> None:
        """Close all connections and end the thread.

        For 3.0.12: a client whose constructor raises leaves its thread and its sockets behind."""
        self.close()
        self._manager._net.stop()


def _receive_before_end(transport: Any, receive: Callable[[Any], tuple[bytes, Any]]) -> tuple[bytes, Any]:
    """Return the data that came before the end of a connection first, and the end with the next call.

    For 3.0.12: a broker that refuses a password says so and closes at once, and the client throws the answer away."""
    data, error = receive(transport)
    return data, None if data else error


def _receive_much(transport: Any, receive: Callable[[Any], tuple[bytes, Any]]) -> tuple[bytes, Any]:
    """Return the data that has arrived, in large pieces. The end of a connection comes with the next call.

    For 3.0.12: the client takes 4 KB with each system call, and one more call to see that nothing is left."""
    pieces = []
    try:
        while len(piece := transport._sock.recv(_RECEIVE_BYTES)) == _RECEIVE_BYTES:
            pieces.append(piece)
        pieces.append(piece)
    except (BlockingIOError, InterruptedError):
        pass
    except OSError as error:
        if not pieces:
            return b"", kafka_errors.KafkaConnectionError(error)
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return (data, None) if data else receive(transport)


def _write_at_once(transport: Any, write: Callable[[Any, bytes], None], data: bytes) -> None:
    """Send a request now, and later only what the socket does not take now.

    For 3.0.12: the client first asks its selector whether the socket can be written to, which is one more turn of its
    loop and four more system calls for each request."""
    if transport._writing or transport._closed or not transport._write or not data:
        write(transport, data)
        return
    transport._write_buffer.append(data)
    _, error = transport._sock_send()
    if error:
        transport._writing = True  # what is written from now on waits, and is given up with the connection
        transport._net.call_soon(lambda: transport.abort(error=error))
        return
    transport.last_write = time.monotonic()
    if transport._write_buffer:
        transport._writing = True
        transport._write_task = transport._net.call_soon(transport._write_to_sock)


KafkaTCPTransport._sock_recv = functools.partialmethod(_receive_much, KafkaTCPTransport._sock_recv)
KafkaSSLTransport._sock_recv = functools.partialmethod(_receive_before_end, KafkaSSLTransport._sock_recv)
KafkaTCPTransport.write = functools.partialmethod(_write_at_once, KafkaTCPTransport.write)


async def _handshake_in_time(transport: Any, handshake: Callable[[Any], Any]) -> None:
    """Give up a TLS handshake after HANDSHAKE_S. KafkaTimeoutError then.

    For 3.0.12: the client waits for ever for a broker that takes a connection and says nothing, as one does that was
    stopped. What it wants to ask that broker has no time limit either until the handshake is done."""
    until = time.monotonic() + HANDSHAKE_S
    net = transport._net
    waits = (functools.partial(wait, timeout_at=until) for wait in (net.wait_read, net.wait_write))
    transport._net = SimpleNamespace(**dict(zip(("wait_read", "wait_write"), waits, strict=True)))
    try:
        await handshake(transport)
    finally:
        transport._net = net


async def _build_or_tell(
    manager: Any, build: Callable[..., Any], node: Any, timeout_at: float | None = None
) -> KafkaTCPTransport:
    """Return the transport of a new connection. KafkaConnectionError where the client's own raises an OSError.

    For 3.0.12: a TLS connection that is reset before its handshake is told as a bare ConnectionResetError or SSLError,
    certificates that are just being replaced as FileNotFoundError. Who waits for an answer expects none of them."""
    try:
        return await build(manager, node, timeout_at=timeout_at)
    except OSError as error:
        raise kafka_errors.KafkaConnectionError(str(error)) from error


async def _ask_for_metadata_until_closed(cluster: Any, loop: Callable[[Any], Any]) -> None:
    """Begin the loop that asks for metadata again whenever an error has ended it.

    For 3.0.12: it ends for good with any error that is no KafkaError, and with every error of a request that somebody
    else had made and that it waits for. The client then goes on with what it knew of leaders, and never again reads a
    partition that has another one now."""
    while not cluster.closed:
        try:
            await loop(cluster)
        except ReferenceError:  # nobody has the client any more
            return
        except Exception as error:
            log.warning("asking the brokers for metadata failed and goes on: %s: %s", type(error).__name__, error)
            await cluster._wakeup(cluster.refresh_backoff() / 1000)


KafkaSSLTransport.handshake = functools.partialmethod(_handshake_in_time, KafkaSSLTransport.handshake)
KafkaConnectionManager._build_transport = functools.partialmethod(
    _build_or_tell, KafkaConnectionManager._build_transport
)
ClusterMetadata._refresh_loop = functools.partialmethod(_ask_for_metadata_until_closed, ClusterMetadata._refresh_loop)


def broker_version(client: KafkaAdminClient) -> tuple[int, ...]:
    """Return the version of the broker that a client is connected to.

    For 3.0.12: the client finds it out when it connects, and has no public way to ask for it."""
    return tuple(client._manager.broker_version)


# ---------------------------------------------------------------------------------------------- admin


class StableAdminClient(KafkaAdminClient):  # type: ignore[misc]
    """An admin client that gives only stable positions, and that can forget who coordinates a group."""

    def forget_coordinators(self) -> None:
        """Let the client ask anew who coordinates groups.

        For 3.0.12: it remembers a coordinator for ever, also that of a broker that is gone."""
        self._manager.cluster._coordinators.clear()

    def _list_group_offsets_requests(self, group_specs: Any) -> Iterator[Any]:
        """Ask for positions of which no commit is pending.

        For 3.0.12: the client has no setting for that (KIP-447)."""
        for group_id, request in super()._list_group_offsets_requests(group_specs):
            request.require_stable = True
            yield group_id, request


# ---------------------------------------------------------------------------------------------- producers


class _AddOffsetsAlone(AddOffsetsToTxnHandler):  # type: ignore[misc]
    """Adds a group to a transaction and does not yet send its positions, as the client's own does."""

    priority = (Priority.ADD_PARTITIONS_OR_OFFSETS + Priority.END_TXN) / 2
    """After the partitions, also when these are added a second time: the records wait for them."""

    def handle_response(self, response: Any) -> None:
        """Take the broker's answer; the client's own takes that of a failure."""
        if response.error_code:
            super().handle_response(response)
            return
        self.transaction_manager._transaction_started = True
        self.result.done()


class TransactionParts:
    """The parts of a transaction: records to partitions, and positions of a group. A producer makes one for each
    transaction that it has begun, and calls `begin`, `send` for each record, `flush` of the client, and
    `send_positions` last.

    It replaces four habits of the client, version 3.0.12. The client adds each partition when its first record comes,
    so a transaction over many partitions begins with several requests, one after the other. It adds the group when its
    positions are sent, which is a round trip of its own. It checks and measures each record, as was done here already,
    and that takes as long as writing the record. And it keeps a position that was refused, and commits it with the next
    transaction: the refused work would be passed over and lost."""

    def __init__(self, producer: KafkaProducer, group: ConsumerGroupMetadata | None) -> None:
        self._producer = producer
        self._manager = producer._transaction_manager
        self._append = producer._accumulator.append
        self._wake = producer._sender.wakeup
        self._group = group
        self._group_added: Any = None
        self._added: frozenset[KafkaPartition] = frozenset()

    def begin(self, partitions: Collection[KafkaPartition]) -> None:
        """Let the client add the partitions and the group. Returns before that is done."""
        manager, known = self._manager, self._producer._metadata.partitions_for_topic
        self._added = frozenset(partition for partition in partitions if known(partition.topic) is not None)
        with manager._lock:
            for partition in self._added:
                manager.maybe_add_partition_to_transaction(partition)
            if self._added:
                manager._enqueue_request(manager._add_partitions_to_transaction_handler())
            if self._group is not None:
                handler = _AddOffsetsAlone(manager, self._group, {})
                self._group_added = handler.result
                manager._enqueue_request(handler)
        self._wake()

    def send(self, partition: KafkaPartition, key: bytes | None, value: bytes | None, headers: Headers) -> Any:
        """Let the client send a record of a right size, and return its future for that."""
        self._check_open()
        if partition not in self._added:
            # The client does not know the topic yet, and asks the broker first.
            return self._producer.send(partition.topic, value, key, list(headers), partition=partition.partition)
        future, is_full, *_ = self._append(partition, None, key, value, headers)
        if is_full:
            self._wake()
        return future

    def send_positions(self, positions: Mapping[KafkaPartition, OffsetAndMetadata]) -> None:
        """Send positions of the group. Returns when the broker has taken them; raises its error if it refuses them."""
        manager = self._manager
        self._group_added.wait()
        with manager._lock:
            manager._maybe_fail_with_error()
            self._check_open()
            pending = manager._pending_txn_offset_commits
            pending.clear()
            pending.update(positions)
            result = TransactionalRequestResult()
            manager._enqueue_request(TxnOffsetCommitHandler(manager, self._group, pending, result))
        self._wake()
        result.wait()

    def _check_open(self) -> None:
        """Raise KafkaError if the client has given up the transaction, as it does when it begins a new epoch."""
        if self._manager._current_state is not TransactionState.IN_TRANSACTION:
            self._manager._maybe_fail_with_error()
            raise kafka_errors.KafkaError("the transaction is not open any more")


def _run_once(sender: Any, run_once: Callable[[Any], None]) -> None:
    """Send records while the answer to a request of the transaction is still out.

    For 3.0.12: the client sends nothing until that answer is there. Which partitions take records the client still
    decides: those of which it knows that the transaction has them."""
    manager = sender._transaction_manager
    if manager is not None:
        _mind_backoff(sender, manager)
    if manager is None or manager._current_state is not TransactionState.IN_TRANSACTION or sender._topics_to_add:
        run_once(sender)
        return
    asked = manager.has_in_flight_transactional_request() or sender._maybe_send_pending_request()
    timeout_ms = _ANSWER_MS if manager.has_in_flight_transactional_request() else sender.config["retry_backoff_ms"]
    if not manager.has_partitions_to_add():
        records_ms = sender._send_producer_data()
        timeout_ms = min(timeout_ms, records_ms) if asked else records_ms
    sender._client.poll(timeout_ms=timeout_ms)


def _mind_backoff(sender: Any, manager: TransactionManager) -> None:
    """Let the client wait 1 ms before it asks again, then 2, 4 and so on, up to its back-off.

    For 3.0.12: the client always waits its whole back-off. The broker that has just committed a transaction takes the
    next one after a millisecond or two."""
    if manager.has_in_flight_transactional_request():
        return
    again = any(handler.is_retry for _, _, handler in list(manager._pending_requests))
    sender.num_again = getattr(sender, "num_again", 0) + 1 if again else 0
    limit = manager.retry_backoff_ms
    sender.config["retry_backoff_ms"] = min(limit, 2 ** (sender.num_again - 1)) if again else limit


def _send_if_any(sender: Any, send: Callable[..., float], **given: Any) -> float:
    """Return how long to wait, in milliseconds, after records were sent that are ready.

    For 3.0.12: where there are none, the client looks through every partition that it has ever written to."""
    return send(sender, **given) if sender._accumulator.has_incomplete else _IDLE_MS


Sender._send_producer_data = functools.partialmethod(_send_if_any, Sender._send_producer_data)
Sender.run_once = functools.partialmethod(_run_once, Sender.run_once)


def force_close(producer: KafkaProducer) -> None:
    """Let a producer end that could not be closed.

    For 3.0.12: `close` flushes first. If that fails, the client's thread goes on, connections and all."""
    producer._sender.force_close()


def last_error(producer: KafkaProducer) -> BaseException | None:
    """Return what put the producer's transaction into its error state, or None.

    For 3.0.12: the client often raises only that the transaction has failed, and an abort forgets why."""
    error: BaseException | None = producer._transaction_manager._last_error
    return error
