"""What only Kafka has: epochs, generations, markers, brokers that are not there, options that are secrets."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import randbytes

import pytest
from kafka.consumer.fetcher import Fetcher
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.config.sections import TransportSection
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import AssignmentLost, ConfigError, PositionMissing, ProducerLost, TransportError
from rftstream.service.reading import each_record, read_to_ends
from rftstream.testing.conformance_tests.bench import PATIENCE_S, await_true, new, read_all, take, texts
from rftstream.transport.base import Position, Producer, Snapshot, TopicSettings
from rftstream.transport.findings import Level
from rftstream.transport.kafka.transport import KafkaTransport
from tests.broker.conftest import OwnBroker
from tests.broker.fakebroker import old_broker
from tests.commands import PARTITIONS, call, write_run_file
from tests.loopback import taken_port

pytestmark = pytest.mark.broker

Connect = Callable[..., KafkaTransport]
A0 = TopicPartition("a", 0)


@pytest.fixture
def connect(servers: str, run_id: Callable[[], str]) -> Iterator[Connect]:
    name = run_id()
    opened: list[KafkaTransport] = []

    def connect(**options: object) -> KafkaTransport:
        section = TransportSection(kind="kafka", servers=servers, options=dict(options))
        opened.append(KafkaTransport(name, section))
        return opened[-1]

    yield connect
    for transport in opened:
        transport.close()


@pytest.fixture
def transport(connect: Connect) -> KafkaTransport:
    transport = connect()
    transport.admin.ensure_topics({"a": TopicSettings(partitions=1), "b": TopicSettings(partitions=1)})
    transport.admin.commit_initial("g", ["a"])
    return transport


def begin_but_do_not_end(transport: KafkaTransport, name: str) -> None:
    """A transaction with a record and a position, left open."""
    producer = transport.producer(name, timeout_s=300.0)
    producer.start()
    client = producer._client
    assert client is not None
    client.begin_transaction()
    client.send(transport._clients.name("b"), b"never", b"never", partition=0)
    client.flush()
    client.send_offsets_to_transaction(
        {transport._clients.partition(A0): OffsetAndMetadata(1, "", -1)}, transport._clients.name("g")
    )


@pytest.mark.law("twice")
def test_what_was_not_committed_is_never_seen(connect: Connect, transport: KafkaTransport) -> None:
    producer = transport.producer("first")
    producer.start()
    producer.commit([new("b", 0, "before")])
    begin_but_do_not_end(connect(), "zombie")
    producer.commit([new("b", 0, "after")])
    # It stands behind the open one: readers get to it when that one has ended.
    assert texts(read_all(transport, ["b"])) == ["before"]
    assert transport.admin.stable_positions("g") is None
    assert transport.admin.stable_positions("g", [A0]) is None
    assert transport.admin.stable_positions("g", [TopicPartition("b", 0)]) == {}, "nobody waits for others' commits"
    with pytest.raises(TransportError, match="hides"):
        transport.admin.end_offsets("b", settled=True)
    # A successor's start ends it at once.
    successor = connect().producer("zombie")
    successor.start()
    assert transport.admin.end_offsets("b", settled=True) == transport.admin.end_offsets("b")
    assert texts(read_all(transport, ["b"])) == ["before", "after"]
    assert transport.admin.committed("g") == {A0: Position(0)}


def test_an_open_transaction_ends_by_itself(connect: Connect, transport: KafkaTransport) -> None:
    producer = connect().producer("zombie", timeout_s=1.0)
    producer.start()
    assert producer._client is not None
    producer._client.begin_transaction()
    producer._client.send(transport._clients.name("b"), b"never", b"never", partition=0)
    producer._client.flush()
    writer = transport.producer("writer")
    writer.start()
    writer.commit([new("b", 0, "behind it")])
    assert texts(take(transport, transport.reader({TopicPartition("b", 0): 0}), 1)) == ["behind it"]
    # After 1 s, and up to 1 s until the broker looks (transaction.abort.timed.out.transaction.cleanup.interval.ms).
    with pytest.raises(ProducerLost):
        producer.commit([new("b", 0, "late")])


@pytest.mark.law("twice", "fencing")
def test_a_member_that_was_put_out_commits_nothing(connect: Connect, transport: KafkaTransport) -> None:
    """The broker takes a commit without a generation from anybody: it must not be asked."""
    zombie = connect()
    member = zombie.member("g", ["a"], name="zombie", session_timeout_s=1.0)
    await_true("it owns", lambda: not zombie.wait([member], 0.01) and len(member.assignment()) == 1, PATIENCE_S)
    before = member.snapshot()
    assert before.assignment == member.assignment()
    await_true("its client has put it out", lambda: member.snapshot().assignment == {}, PATIENCE_S)
    after = member.snapshot()
    producer = zombie.producer("zombie")
    producer.start()
    for snapshot in (before, after, Snapshot("g", before.assignment, before.token)):
        with pytest.raises(AssignmentLost):
            producer.commit([new("b", 0, "zombie")], positions={A0: Position(1)}, snapshot=snapshot)
    assert transport.admin.committed("g") == {A0: Position(0)}
    assert read_all(transport, ["b"]) == []


def test_a_session_that_the_brokers_do_not_take_is_named(servers: str, run_id: Callable[[], str]) -> None:
    section = TransportSection(kind="kafka", servers=servers, session_timeout_s=3600.0)
    transport = KafkaTransport(run_id(), section)
    try:
        transport.admin.ensure_topics({"a": TopicSettings(partitions=1)})
        member = transport.member("g", ["a"], name="one", session_timeout_s=section.session_timeout_s)

        def is_refused() -> bool:
            transport.wait([member], 0.05)
            try:
                member.poll()
            except ConfigError as error:
                return "transport.session_timeout_s: got 3600, which" in str(error)
            return False

        await_true("the refusal", is_refused, PATIENCE_S)
        findings = {one.what: one for one in transport.admin.look.broker()}  # type: ignore[union-attr]
        assert findings["group.max.session.timeout.ms"].wanted == "at least 3600000"
        assert findings["group.max.session.timeout.ms"].level is Level.problem
    finally:
        transport.close()


def test_a_cluster_known_from_when_a_broker_was_away_is_looked_at_again(transport: KafkaTransport) -> None:
    before = transport.admin.end_offsets("b")
    client = transport.admin.connection._made
    assert client is not None
    client._manager.cluster._brokers.clear()
    for connection in list(client._manager._conns.values()):
        connection.close()
    await_true("its connections are gone", lambda: not client._manager._conns, PATIENCE_S)
    with pytest.raises(TransportError, match="no Kafka broker answers"):
        transport.admin.end_offsets("b")
    assert transport.admin.end_offsets("b") == before


@pytest.mark.law("lost")
def test_positions_outside_the_log_are_mended_or_refused(transport: KafkaTransport) -> None:
    producer = transport.producer("p")
    producer.start()
    for number in range(4):
        producer.commit([new("a", 0, f"{number}")])
    offsets = [record.offset for record in read_all(transport, ["a"])]
    transport.admin.delete_before({A0: offsets[2]})
    reader = transport.reader({A0: 0})
    assert texts(take(transport, reader, 2)) == ["2", "3"]
    # Over the marker of the last transaction, to the end.
    await_true("the end", lambda: reader.poll() == [] and reader.position(A0) == offsets[3] + 2, PATIENCE_S)
    with pytest.raises(PositionMissing, match="beyond the end"):
        transport.admin.delete_before({A0: 1000})


@pytest.mark.law("bounded")
def test_a_paused_reader_does_not_fill_up(transport: KafkaTransport) -> None:
    producer = transport.producer("p")
    producer.start()
    for start in range(0, 60, 10):
        producer.commit([NewRecord("a", 0, b"%d" % number, bytes(1 << 20)) for number in range(start, start + 10)])
    producer.commit([new("b", 0, "b")])
    reader = transport.reader({A0: 0, TopicPartition("b", 0): 0})
    found = [record.key for record in take(transport, reader, 1)]
    reader.pause([A0])
    until = time.monotonic() + PATIENCE_S
    while b"b" not in found and time.monotonic() < until:
        transport.wait([reader], 0.1)
        found += [record.key for record in reader.poll()]
    assert found[-1] == b"b"
    assert reader.feed._num_bytes < 40 << 20
    reader.resume([A0])
    while len(found) < 61:
        transport.wait([reader], 1.0)
        found += [record.key for record in reader.poll(max_bytes=3 << 20)]
    assert [key for key in found if key != b"b"] == [b"%d" % number for number in range(60)]


@pytest.mark.law("bounded")
def test_a_look_up_unpacks_nothing_behind_it(transport: KafkaTransport) -> None:
    producer = transport.producer("p")
    producer.start()
    for start in range(0, 3000, 1000):
        producer.commit([new("a", 0, str(number)) for number in range(start, start + 1000)])
    with closing(transport.reader({A0: 0})) as reader:
        for offset in (0, 1, 2500, 7):
            if reader.position(A0) != offset:
                reader.seek(A0, offset)
            for records in read_to_ends(transport, reader, {A0: offset + 1}, max_records=1):
                reader.has_data()  # which takes what has arrived
                assert reader.feed._num_bytes < 1000, "one record was asked for"
                assert [record.offset for record in records] in ([], [offset])
    assert [record.offset for record in each_record(transport, A0, range(3003))][-1] == 3001, "the last is a marker"


@pytest.mark.law("bounded")
def test_an_idle_partition_does_not_hold_up_another(transport: KafkaTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """While records of a partition are left, a fetch for the idle one alone would take the broker's whole patience."""
    producer = transport.producer("first")
    producer.start()
    for start in range(0, 500, 100):
        producer.commit([NewRecord("a", 0, b"%d" % number, randbytes(20_000)) for number in range(start, start + 100)])
    fetched: list[set[str]] = []
    create = Fetcher._create_fetch_requests

    def recorded(fetcher: Fetcher) -> dict[int, tuple[object, dict[KafkaPartition, int]]]:
        requests = create(fetcher)
        fetched.extend({place.topic.rpartition(".")[2] for place in offsets} for _, offsets in requests.values())
        return requests

    monkeypatch.setattr(Fetcher, "_create_fetch_requests", functools.partialmethod(recorded))
    with closing(transport.reader({A0: 0, TopicPartition("b", 0): 0})) as reader:
        num_read = sum(map(len, read_to_ends(transport, reader, {A0: transport.admin.end_offsets("a")[A0]})))
    assert num_read == 500
    assert len(fetched) > 5 and {"b"} not in fetched


def test_empty_polls_keep_nothing_of_their_callers(transport: KafkaTransport) -> None:
    """An error in a cycle would keep the frames of all callers, with what is in their variables."""

    class Held:
        pass

    def polls() -> weakref.ref[Held]:
        held = Held()
        assert reader.poll() == []
        return weakref.ref(held)

    producer = transport.producer("writer")
    producer.start()
    producer.commit([new("a", 0, "one")])
    reader = transport.reader({A0: 0})
    assert texts(take(transport, reader, 1)) == ["one"]  # from then on a fetch is under way
    gc.collect()
    gc.disable()
    try:
        assert [left for _ in range(50) if (left := polls())() is not None] == []
    finally:
        gc.enable()


def test_without_a_broker_it_says_so_soon() -> None:
    with taken_port() as port:
        address = f"127.0.0.1:{port}"
        transport = KafkaTransport("r", TransportSection(kind="kafka", servers=address), connect_s=0.5)
        with pytest.raises(TransportError, match=address) as error:
            transport.admin.topics()
        assert error.value.exit_code == 3
        transport.close()


def test_run_without_a_broker_ends_with_3(tmp_path: Path) -> None:
    file = write_run_file(tmp_path, f'{PARTITIONS}kind = "kafka"\nservers = "127.0.0.1:1"\n')
    done = call("run", file, "--run-dir", tmp_path / "r")
    assert done.exit_code == 3, done.output
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_reach_no_log(
    secure: Mapping[str, str], run_id: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    transport = connect_securely(secure, "SASL_PLAINTEXT")
    transport._clients.run_id = run_id()
    assert transport.admin.topics() == {}
    transport.close()
    assert secure["sasl_plain_password"] not in caplog.text


def connect_securely(
    secure: Mapping[str, str], protocol: str, address: str | None = None, **more: str
) -> KafkaTransport:
    options = {"security_protocol": protocol, "sasl_mechanism": "PLAIN",
               **{key: secure[key] for key in ("sasl_plain_username", "sasl_plain_password", "ssl_cafile")},
               **more}  # fmt: skip
    section = TransportSection(kind="kafka", servers=address or secure[protocol], options=options)
    return KafkaTransport("secured", section, connect_s=3.0)


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_with_a_password_and_tls(secure: Mapping[str, str], run_id: Callable[[], str], protocol: str) -> None:
    transport = connect_securely(secure, protocol)
    transport._clients.run_id = run_id()
    transport.admin.ensure_topics({"a": TopicSettings(partitions=1)})
    transport.admin.commit_initial("g", ["a"])
    producer = transport.producer("p")
    producer.start()
    producer.commit([new("a", 0, "in secret")], positions={A0: Position(1)}, group="g")
    assert texts(read_all(transport, ["a"])) == ["in secret"]
    assert transport.admin.committed("g") == {A0: Position(1)}
    transport.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "SASL_PLAINTEXT", "sasl_plain_password": "wrong"}, "refused the credentials.*Invalid username"),
        ({"protocol": "SASL_SSL", "sasl_plain_password": "wrong"}, "refused the credentials.*Invalid username"),
        ({"protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-256"}, "refused the credentials.*Mechanism"),
        ({"protocol": "SASL_SSL", "ssl_cafile": ""}, "TLS with .* failed, the broker's certificate"),
    ],
)  # fmt: skip
def test_what_the_broker_refuses_is_said(secure: Mapping[str, str], options: dict[str, str], said: str) -> None:
    transport = connect_securely(secure, **options)
    with pytest.raises(ConfigError, match=said) as error:
        transport.admin.topics()
    assert error.value.exit_code == 2
    assert secure["sasl_plain_password"] not in str(error.value)
    assert "ACL" not in str(error.value), "the credentials are wrong, or how they are given"
    transport.close()


def started(producer: Producer) -> bool:
    """A broker needs a moment for what it was told to allow, and after its own start."""
    try:
        producer.start()
    except (ConfigError, TransportError):
        return False
    return True


@pytest.mark.parametrize(
    ("protocol", "port"),
    [("PLAINTEXT", "SASL_PLAINTEXT"), ("SASL_PLAINTEXT", "SASL_SSL"), ("SASL_SSL", "SASL_PLAINTEXT")],
)
def test_a_port_of_another_kind_is_said(secure: Mapping[str, str], protocol: str, port: str) -> None:
    transport = connect_securely(secure, protocol, address=secure[port])
    with pytest.raises((TransportError, ConfigError), match=f"{secure[port]}.*{protocol} was expected; mend"):
        transport.admin.topics()
    transport.close()


def test_a_broker_that_is_too_old_is_named() -> None:
    with old_broker() as address:
        transport = KafkaTransport("r", TransportSection(kind="kafka", servers=address))
        with pytest.raises(ConfigError, match=rf"{address} is Kafka 0\.10\.1, expected 3\.0 or newer") as error:
            transport.admin.topics()
        assert error.value.exit_code == 2
        transport.close()


def test_topics_of_other_widths_are_refused(connect: Connect, transport: KafkaTransport) -> None:
    with pytest.raises(
        ConfigError, match=r"topic test-.*\.a: exists with .*partitions=1.*partitions=3.* was asked for"
    ):
        connect().admin.ensure_topics({"a": TopicSettings(partitions=3)})
    assert transport.admin.topics()["a"].partitions == 1


@pytest.mark.law("lost")
def test_positions_that_expired_are_said(connect: Connect, transport: KafkaTransport) -> None:
    """As after offsets.retention.minutes: never a jump to the beginning or to the end."""
    transport.admin.connection.ask("drop", lambda client: client.delete_groups([transport._clients.name("g")]))
    other = connect()
    member = other.member("g", ["a"], name="late", session_timeout_s=6.0)
    await_true("it owns", lambda: not other.wait([member], 0.01) and len(member.assignment()) == 1, PATIENCE_S)
    with pytest.raises(PositionMissing, match=r"group g: no position for a\[0\].*offsets\.retention\.minutes"):
        member.committed([A0])


def test_servers_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"transport\.servers"):
        KafkaTransport("r", TransportSection(kind="kafka"))


def test_a_run_that_must_exist_does_not(servers: str, run_id: Callable[[], str]) -> None:
    transport = KafkaTransport(run_id(), TransportSection(kind="kafka", servers=servers), create=False)
    with pytest.raises(ConfigError, match="no topics of this run"):
        transport.admin.end_offsets("control")
    transport.close()


def test_a_watchdog_ends_what_hangs(
    connect: Connect, transport: KafkaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport._watchdog_s = 0.5
    producer = transport.producer("stuck")
    producer.start()
    assert producer._client is not None
    over = threading.Event()
    monkeypatch.setattr(producer._client, "commit_transaction", lambda: over.wait(PATIENCE_S))
    with pytest.raises(ProducerLost, match="no answer"):
        producer.commit([new("b", 0, "stuck")])
    over.set()
    with pytest.raises(ProducerLost, match="not started"):
        producer.commit([new("b", 0, "stuck")])
    producer.start()
    producer.commit([new("b", 0, "again")])
    assert texts(read_all(connect(), ["b"])) == ["again"]


@pytest.mark.law("lost")
@pytest.mark.slow
def test_positions_are_not_committed_without_their_records(own_broker: OwnBroker, run_id: Callable[[], str]) -> None:
    """The client gives records up when the broker is away for long, and goes on with the rest of the transaction."""
    name, address = run_id(), own_broker.address
    options: dict[str, object] = {"delivery_timeout_ms": 1000, "request_timeout_ms": 900}
    transport = KafkaTransport(name, TransportSection(kind="kafka", servers=address))
    hasty = KafkaTransport(name, TransportSection(kind="kafka", servers=address, options=options))
    transport.admin.ensure_topics({name: TopicSettings(partitions=1) for name in ("a", "b")})
    transport.admin.commit_initial("g", ["a"])
    producer = hasty.producer("hasty", timeout_s=60.0)
    await_true("a producer", lambda: started(producer), PATIENCE_S)
    producer.commit([new("b", 0, "before")], positions={A0: Position(1)}, group="g")
    own_broker.kill()
    with ThreadPoolExecutor(1) as pool:
        begun_at = time.monotonic()
        late = pool.submit(producer.commit, [new("b", 0, "late")], positions={A0: Position(2)}, group="g")
        await_true("longer than a record is tried", lambda: time.monotonic() - begun_at > 1.5, PATIENCE_S)
        own_broker.start()
        with pytest.raises(ProducerLost):
            late.result()
    await_true("a new producer", lambda: started(producer), PATIENCE_S)
    assert transport.admin.committed("g") == {A0: Position(1)}
    producer.commit([new("b", 0, "again")], positions={A0: Position(2)}, group="g")
    assert texts(read_all(transport, ["b"])) == ["before", "again"]
    assert transport.admin.committed("g") == {A0: Position(2)}
    hasty.close()
    transport.close()
