"""What other people do to a run's topics, groups and brokers on a real Kafka: it is told with the cause, and nothing is
lost without a word. Records that are deleted stand in test_kafka_runs.py, records of strangers in test_kafka_driven.py,
what each role may do in test_kafka_acls.py, wrong credentials in test_kafka_own.py, brokers' settings in
test_kafka_commands.py; how soon it is told in tests/unit/launch/test_log_watch.py."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    ConfigResourceType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError
from kafka.protocol.admin import AlterClientQuotasRequest
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream import metrics
from rftstream.config.sections import TransportSection
from rftstream.contracts.control import DesiredState
from rftstream.errors import ConfigError, LogTruncated, RecordsDeleted
from rftstream.launch.log_watch import LogWatch
from rftstream.runs.log_settings import dangers
from rftstream.testing.conformance_tests.bench import PATIENCE_S, await_true
from rftstream.transport.kafka.connection import throttled
from rftstream.transport.kafka.transport import KafkaTransport
from tests.broker.conftest import OwnBroker
from tests.broker.driven import Driven, DrivenRun, RealClock
from tests.broker.guarded import Guarded
from tests.e2e.workplace import Workplace
from tests.faults.cluster import Cluster

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]

STEPS = 4


class Administrator:
    """Somebody who may do everything on the broker, and knows nothing of runs."""

    def __init__(self, client: KafkaAdminClient, run: str) -> None:
        self.client, self._run = client, run

    def name(self, bare: str) -> str:
        return f"{self._run}.{bare}"

    def set(self, topic: str, setting: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, self.name(topic), configs={setting: value})
        self.client.alter_configs([resource])

    def widen(self, topic: str, partitions: int) -> None:
        self.client.create_partitions({self.name(topic): partitions})

    def delete(self, topic: str) -> None:
        self.client.delete_topics([self.name(topic)])
        await_true("it is gone", lambda: self.name(topic) not in self.client.list_topics(), PATIENCE_S)

    def make_anew(self, topic: str, partitions: int) -> None:
        self.delete(topic)
        configs = {"retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": str(9 << 20)}
        wanted = {self.name(topic): {"num_partitions": partitions, "replication_factor": 1, "configs": configs}}

        def is_made() -> bool:
            with suppress(KafkaError):  # the broker may still be busy with the deletion
                self.client.create_topics(wanted)
            return self.name(topic) in self.client.list_topics()

        await_true("it is there again", is_made, PATIENCE_S)

    def move(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        moved = {KafkaPartition(self.name(topic), one): OffsetAndMetadata(at, "", -1) for one, at in offsets.items()}
        self.client.alter_group_offsets(self.name(group), moved)

    def deny(self, user: str, kind: ResourceType, name: str, operation: ACLOperation) -> None:
        pattern = ResourcePattern(kind, self.name(name), ACLResourcePatternType.LITERAL)
        self.client.create_acls([ACL(f"User:{user}", "*", operation, ACLPermissionType.DENY, pattern)])

    def take_back(self, user: str, kind: ResourceType, name: str, operation: ACLOperation) -> None:
        pattern = ResourcePatternFilter(kind, self.name(name), ACLResourcePatternType.LITERAL)
        self.client.delete_acls([ACLFilter(f"User:{user}", "*", operation, ACLPermissionType.DENY, pattern)])

    def set_password(self, user: str, password: str) -> None:
        wanted = UserScramCredentialUpsertion(user, ScramMechanism.SCRAM_SHA_512, password, iterations=4096)
        said = self.client.alter_user_scram_credentials([wanted])
        assert not any(said.values()), said

    def limit(self, client_id: str, **quotas: float) -> None:
        """Set quotas of one client, in bytes a second; 0 takes them away."""
        entry = AlterClientQuotasRequest.EntryData
        entity = entry.EntityData(entity_type="client-id", entity_name=self.name(client_id))
        ops = [entry.OpData(key=key, value=value, remove=not value) for key, value in quotas.items()]
        request = AlterClientQuotasRequest(entries=[entry(entity=[entity], ops=ops)], validate_only=False)
        answer = self.client._manager.run(self.client._manager.send, request)
        assert not answer.entries[0].error_code, answer


@pytest.fixture
def run(place: Workplace, servers: str, run_id: Callable[[], str]) -> Iterator[DrivenRun]:
    made = DrivenRun.make(place, run_id(), servers, f"run.steps={STEPS}", "transport.partitions=2")
    yield made
    made.close()


@pytest.fixture
def administrator(run: DrivenRun, servers: str) -> Iterator[Administrator]:
    with closing(KafkaAdminClient(bootstrap_servers=servers)) as client:
        yield Administrator(client, run.folder.run_id)


def look_at_log(worker: Driven, run: DrivenRun) -> None:
    """As a worker does twice a minute."""
    watch = LogWatch(run.config, run.folder.run_id, worker.service.spec)
    watch.look(worker.transport)
    watch.act(worker.service)


SETTINGS: dict[str, tuple[str, str, str, str, str]] = {
    "retention by age": ("verified", "retention.ms", "1000000", "-1", "retention.ms is 1000000, expected -1"),
    "retention by size": ("batches", "retention.bytes", "1000000", "-1", "retention.bytes is 1000000, expected -1"),
    "tasks are compacted": ("tasks", "cleanup.policy", "compact", "delete", "is compacted, expected not"),
    "outcomes are compacted": ("outcomes", "cleanup.policy", "compact,delete", "delete", "is compacted, expected not"),
    "partials are not": ("partials", "cleanup.policy", "delete", "compact", "is not compacted, expected compacted"),
    "fewer replicas than are asked for": (
        "batches",
        "min.insync.replicas",
        "2",
        "1",
        "min.insync.replicas is 2, expected at most 1, the number of its",
    ),
    "smaller records": ("rollouts", "max.message.bytes", "1050000", str(9 << 20), "takes records of 1424 bytes"),
}
"""What somebody changes -> topic, setting, value, the value before, what is said."""

HARMLESS = {
    "segment.ms": "60000", "segment.bytes": "1048576", "compression.type": "gzip",
    "message.timestamp.type": "LogAppendTime",
}  # fmt: skip
"""Settings of `tasks` with which the run goes on to its end."""


@pytest.mark.sampled(3, "administration")
def test_settings_that_lose_records_pause_a_live_run_until_they_are_put_right(
    run: DrivenRun, administrator: Administrator
) -> None:
    """Each is found at a look, of which there are two a minute; two are played through, one of a topic that only
    verifiers read."""
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    feeder = next(one for one in run.workers if one.role == "feeder")
    transport = run.workers[0].transport

    def found() -> list[str]:
        return dangers(transport, run.config, begun=True)

    for setting, value in HARMLESS.items():
        administrator.set("tasks", setting, value)
    assert found() == []
    for what, (topic, setting, value, before, said) in SETTINGS.items():
        administrator.set(topic, setting, value)
        await_true(what, lambda: any(one.startswith(f"{topic}: {said}") for one in found()), PATIENCE_S)  # noqa: B023
        is_played = what in ("tasks are compacted", "smaller records")
        if is_played:
            look_at_log(feeder, run)
            run.play(lambda: run.view.control().desired is DesiredState.paused)
            status = run.place.look("status", run.folder.path, "--json").result
            assert f"{topic}: {said}" in status["desired"]["reason"]
        administrator.set(topic, setting, before)
        await_true(f"{what}: put right", lambda: not found(), PATIENCE_S)
        assert not is_played or run.place.look("unpause", run.folder.path).code == 0
    run.play()
    run.close()
    assert run.view.assert_nothing_lost().version == STEPS


@pytest.mark.sampled(3, "administration")
def test_partitions_that_somebody_adds_pause_a_live_run_with_a_way_on(
    run: DrivenRun, administrator: Administrator
) -> None:
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    buffer = next(one for one in run.workers if one.role == "buffer")
    administrator.widen("verified", 4)
    said = "verified: has 4 partitions, expected 2 (transport.partitions)"
    await_true("it is seen", lambda: dangers(buffer.transport, run.config, begun=True) == [said], PATIENCE_S)
    look_at_log(buffer, run)
    run.play(lambda: run.view.control().state is not None)
    desired = run.place.look("status", run.folder.path, "--json").result["desired"]
    assert desired["state"] == "paused" and said in desired["reason"]
    run.close()
    resumed = run.place.look("resume", run.folder.path)
    assert resumed.code == 2 and said in resumed.err and "model.init_from" in resumed.err
    run.view.assert_nothing_lost()


GONE: dict[str, tuple[Callable[[Administrator], None], str, str]] = {
    "made anew": (lambda hand: hand.make_anew("outcomes", 1), "feeder", "outcomes: was deleted and made anew"),
    "gone": (lambda hand: hand.delete("outcomes"), "feeder", "outcomes: is gone, expected the topic"),
}
"""What becomes of a topic -> how, who reads it, and what ends the reader."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", GONE)
def test_a_topic_that_is_gone_ends_its_readers_with_its_name(
    run: DrivenRun, administrator: Administrator, what: str
) -> None:
    hand, role, said = GONE[what]
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    reader = next(one for one in run.workers if one.role == role)
    look_at_log(reader, run)
    hand(administrator)
    with pytest.raises(RecordsDeleted, match=f"{said}.*what it held is lost: begin a new run") as lost:
        look_at_log(reader, run)
    assert lost.value.exit_code == 7


def _delete_groups(hand: Administrator) -> None:
    groups = [hand.name(group) for group in ("explorer", "verifier", "buffer")]
    await_true("no members", lambda: set(hand.client.delete_groups(groups).values()) == {"OK"}, PATIENCE_S)


GROUPS: dict[str, Callable[[Administrator], None]] = {
    "deleted": _delete_groups,
    "to the earliest": lambda hand: hand.move("verifier", "rollouts", {0: 0, 1: 0}),
    "to the latest": lambda hand: hand.move("explorer", "tasks", {0: 10**6, 1: 10**6}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", GROUPS)
def test_groups_that_somebody_resets_or_deletes_lose_and_repeat_nothing(
    run: DrivenRun, administrator: Administrator, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    run.close()
    GROUPS[what](administrator)
    caplog.set_level(logging.WARNING)
    assert run.to_the_end().version == STEPS
    assert "no position for" in caplog.text or "was set by somebody else" in caplog.text


@pytest.mark.sampled(3, "administration")
def test_a_stranger_who_takes_transactional_ids_only_delays(run: DrivenRun, caplog: pytest.LogCaptureFixture) -> None:
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    stranger = KafkaTransport(run.folder.run_id, run.config.transport)
    for role in ("feeder", "buffer", "trainer"):
        stranger.producer(f"{run.folder.run_id}.{role}", timeout_s=60.0).start()
    stranger.close()
    caplog.set_level(logging.WARNING)
    run.play()
    run.close()
    assert "looking at the log for who took over" in caplog.text
    assert run.view.assert_nothing_lost().version == STEPS


THROTTLES = {"producer_byte_rate": ("feeder", 20.0), "consumer_byte_rate": ("explorer", 20.0),
             "request_percentage": ("explorer", 0.01)}  # fmt: skip
"""Quota -> whose client it is for, and how little."""


@pytest.mark.sampled(1)
@pytest.mark.heavy("a broker that lets its clients wait")
@pytest.mark.parametrize("quota", THROTTLES)
def test_brokers_that_throttle_are_named(
    run: DrivenRun, administrator: Administrator, quota: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    throttled._said_at = -1e9
    before = throttled.total_s
    client_id, most = THROTTLES[quota]
    administrator.limit(client_id, **{quota: most})
    run.start("explorer", administrator.name("explorer"))  # clients of groups are called as their process
    run.start_all("explorer")
    run.play(lambda: throttled.total_s > before)
    administrator.limit(client_id, **{quota: 0.0})
    assert "the Kafka brokers throttle this process by their quotas" in caplog.text
    assert run.workers[0].service.health()["throttled_s"] != 0.0


def test_transactions_that_brokers_do_not_take_for_so_long_name_their_setting(run: DrivenRun, servers: str) -> None:
    """As where transaction.max.timeout.ms is below a minute: it is 15 minutes here."""
    section = TransportSection(kind="kafka", servers=servers)
    with closing(KafkaTransport(run.folder.run_id, section)) as transport:
        producer = transport.producer("patient", timeout_s=1000.0)
        with pytest.raises(ConfigError, match=r"set transaction\.max\.timeout\.ms in the brokers' properties"):
            producer.start()


@pytest.mark.sampled(3, "administration")
@pytest.mark.heavy("a run whose roles wait, longer each time, to be let in again")
def test_clocks_that_are_apart_or_set_are_told_and_nothing_is_lost(
    run: DrivenRun, administrator: Administrator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker takes no record that is older than it thinks possible: here, older than the way to it takes. Who waits
    to be let in waits neither for longer nor for less when the clock is set by an hour meanwhile."""
    real, run.clock = time.time, RealClock()
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    administrator.set("rollouts", "message.timestamp.before.max.ms", "0")
    for ahead_s, said in ((0.0, ""), (-3600.0, "set back by 3600 s"), (0.0, "set ahead by 3600 s")):
        monkeypatch.setattr(time, "time", lambda: real() + ahead_s)  # noqa: B023
        caplog.clear()
        run.play(lambda: "the clock of this host and those of the brokers are apart" in caplog.text)
        assert said in caplog.text
    administrator.set("rollouts", "message.timestamp.before.max.ms", str(2**63 - 1))
    run.play()
    run.close()
    assert run.view.assert_nothing_lost().version == STEPS


def truncate(broker: OwnBroker, topic: str) -> None:
    """Take the second half of the records of partition 0 away, as an unclean election or a lost disk does."""
    (folder,) = (broker.folder / "node-1" / "data").glob(f"{topic}-0")
    (log,) = folder.glob("*.log")
    data, ends = log.read_bytes(), [0]
    while ends[-1] < len(data):  # batches: 8 bytes of offset, 4 of length, and so many more
        ends.append(ends[-1] + 12 + int.from_bytes(data[ends[-1] + 8 : ends[-1] + 12]))
    assert len(ends) > 3
    log.write_bytes(data[: ends[len(ends) // 2]])
    for other in (*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")):
        other.unlink()


@pytest.mark.sampled(3, "administration")
@pytest.mark.heavy("a broker that is killed and started again")
def test_records_that_a_new_leader_lacks_end_their_reader_with_the_cause_and_are_counted(
    place: Workplace, own_broker: OwnBroker, run_id: Callable[[], str]
) -> None:
    run = DrivenRun.make(place, run_id(), own_broker.address, "transport.partitions=1")
    run.start_all()
    run.play(lambda: run.view.curve().version >= 2)
    run.view.close()
    all_workers, feeder = run.workers, next(one for one in run.workers if one.role == "feeder")
    counted = metrics.LOST.labels("feeder", "outcomes")._value
    before = counted.get()
    own_broker.kill()
    truncate(own_broker, f"{run.folder.run_id}.outcomes")
    own_broker.start()
    run.workers = [feeder]
    with pytest.raises(LogTruncated, match=r"outcomes\[0\]@\d+: beyond the end.*unclean\.leader\.election") as lost:
        run.play()
    assert lost.value.exit_code == 7
    assert counted.get() == before + lost.value.num_lost > before
    run.workers = all_workers
    run.close()


ALL, TWO = [1, 2, 3], [1, 2]
"""The nodes of a cluster, and those that a topic is on."""


@pytest.mark.sampled(3, "administration")
@pytest.mark.heavy("three brokers, two of which are killed one after the other")
def test_a_leader_that_lacks_what_was_committed_ends_its_readers_with_the_cause(
    place: Workplace, tmp_path: Path, run_id: Callable[[], str]
) -> None:
    """A broker that was away while others wrote becomes the leader, as somebody has allowed it to."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "kafka")
        stack.callback(cluster.stop)
        client = stack.enter_context(closing(KafkaAdminClient(bootstrap_servers=cluster.servers.split(","))))
        run = DrivenRun.make(place, run_id(), cluster.servers, "transport.partitions=1")
        hand = Administrator(client, run.folder.run_id)
        topic, place_of_it = hand.name("outcomes"), KafkaPartition(hand.name("outcomes"), 0)

        def state() -> tuple[int, set[int], set[int]]:
            """Return its leader, replicas and those in step; none while no broker knows."""
            with suppress(KafkaError):
                for found in client.describe_topics([topic])[0]["partitions"]:
                    return found["leader_id"], set(found["replica_nodes"]), set(found["isr_nodes"])
            return -1, set(), set()

        hand.set("outcomes", "min.insync.replicas", "1")
        hand.set("outcomes", "unclean.leader.election.enable", "true")
        client.alter_partition_reassignments({place_of_it: TWO})
        await_true("it is on two", lambda: state()[1] == state()[2] == set(TWO), PATIENCE_S)
        run.start_all()
        run.play(lambda: run.view.curve().version >= 1)
        leader = state()[0]
        (other,) = set(TWO) - {leader}
        cluster.process(other).kill()
        await_true("the leader is alone", lambda: state() == (leader, set(TWO), {leader}), PATIENCE_S)
        version = run.view.curve().version + 2
        run.play(lambda: run.view.curve().version >= version)
        run.view.close()
        all_workers, feeder = run.workers, next(one for one in run.workers if one.role == "feeder")
        cluster.process(leader).kill()
        cluster.ask_for(other)
        await_true("the other one leads", lambda: state()[0] == other, PATIENCE_S)
        run.workers = [feeder]
        with pytest.raises(LogTruncated, match=r"outcomes\[0\]@\d+: beyond the end.*unclean\.leader\.election") as lost:
            run.play()
        assert lost.value.exit_code == 7 and lost.value.num_lost > 0
        run.workers = all_workers
        run.close()


PASSWORD = "the-first-password"


def cut_connections(address: str) -> None:
    """End this process's connections to this address, as a network does."""
    port = int(address.rpartition(":")[2])
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and one.raddr.port == port:
            with suppress(OSError), closing(socket.socket(fileno=os.dup(one.fd))) as link:
                link.shutdown(socket.SHUT_RDWR)


RIGHTS: dict[str, tuple[ResourceType, str, ACLOperation, str]] = {
    "write": (ResourceType.TOPIC, "rollouts", ACLOperation.WRITE, "TopicAuthorizationFailedError"),
    "read": (ResourceType.TOPIC, "verified", ACLOperation.READ, "TopicAuthorizationFailedError"),
    "group": (ResourceType.GROUP, "verifier", ACLOperation.READ, "GroupAuthorizationFailedError"),
}
"""A right that is taken away -> of what, the operation, and the error that is named."""


@pytest.mark.sampled(3, "administration")
@pytest.mark.heavy("a run whose roles wait, longer each time, to be let in again")
def test_rights_and_credentials_that_are_taken_from_a_live_run_are_waited_for(
    place: Workplace, guarded: Guarded, run_id: Callable[[], str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    name = user = run_id()
    monkeypatch.setenv("KAFKA_PASSWORD_OF_TEST", PASSWORD)
    options = (
        '[transport.options]\nsecurity_protocol = "SASL_PLAINTEXT"\nsasl_mechanism = "SCRAM-SHA-512"\n'
        f'sasl_plain_username = "{user}"\nsasl_plain_password = "env:KAFKA_PASSWORD_OF_TEST"\n'
    )
    with closing(KafkaAdminClient(bootstrap_servers=guarded.open)) as client:
        hand = Administrator(client, name)
        hand.set_password(user, PASSWORD)
        for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
            pattern = ResourcePattern(kind, f"{name}.", ACLResourcePatternType.PREFIXED)
            client.create_acls([ACL(f"User:{user}", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, pattern)])
        run = DrivenRun.make(place, name, guarded.passwords, "run.steps=1000", more=options)
        run.start_all()

        def play_on() -> None:
            version = run.view.curve().version + 1
            run.play(lambda: run.view.curve().version >= version)

        play_on()
        caplog.set_level(logging.INFO)
        for kind, thing, operation, error in RIGHTS.values():
            caplog.clear()
            hand.deny(user, kind, thing, operation)
            run.play(lambda: f"does not allow it to the user '{user}' ({error}); grant " in caplog.text)  # noqa: B023
            hand.take_back(user, kind, thing, operation)
            play_on()
        caplog.clear()
        hand.set_password(user, "another-one")
        cut_connections(guarded.passwords)
        run.play(lambda: "refused the credentials" in caplog.text)
        hand.set_password(user, PASSWORD)
        play_on()
    assert place.look("drain", run.folder.path).code == 0
    run.play()
    run.close()
    run.view.assert_nothing_lost()


def test_fewer_replicas_than_configured_are_told(run: DrivenRun, servers: str) -> None:
    section = TransportSection(kind="kafka", servers=servers, options={"replication_factor": 3})
    with closing(KafkaTransport(run.folder.run_id, section)) as transport:
        wanted = {"tasks": transport.admin.topics()["tasks"]}
        told = transport.admin.look.topic_differences(wanted)["tasks"]
    assert "has 1 replica, expected 3 (transport.options.replication_factor)" in told
