"""What `compat` does between kafka-python and its sockets, and in the course of a transaction. Needs no broker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from kafka import errors as kafka_errors
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaTCPTransport
from kafka.producer.transaction_manager import ProducerIdAndEpoch, TransactionManager, TransactionState
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

from rftstream.transport.kafka.client import compat


@pytest.fixture
def network() -> Iterator[NetworkSelector]:
    made = NetworkSelector()
    yield made
    made.close()


# -- what is sent and received


def connected(network: NetworkSelector) -> tuple[KafkaTCPTransport, socket.socket, list]:
    """Return a transport, the other end of its connection, and what its connection is told at its end."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    transport, ends = KafkaTCPTransport(network, mine), []
    transport.set_protocol(SimpleNamespace(_sensors=None, connection_lost=ends.append))
    return transport, theirs, ends


def test_a_request_is_sent_at_once_and_what_is_left_later(network):
    transport, theirs, ends = connected(network)
    with theirs:
        transport.write(b"request")
        assert theirs.recv(100) == b"request"
        assert not transport._writing and not network._ready
        much = bytes(4 << 20)
        transport.write(much)
        transport.write(b"after it")
        assert transport._writing
        received = bytearray()
        theirs.setblocking(False)
        while len(received) < len(much) + 8:
            network.poll(timeout_ms=10)
            with suppress(BlockingIOError):
                received += theirs.recv(1 << 20)
        assert received == much + b"after it"
        assert ends == []
        transport.abort()


def test_a_request_that_cannot_be_sent_ends_the_connection(network):
    transport, theirs, ends = connected(network)
    theirs.close()
    transport.write(b"request")
    assert ends == [], "the connection still has to note whose request it was"
    network.poll(timeout_ms=0)
    assert [type(end) for end in ends] == [kafka_errors.KafkaConnectionError]


@pytest.mark.parametrize("length", [1, compat._RECEIVE_BYTES, compat._RECEIVE_BYTES + 1])
def test_all_that_has_arrived_is_received(network, length):
    transport, theirs, _ = connected(network)
    with theirs:
        assert transport._sock_recv() == (b"", None)
        theirs.sendall(bytes(length))
        assert transport._sock_recv() == (bytes(length), None)
        assert transport._sock_recv() == (b"", None)
        transport.abort()


# -- transactions


class _Sender:
    """The members of the client's sender that `compat` reaches into; the turns go to a list."""

    def __init__(self, manager: TransactionManager) -> None:
        self._transaction_manager = manager
        self._topics_to_add: set = set()
        self.config = {"retry_backoff_ms": 5}
        self.turns: list = []
        self._client = SimpleNamespace(poll=lambda timeout_ms: self.turns.append(("poll", timeout_ms)))

    def _maybe_send_pending_request(self) -> bool:
        request = self._transaction_manager.next_request_handler(False)
        if request is None:
            return False
        self.turns.append(type(request).__name__)
        self._transaction_manager.next_in_flight_request_correlation_id()
        return True

    def _send_producer_data(self) -> float:
        self.turns.append("records")
        return 7.0

    def wakeup(self) -> None:
        self.turns.append("wake")

    def turn(self) -> list:
        self.turns = []
        compat._run_once(self, lambda sender: sender.turns.append("the client's own"))
        return self.turns


A, B = TopicPartition("known", 0), TopicPartition("known", 1)


@pytest.fixture
def sender() -> _Sender:
    manager = TransactionManager(transactional_id="id", retry_backoff_ms=5)
    manager.set_producer_id_and_epoch(ProducerIdAndEpoch(1, 1))
    manager._current_state = TransactionState.IN_TRANSACTION
    return _Sender(manager)


def parts_of(sender: _Sender, group: str | None = "group") -> compat.TransactionParts:
    producer = SimpleNamespace(
        _transaction_manager=sender._transaction_manager,
        _sender=sender,
        _metadata=SimpleNamespace(partitions_for_topic=lambda topic: {0, 1} if topic == "known" else None),
        _accumulator=SimpleNamespace(append=lambda *record: (record, record[2] == b"full", False, False)),
        send=lambda *record, partition: ("asks", *record, partition),
    )
    return compat.TransactionParts(producer, None if group is None else ConsumerGroupMetadata(group))


def answer(sender: _Sender, handler: object, errors: list[int]) -> None:
    manager = sender._transaction_manager
    manager.clear_in_flight_transactional_request_correlation_id()
    handler.handle_response(SimpleNamespace(
        error_code=errors[0],
        results_by_topic_v3_and_below=[("known", list(zip((0, 1), errors, strict=False)))],
    ))  # fmt: skip


def test_partitions_are_added_at_once_and_records_need_not_wait_for_the_group(sender):
    manager = sender._transaction_manager
    parts = parts_of(sender)
    parts.begin([A, B, TopicPartition("unknown", 0)])
    (_, _, partitions), (_, _, group) = sorted(manager._pending_requests, key=lambda one: one[:2])
    assert sorted(partitions.request.v3_and_below_topics[0].partitions) == [0, 1]
    assert sender.turn() == ["AddPartitionsToTxnHandler", ("poll", compat._ANSWER_MS)], "no partition takes records yet"
    assert sender.turn() == [("poll", compat._ANSWER_MS)]
    answer(sender, partitions, [0, 0])
    assert sender.turn() == ["_AddOffsetsAlone", "records", ("poll", 7.0)]
    assert sender.turn() == ["records", ("poll", 7.0)]
    answer(sender, group, [0])
    assert group.result.succeeded and not manager._pending_requests, "no position is sent with it"


def test_partitions_that_are_added_again_come_before_the_group(sender):
    parts_of(sender).begin([A])
    manager = sender._transaction_manager
    partitions = manager._pending_requests[0][2]
    assert sender.turn()[0] == "AddPartitionsToTxnHandler"
    answer(sender, partitions, [kafka_errors.ConcurrentTransactionsError.errno])
    assert sender.turn()[0] == "AddPartitionsToTxnHandler"


@pytest.mark.law("lost")
def test_only_the_positions_of_this_transaction_are_sent(sender):
    manager = sender._transaction_manager
    manager._pending_txn_offset_commits[B] = OffsetAndMetadata(3, "refused before", -1)
    parts = parts_of(sender)
    parts._group_added = SimpleNamespace(wait=lambda: None)
    sent = threading.Thread(target=parts.send_positions, args=({A: OffsetAndMetadata(7, "", -1)},), daemon=True)
    sent.start()
    while not manager._pending_requests:
        sent.join(0.01)
    handler = manager._pending_requests[0][2]
    assert [(one.name, [each.partition_index for each in one.partitions]) for one in handler.request.topics] == [
        ("known", [0])
    ]
    handler.result.done()
    sent.join(10.0)
    assert not sent.is_alive()


@pytest.mark.law("lost")
def test_positions_are_not_sent_after_an_error(sender):
    parts = parts_of(sender)
    parts._group_added = SimpleNamespace(wait=lambda: None)
    sender._transaction_manager.transition_to_abortable_error(kafka_errors.GroupAuthorizationFailedError())
    with pytest.raises(kafka_errors.KafkaError):
        parts.send_positions({A: OffsetAndMetadata(7, "", -1)})
    assert not sender._transaction_manager._pending_requests


def test_records_of_a_known_topic_go_to_the_client_directly(sender):
    parts = parts_of(sender, group=None)
    parts.begin([A])
    sender.turns = []
    assert parts.send(A, b"key", b"value", ()) == (A, None, b"key", b"value", ())
    assert sender.turns == []
    parts.send(A, b"full", b"value", ())
    assert sender.turns == ["wake"]
    unknown = TopicPartition("unknown", 2)
    assert parts.send(unknown, b"key", b"value", ()) == ("asks", "unknown", b"value", b"key", [], 2)


def test_outside_of_a_transaction_the_client_does_as_it_does(sender):
    sender._transaction_manager._current_state = TransactionState.COMMITTING_TRANSACTION
    assert sender.turn() == ["the client's own"]
    sender._transaction_manager._current_state = TransactionState.IN_TRANSACTION
    sender._topics_to_add.add("new")
    assert sender.turn() == ["the client's own"]


def test_the_first_wait_before_asking_again_is_short(sender):
    manager, waits = sender._transaction_manager, []
    request = SimpleNamespace(is_retry=True)
    for waiting in ([], [request], [request], [request], [request], [], [request]):
        manager._pending_requests = [(0, 0, one) for one in waiting]
        compat._mind_backoff(sender, manager)
        waits.append(sender.config["retry_backoff_ms"])
    assert waits == [5, 1, 2, 4, 5, 5, 1]


def test_a_producer_without_records_looks_through_nothing():
    sender = SimpleNamespace(_accumulator=SimpleNamespace(has_incomplete=False))
    assert compat._send_if_any(sender, lambda sender: 3.0) == compat._IDLE_MS
    sender._accumulator.has_incomplete = True
    assert compat._send_if_any(sender, lambda sender: 3.0) == 3.0
