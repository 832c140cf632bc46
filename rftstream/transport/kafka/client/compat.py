"""All code that uses private parts of kafka-python, except that for consumers, which is in `compat_consumer`.

Everything here was measured with kafka-python 3.0.12. Each part below tells its purpose and what the client does
without it. `tests/unit/transport/test_kafka_compat.py` fails when the client's own code behind a part changes: read the
change then, and either remove the part or confirm it for the new version.

Importing this module changes parts of kafka-python (`_sock_recv`, `write`, `handshake`, `_build_transport`,
`_refresh_loop`, `run_once`, `_send_producer_data`), the level of its logger, and the selector's way of logging.
docs/decisions/0017 has the measurements of the parts that improve speed. Each part has a row in the table of
deploy/patches/README.md: the proposal for kafka-python that would replace it, or why there is none."""

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
"""The version of kafka-python with which every part was measured."""

HANDSHAKE_S = 30.0
"""Seconds for a TLS handshake; the client's own limit for a whole connection."""

_RECEIVE_BYTES = 64 << 10
"""Most bytes that one call takes from a connection."""

_ANSWER_MS = 100.0
"""Milliseconds of one wait for the answer to a request of a transaction."""

_IDLE_MS = 60_000.0
"""Milliseconds of one wait of a producer with nothing to send."""

_NOT_READY_S = 0.05
"""Seconds before another try to reach a coordinator that could not be connected."""

# ---------------------------------------------------------------------------------------------- logging


def _log_no_trace(*_: object) -> None:
    """Log nothing.

    For 3.0.12: for each of its steps the selector checks eight times whether to log it."""


# For 3.0.12: at debug level the client's logger prints its whole configuration, with passwords.
logging.getLogger("kafka").setLevel(logging.WARNING)
kafka.net.selector.log_trace = _log_no_trace

connection_log = logging.getLogger("kafka.net.manager")
"""The logger that tells why a connection failed. The client's final error does not tell it."""

CONNECTION_FAILED = "Connection failed: %s"
"""The message, without its argument, that `connection_log` gets for each failed connection."""

throttle_log = logging.getLogger("kafka.net.connection")
"""The logger that tells when a broker throttles this client by its quotas, and when a connection is there. The client
tells it in no other way."""

CONNECTED = "%s: Connected"
"""The message, without its argument, that `throttle_log` gets for each connection, at level INFO."""

THROTTLED = "%s: %s throttled by broker (%d ms)"
"""The message, without its arguments, that `throttle_log` gets for each throttled answer."""

# ---------------------------------------------------------------------------------------------- connections


class NetClient(KafkaNetClient):  # type: ignore[misc]
    """The network of our clients. It does not warn of each step of its loop that takes 0.1 s, as steps do on a busy
    machine."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"slow_task_threshold_secs": 0.0} | settings)

    def await_ready(self, node_id: Any, timeout_ms: float = 30000) -> bool:
        """Return whether the node accepts requests. Return False after a short wait where the client's own method
        raises.

        For 3.0.12: after such an error the producer forgets the request of a transaction whose coordinator it could not
        connect, and waits for the answer for ever."""
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
    """Return the data that came before the end of a connection, and the end with the next call.

    For 3.0.12: a broker that refuses a password sends the reason and closes at once, and the client drops that
    answer."""
    data, error = receive(transport)
    return data, None if data else error


def _receive_much(transport: Any, receive: Callable[[Any], tuple[bytes, Any]]) -> tuple[bytes, Any]:
    """Return the arrived data in large pieces. The end of a connection comes with the next call.

    For 3.0.12: the client takes 4 KB with each system call, and makes one more call to see that nothing is left."""
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
    """Send a request now. Only the part that the socket does not accept now is sent later.

    For 3.0.12: the client first asks its selector whether the socket is writable, which costs one more turn of its loop
    and four more system calls for each request."""
    if transport._writing or transport._closed or not transport._write or not data:
        write(transport, data)
        return
    transport._write_buffer.append(data)
    _, error = transport._sock_send()
    if error:
        transport._writing = True  # later data waits, and is dropped with the connection
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
    """Give up a TLS handshake after HANDSHAKE_S, with a KafkaTimeoutError.

    For 3.0.12: the client waits for ever for a broker that accepts a connection and sends nothing, as a stopped process
    does. Requests to that broker have no time limit either until the handshake is done."""
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
    """Return the transport of a new connection. KafkaConnectionError where the client's own method raises an OSError.

    For 3.0.12: the client raises a bare ConnectionResetError or SSLError if a TLS connection is reset before its
    handshake, and FileNotFoundError if certificates are just being replaced. Code that waits for an answer expects none
    of these."""
    try:
        return await build(manager, node, timeout_at=timeout_at)
    except OSError as error:
        raise kafka_errors.KafkaConnectionError(str(error)) from error


async def _ask_for_metadata_until_closed(cluster: Any, loop: Callable[[Any], Any]) -> None:
    """Restart the loop that refreshes metadata whenever an error has ended it.

    For 3.0.12: the loop ends for good with any error that is no KafkaError, and with every error of another caller's
    request that it waits for. The client then continues with outdated leaders, and never again reads a partition whose
    leader has changed."""
    while not cluster.closed:
        try:
            await loop(cluster)
        except ReferenceError:  # the client no longer exists
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
    """Return the version of the broker to which a client is connected.

    For 3.0.12: the client learns it when it connects, and has no public way to return it."""
    return tuple(client._manager.broker_version)


# ---------------------------------------------------------------------------------------------- admin


class StableAdminClient(KafkaAdminClient):  # type: ignore[misc]
    """An admin client that returns only stable positions, and that can forget the coordinators of groups."""

    def forget_coordinators(self) -> None:
        """Let the client look up the coordinators of groups again.

        For 3.0.12: it remembers a coordinator for ever, even on a broker that is gone."""
        self._manager.cluster._coordinators.clear()

    def _list_group_offsets_requests(self, group_specs: Any) -> Iterator[Any]:
        """Yield requests for positions without a pending commit.

        For 3.0.12: the client has no setting for that (KIP-447)."""
        for group_id, request in super()._list_group_offsets_requests(group_specs):
            request.require_stable = True
            yield group_id, request


# ---------------------------------------------------------------------------------------------- producers


class _AddOffsetsAlone(AddOffsetsToTxnHandler):  # type: ignore[misc]
    """Adds a group to a transaction without sending its positions yet, unlike the client's own request."""

    priority = (Priority.ADD_PARTITIONS_OR_OFFSETS + Priority.END_TXN) / 2
    """After the partitions, even if these are added a second time, since the records wait for them."""

    def handle_response(self, response: Any) -> None:
        """Process the broker's answer. A failure is left to the client's own method."""
        if response.error_code:
            super().handle_response(response)
            return
        self.transaction_manager._transaction_started = True
        self.result.done()


class TransactionParts:
    """The parts of a transaction: records for partitions, and positions of a group. A producer makes one for each
    transaction that it has begun. It calls `begin`, `send` for each record, the client's `flush`, and `send_positions`
    last.

    It replaces four habits of the client, version 3.0.12:

    - The client adds each partition when its first record comes. So a transaction over many partitions begins with
      several requests, one after the other.
    - It adds the group when its positions are sent, which is a separate round trip.
    - It checks and measures each record, which was done here already and takes as long as writing the record.
    - It keeps a refused position, and commits it with the next transaction. The refused work would be skipped and lost.
    """

    def __init__(self, producer: KafkaProducer, group: ConsumerGroupMetadata | None) -> None:
        self._producer = producer
        self._manager = producer._transaction_manager
        self._append = producer._accumulator.append
        self._wake = producer._sender.wakeup
        self._group = group
        self._group_added: Any = None
        self._added: frozenset[KafkaPartition] = frozenset()

    def begin(self, partitions: Collection[KafkaPartition]) -> None:
        """Let the client add the partitions and the group. The call does not wait for that."""
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
        """Let the client send a record whose size was checked, and return the client's future."""
        self._check_open()
        if partition not in self._added:
            # the client does not know the topic yet, and asks the broker first
            return self._producer.send(partition.topic, value, key, list(headers), partition=partition.partition)
        future, is_full, *_ = self._append(partition, None, key, value, headers)
        if is_full:
            self._wake()
        return future

    def send_positions(self, positions: Mapping[KafkaPartition, OffsetAndMetadata]) -> None:
        """Send positions of the group. Return when the broker has accepted them. If it refuses them, its error is
        raised."""
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
    """Send records while the answer to a request of the transaction is still pending.

    For 3.0.12: the client sends nothing until the answer has come. The client still decides which partitions accept
    records: those that it knows to be part of the transaction."""
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
    """Let the client wait 1 ms before its first retry, then 2, 4 and so on, up to its back-off.

    For 3.0.12: the client always waits its whole back-off. A broker that has just committed a transaction accepts the
    next one after a millisecond or two."""
    if manager.has_in_flight_transactional_request():
        return
    again = any(handler.is_retry for _, _, handler in list(manager._pending_requests))
    sender.num_again = getattr(sender, "num_again", 0) + 1 if again else 0
    limit = manager.retry_backoff_ms
    sender.config["retry_backoff_ms"] = min(limit, 2 ** (sender.num_again - 1)) if again else limit


def _send_if_any(sender: Any, send: Callable[..., float], **given: Any) -> float:
    """Send the records that are ready. Return how long to wait afterwards, in milliseconds.

    For 3.0.12: if there are none, the client checks every partition that it has ever written to."""
    return send(sender, **given) if sender._accumulator.has_incomplete else _IDLE_MS


Sender._send_producer_data = functools.partialmethod(_send_if_any, Sender._send_producer_data)
Sender.run_once = functools.partialmethod(_run_once, Sender.run_once)


def force_close(producer: KafkaProducer) -> None:
    """End a producer that could not be closed.

    For 3.0.12: `close` flushes first. If that fails, the client's thread and connections stay."""
    producer._sender.force_close()


def last_error(producer: KafkaProducer) -> BaseException | None:
    """Return the error that put the producer's transaction into its error state, or None.

    For 3.0.12: the client often raises only that the transaction has failed, and an abort clears the cause."""
    error: BaseException | None = producer._transaction_manager._last_error
    return error
