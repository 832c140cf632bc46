"""Each private part of kafka-python that `compat` reaches into is still what it was measured with. Needs no broker.

A failure here means that a new kafka-python changed it. Look at what changed, at the part of compat.py or
compat_consumer.py that is named, and either drop that part or confirm it and renew the fingerprint.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import kafka.net.manager
import kafka.net.selector
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.admin._groups import GroupAdminMixin
from kafka.cluster import ClusterMetadata
from kafka.consumer.fetcher import Fetcher
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.coordinator.base import BaseCoordinator
from kafka.coordinator.consumer import ConsumerCoordinator
from kafka.coordinator.heartbeat import Heartbeat
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.connection import KafkaConnection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.producer.record_accumulator import RecordAccumulator
from kafka.producer.sender import Sender
from kafka.producer.transaction_manager import (
    AddOffsetsToTxnHandler,
    TransactionManager,
    TxnOffsetCommitHandler,
)
from kafka.protocol.metadata import MetadataResponse
from kafka.structs import TopicPartition

from rftstream.transport.kafka import connection
from rftstream.transport.kafka.client import compat, compat_consumer
from rftstream.transport.kafka.member import Together
from tests.suite.each import each


def test_the_version_is_the_one_that_was_measured():
    assert kafka.__version__ == compat.VERSION


def source(function) -> str:
    return " ".join(inspect.getsource(function).split())


def fingerprint(function) -> str:
    return hashlib.sha256(source(function).encode()).hexdigest()[:12]


def original(transport) -> Callable:
    """Return the method of kafka-python that `compat` wraps."""
    return wrapped(transport, "_sock_recv")


def wrapped(cls: type, name: str) -> Callable:
    """Return the method of kafka-python that `compat` has put one of its own around."""
    return cls.__dict__[name].args[0]


REACHED = {
    "NetClient.await_ready": (KafkaNetClient.await_ready, "4780b0efa0b8"),
    "NetClient.await_ready, its caller": (Sender._maybe_send_pending_request, "db5d436ce71e"),
    "NetClient.stop": (NetworkSelector.stop, "79f5ab085718"),
    "_receive_much": (original(KafkaTCPTransport), "4de131981f64"),
    "_write_at_once": (wrapped(KafkaTCPTransport, "write"), "81fc0304d2a1"),
    "_write_at_once, what is left": (KafkaTCPTransport._write_to_sock, "4caa65d1e499"),
    "_write_at_once, plain": (KafkaTCPTransport._sock_send, "17ea0f0a3dbc"),
    "_write_at_once, TLS": (KafkaSSLTransport._sock_send, "9a3050b87ce0"),
    "THROTTLED": (KafkaConnection._maybe_throttle, "294c9b40e5f1"),
    "force_close": (KafkaProducer.close, "8095a06ec990"),
    "LazySelector, registering": (NetworkSelector.register_event, "12c10d46076d"),
    "LazySelector, unregistering": (NetworkSelector.unregister_event, "542a43892793"),
    "_receive_before_end, TLS": (original(KafkaSSLTransport), "e48f9d4d38e8"),
    "_receive_before_end, its caller": (KafkaTCPTransport._read_from_sock, "f53ca5865d1e"),
    "_handshake_in_time": (wrapped(KafkaSSLTransport, "handshake"), "422815753f89"),
    "_build_or_tell": (wrapped(KafkaConnectionManager, "_build_transport"), "0e59de06d133"),
    "_build_or_tell, its caller": (KafkaConnectionManager._connect, "248bb596be1e"),
    "_ask_for_metadata_until_closed": (wrapped(ClusterMetadata, "_refresh_loop"), "cc8a6324a6b5"),
    "_ask_for_metadata_until_closed, what it waits for": (ClusterMetadata.refresh_metadata, "a73a4c2690f7"),
    "broker_version": (KafkaConnectionManager.broker_version.fget, "f38097878690"),
    "StableAdminClient, requests": (GroupAdminMixin._list_group_offsets_requests, "a66d0231dc07"),
    "StableAdminClient, coordinators": (ClusterMetadata.get_coordinator, "2b2c25d55532"),
    "BackgroundJoin, poll": (ConsumerCoordinator.poll, "40057968bd24"),
    "BackgroundJoin, need_rejoin": (ConsumerCoordinator.need_rejoin, "c685854a379e"),
    "BackgroundJoin, join": (BaseCoordinator.ensure_active_group_async, "76890bf439c4"),
    "BackgroundJoin, poll_heartbeat": (BaseCoordinator.poll_heartbeat, "cd4164fa7edd"),
    "BackgroundJoin, its caller": (KafkaConsumer._poll_once, "4e2114198562"),
    "position": (KafkaConsumer.position, "95730d89496a"),
    "_fetches_that_can_be_sent": (wrapped(Fetcher, "_create_fetch_requests"), "70b963025139"),
    "_fetches_that_can_be_sent, its caller": (Fetcher._send_fetches_async, "7669cc369f4e"),
    "_fetches_that_can_be_sent, what sending does first": (KafkaConnectionManager.send, "fb4f643b4432"),
    "_fetches_that_can_be_sent, the error": (Fetcher._handle_fetch_error, "a0c3ab89e571"),
    "_has_records_left": (Fetcher._fetchable_partitions, "a6ab3f4e6d8d"),
    "fetches_under_way": (Fetcher._clean_done_fetch_futures, "fbdb21647975"),
    "drop_used_up_fetch": (Fetcher.fetched_records, "0d2a002ab1be"),
    "TransactionParts, partitions": (TransactionManager._add_partitions_to_transaction_handler, "61ad7670c134"),
    "TransactionParts, one partition": (TransactionManager.maybe_add_partition_to_transaction, "eca875c47690"),
    "TransactionParts, the order": (TransactionManager.next_request_handler, "b2aabe39f597"),
    "TransactionParts, the group": (AddOffsetsToTxnHandler.handle_response, "d0641f0faafd"),
    "TransactionParts, positions": (TxnOffsetCommitHandler.handle_response, "4003b568cc78"),
    "TransactionParts, whose place it takes": (TransactionManager.send_offsets_to_transaction, "c7ec57e854d0"),
    "_run_once": (wrapped(Sender, "run_once"), "ff8256ad771c"),
    "_run_once, who may be sent": (RecordAccumulator._should_stop_drain_batches_for_partition, "e4358a3186fa"),
    "_mind_backoff": (Sender._maybe_send_pending_request, "db5d436ce71e"),
    "_send_if_any": (wrapped(Sender, "_send_producer_data"), "6d67647e8bab"),
    "last_error": (TransactionManager._transition_to, "ae59be0c7bad"),
    "Together": (AbstractPartitionAssignor, "b0c8304c34ff"),
}
"""Part of compat.py, of compat_consumer.py or our assignor -> what it stands on in kafka-python, and the fingerprint of
its source."""


@each("part", REACHED)
def test_the_code_behind_each_part_is_as_it_was(part):
    function, expected = REACHED[part]
    assert fingerprint(function) == expected, f"{part}: kafka-python has changed {function.__qualname__}"


def test_the_clients_log_failed_connections_as_expected():
    assert kafka.net.manager.log is compat.connection_log
    assert f"log.error('{compat.CONNECTION_FAILED}', exc)" in inspect.getsource(kafka.net.manager)
    assert not logging.getLogger("kafka.client").isEnabledFor(logging.DEBUG)


def test_the_client_does_not_warn_of_slow_steps():
    with closing(compat.NetClient(bootstrap_servers="127.0.0.1:9")) as net:
        assert net._net.config["slow_task_threshold_secs"] == 0


class _Connectionless(compat.NetClient):
    """A network without connections."""

    def __init__(self) -> None:
        self._manager = SimpleNamespace(_conns={}, get_connection=lambda node: None)


def test_a_coordinator_that_is_away_is_tried_again():
    with pytest.raises(kafka_errors.KafkaConnectionError):
        KafkaNetClient.await_ready(_Connectionless(), 1, timeout_ms=1)
    assert _Connectionless().await_ready(1, timeout_ms=1) is False


@pytest.fixture
def network() -> Iterator[NetworkSelector]:
    made = NetworkSelector()
    yield made
    made.close()


def test_a_broker_that_takes_a_connection_and_says_nothing_is_given_up(monkeypatch, network):
    monkeypatch.setattr(compat, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        mine.setblocking(False)
        transport = KafkaSSLTransport(network, mine, host="127.0.0.1")
        with closing(transport._sock):
            with pytest.raises(kafka_errors.KafkaTimeoutError):
                network.run(transport.handshake)
            assert transport._net is network


@pytest.mark.parametrize("kind", [ConnectionResetError, ssl.SSLError, FileNotFoundError])
def test_a_connection_that_cannot_be_made_is_told_as_the_clients_loops_expect_it(kind):
    async def reset(manager, node, timeout_at=None):
        raise kind(104, "reset by peer")

    with pytest.raises(kafka_errors.KafkaConnectionError, match="reset by peer"):
        compat._build_or_tell(None, reset, None).send(None)


class Manager:
    """What the metadata need of a client's connections."""

    bootstrapped = True

    def __init__(self, network: NetworkSelector) -> None:
        self._net = network

    def connection_delay(self, name: str) -> float:
        return 0.0


class Asked(ClusterMetadata):
    """Metadata that are asked of a list. An error in it is raised. With the last answer the client is closed."""

    def __init__(self, network: NetworkSelector, answers: list[Exception | None]) -> None:
        super().__init__(retry_backoff_ms=1)
        self.manager = Manager(network)
        self.answers = answers
        self.attach(self.manager)

    async def _do_refresh_metadata(self, node_id: object) -> None:
        answer = self.answers.pop(0)
        self.closed = not self.answers
        if answer:
            raise answer


@pytest.mark.parametrize("kind", [OSError, AttributeError, kafka_errors.KafkaConnectionError])
def test_metadata_is_asked_for_whatever_went_wrong(network, kind):
    cluster = Asked(network, [kind("at once"), kind("once more"), None])
    network.run(cluster._refresh_loop)
    assert cluster.answers == []


def test_metadata_is_asked_for_when_the_request_of_another_has_failed(network):
    cluster = Asked(network, [None])
    cluster._refresh_future = Future()
    network.call_later(0.01, lambda: cluster._refresh_future.failure(kafka_errors.KafkaConnectionError("of another")))
    network.run(cluster._refresh_loop)
    assert cluster.answers == []


def test_nobody_asks_for_the_metadata_of_a_client_that_is_gone(network):
    cluster = Asked(network, [None])
    del cluster.manager
    network.run(cluster._refresh_loop)
    assert cluster.answers == [None]


def test_what_came_before_the_end_of_a_connection_is_given_on():
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.sendall(b"refused")
    theirs.close()
    transport = SimpleNamespace(_sock=mine)
    data, error = KafkaTCPTransport.__dict__["_sock_recv"].__get__(transport, KafkaTCPTransport)()
    assert (data, error) == (b"refused", None)
    data, error = KafkaTCPTransport.__dict__["_sock_recv"].__get__(transport, KafkaTCPTransport)()
    assert data == b"" and isinstance(error, kafka_errors.KafkaConnectionError)
    mine.close()


@pytest.mark.law("twice")
def test_positions_are_asked_for_when_they_are_stable():
    client = compat.StableAdminClient.__new__(compat.StableAdminClient)
    cluster = ClusterMetadata()
    cluster._coordinators[(0, "group")] = 3
    client._manager = SimpleNamespace(
        cluster=cluster, broker_version=(4, 0), broker_version_data=SimpleNamespace(api_version=lambda request: 8)
    )
    plain = [request for _, request in KafkaAdminClient._list_group_offsets_requests(client, {"group": None})]
    stable = [request for _, request in client._list_group_offsets_requests({"group": None})]
    assert [request.require_stable for request in plain] == [False]
    assert [request.require_stable for request in stable] == [True]
    assert compat.broker_version(client) == (4, 0)
    client.forget_coordinators()
    assert cluster.get_coordinator("group") is None


class _Coordinator:
    """The five members of the client's coordinator that a join needs."""

    def __init__(self) -> None:
        self.needs_to_join = True
        self.num_beats = 0
        self.poll = None
        self.heartbeat = Heartbeat(group_id="group", heartbeat_interval_ms=1, max_poll_interval_ms=-1)

    def need_rejoin(self) -> bool:
        return self.needs_to_join

    def ensure_active_group_async(self) -> None: ...

    def poll_heartbeat(self) -> None:
        self.num_beats += 1


def test_a_join_goes_on_between_polls():
    coordinator, joins = _Coordinator(), []
    manager = SimpleNamespace(call_soon=lambda join: joins.append(Future()) or joins[-1])
    compat_consumer.BackgroundJoin(SimpleNamespace(_coordinator=coordinator, _manager=manager))
    assert [coordinator.poll(timeout_ms=0) for _ in range(3)] == [False] * 3
    assert len(joins) == 1
    coordinator.needs_to_join = False
    joins[0].success(True)
    assert coordinator.poll() and coordinator.num_beats == 1
    coordinator.needs_to_join = True
    assert not coordinator.poll()
    joins[1].failure(kafka_errors.UnknownMemberIdError())
    with pytest.raises(kafka_errors.UnknownMemberIdError):
        coordinator.poll()


def test_a_member_that_works_stays_and_joins_again_though_nobody_polls(monkeypatch):
    """Only while it works. What the join brought is told by the next poll."""
    coordinator, joins, now = _Coordinator(), [], [1000.0]
    monkeypatch.setattr(compat_consumer.time, "monotonic", lambda: now[0])
    manager = SimpleNamespace(call_soon=lambda join: joins.append(Future()) or joins[-1])
    join = compat_consumer.BackgroundJoin(SimpleNamespace(_coordinator=coordinator, _manager=manager))
    assert coordinator.heartbeat.poll_timeout_expired(), "nobody polls, and nobody works"
    with join.working():
        assert not coordinator.heartbeat.poll_timeout_expired()
        assert not joins, "it may poll soon"
        now[0] += 1.0
        for _ in range(2):
            assert not coordinator.heartbeat.poll_timeout_expired()
            assert len(joins) == 1
        joins[0].success(True)
        assert not coordinator.heartbeat.poll_timeout_expired()
        assert len(joins) == 2, "it has to once more"
    assert coordinator.heartbeat.poll_timeout_expired()
    assert coordinator.poll() is False, "the second one is under way"


@pytest.fixture
def consumer():
    """The client's own consumer; nothing listens where it would connect to."""
    consumer = KafkaConsumer(bootstrap_servers="127.0.0.1:9", api_version=(3, 0), metrics_enabled=False)
    yield consumer
    consumer.close(autocommit=False, timeout_ms=0)


def test_the_position_is_that_of_the_next_record(consumer):
    partition = TopicPartition("topic", 0)
    assert compat_consumer.position(consumer, partition) is None
    consumer.assign([partition])
    consumer.seek(partition, 7)
    assert compat_consumer.position(consumer, partition) == 7


def test_an_answered_fetch_rings(consumer):
    fetch, answered = Future(), threading.Event()
    consumer._fetcher._fetch_futures.append(fetch)
    assert compat_consumer.fetches_under_way(consumer) == [fetch]
    compat_consumer.wake_on_answer(fetch, answered)
    assert not answered.is_set()
    fetch.success(None)
    assert answered.is_set()


def known_brokers(consumer, *node_ids: int) -> None:
    """Let the client know these brokers, and take number 2 for the leader of the first partition of `topic`, and number
    1 for that of the second."""
    cluster = consumer._client.cluster
    cluster._brokers = {
        number: MetadataResponse.MetadataResponseBroker(number, "127.0.0.1", 9, None) for number in node_ids
    }
    cluster._partitions["topic"] = {
        number: SimpleNamespace(partition_index=number, leader_id=2 - number, leader_epoch=1, replica_nodes=[1, 2])
        for number in (0, 1)
    }


def test_a_broker_that_is_unknown_for_a_moment_is_read_from_again(consumer):
    partitions = [TopicPartition("topic", number) for number in (0, 1)]
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 7)
    fetcher = consumer._fetcher
    known_brokers(consumer, 1)
    assert list(fetcher._create_fetch_requests()) == [1]
    fetcher.send_fetches()
    assert 2 not in fetcher._nodes_with_pending_fetch_requests
    assert consumer._client.cluster.need_update, "it asks where the leader is"
    known_brokers(consumer, 1, 2)
    fetches = fetcher._create_fetch_requests()
    assert 2 in fetches
    request, offsets = fetches[2]
    assert offsets == {partitions[0]: 7}
    assert [[one.partition for one in topic.partitions] for topic in request.topics] == [[0]], "it asks for all anew"


def test_a_broker_that_refuses_who_asks_is_told_and_read_from_later(consumer):
    partition = TopicPartition("topic", 0)
    consumer.assign([partition])
    consumer.seek(partition, 7)
    known_brokers(consumer, 1, 2)
    manager, fetcher = consumer._manager, consumer._fetcher
    manager._auth_failures[2] = kafka_errors.SaslAuthenticationFailedError("the password")
    for _ in range(2):
        with pytest.raises(kafka_errors.SaslAuthenticationFailedError):
            fetcher.send_fetches()
    assert not fetcher._nodes_with_pending_fetch_requests
    manager._auth_failures.clear()
    assert list(fetcher._create_fetch_requests()) == [2]


def test_a_used_up_fetch_is_dropped_and_another_is_kept(consumer):
    fetcher = consumer._fetcher
    compat_consumer.drop_used_up_fetch(consumer)
    for records in ([], [1]):
        fetcher._next_partition_records = records
        compat_consumer.drop_used_up_fetch(consumer)
        assert fetcher._next_partition_records == (records or None)
    fetcher._next_partition_records = None


def test_a_producers_transaction_is_looked_into():
    manager = TransactionManager(transactional_id="id")
    producer = SimpleNamespace(_transaction_manager=manager)
    assert compat.last_error(producer) is None
    manager._last_error = error = kafka_errors.TopicAuthorizationFailedError()
    assert compat.last_error(producer) is error


def test_the_assignor_is_one_of_the_clients():
    assignor = Together(lambda: [TopicPartition("b", 1), TopicPartition("b", 0)])
    metadata = assignor.metadata(["b", "a"])
    assert list(metadata.topics) == ["a", "b"]
    assert [(owned.topic, owned.partitions) for owned in metadata.owned_partitions] == [("b", [0, 1])]


def test_waits_for_quotas_are_counted_and_said_once_in_a_while(caplog):
    """By the words in which the client tells them."""
    filtered = connection._Throttled()
    caplog.set_level(logging.WARNING)

    def tell(milliseconds):
        args = ("<a connection>", "ProduceResponse", milliseconds)
        return filtered.filter(logging.LogRecord("kafka", logging.WARNING, "", 0, compat.THROTTLED, args, None))

    assert not tell(1500)
    assert not tell(500)
    assert filtered.total_s == 2.0
    assert caplog.text.count("throttle this process by their quotas (now for 1.5 s, 1.5 s in all)") == 1
    assert "raise producer_byte_rate" in caplog.text
    assert compat.THROTTLED in inspect.getsource(KafkaConnection._maybe_throttle)
    other = logging.LogRecord("kafka", logging.WARNING, "", 0, "something else", (), None)
    assert filtered.filter(other)


def test_a_broker_that_is_reached_again_is_told_of(caplog):
    """By the words in which the client tells of its connections; nothing else of the level of those is logged."""
    away = connection._Away()
    away.servers = "one:9092,two:9092"
    caplog.set_level(logging.WARNING)

    def tell(message, level=logging.INFO):
        return away.filter(logging.LogRecord("kafka", level, "", 0, message, ("<a connection>",), None))

    assert not tell(compat.CONNECTED)
    assert not caplog.records, "nothing was wrong"
    assert tell(compat.CONNECTION_FAILED, logging.ERROR)
    assert not tell(compat.CONNECTED)
    assert not tell(compat.CONNECTED)
    assert [record.getMessage().partition(", after")[0].partition(" (")[0] for record in caplog.records] == [
        "a Kafka broker of one:9092,two:9092 cannot be reached", "a Kafka broker of one:9092,two:9092 is reached again",
    ]  # fmt: skip
    assert f"log.info('{compat.CONNECTED}', self)" in inspect.getsource(KafkaConnection.initialize)
    assert compat.throttle_log.isEnabledFor(logging.INFO)
