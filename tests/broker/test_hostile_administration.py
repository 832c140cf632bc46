"""What other people do to a run's topics, groups and brokers on a real Kafka: it is told with the cause, and nothing is
lost without a word. Records that are deleted stand in test_kafka_runs.py, records of strangers in test_kafka_driven.py,
rights in test_kafka_acls.py, credentials in test_kafka_own.py, brokers' settings in test_kafka_commands.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import KafkaError
from kafka.protocol.admin import AlterClientQuotasRequest
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.config.sections import TransportSection
from rftstream.errors import RecordsDeleted
from rftstream.launch.host import LOOK_AT_LOG_S, look_at_log
from rftstream.runs.log_settings import dangers
from rftstream.testing.conformance_bench import PATIENCE_S, await_true
from rftstream.transport.kafka.connection import throttled
from rftstream.transport.kafka.transport import KafkaTransport
from tests.broker.driven import DrivenRun
from tests.e2e.workplace import Workplace

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


SETTINGS: dict[str, tuple[str, str, str, str, str]] = {
    "retention by age": ("verified", "retention.ms", "1000000", "-1", "retention.ms is 1000000, expected -1"),
    "retention by size": ("batches", "retention.bytes", "1000000", "-1", "retention.bytes is 1000000, expected -1"),
    "tasks are compacted": ("tasks", "cleanup.policy", "compact", "delete", "is compacted, expected not"),
    "outcomes are compacted": ("outcomes", "cleanup.policy", "compact,delete", "delete", "is compacted, expected not"),
    "partials are not": ("partials", "cleanup.policy", "delete", "compact", "is not compacted, expected compacted"),
    "smaller records": ("rollouts", "max.message.bytes", "1050000", str(9 << 20), "takes records of 1424 bytes"),
}
"""What somebody changes -> topic, setting, value, the value before, what is said."""

HARMLESS = {"segment.ms": "60000", "segment.bytes": "1048576", "compression.type": "gzip"}


def test_settings_that_lose_records_pause_a_live_run_until_they_are_put_right(
    run: DrivenRun, administrator: Administrator
) -> None:
    """Each is found at a look, of which there are two a minute; one is played through."""
    assert LOOK_AT_LOG_S <= 30
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
        if what == "tasks are compacted":
            look_at_log(feeder.service, run.config)
            run.play(lambda: run.view.control().state is not None)
            status = run.place.look("status", run.folder.path, "--json").result
            assert status["desired"]["state"] == "paused"
            assert "tasks: is compacted, expected not" in status["desired"]["reason"]
        administrator.set(topic, setting, before)
        await_true(f"{what}: put right", lambda: not found(), PATIENCE_S)
    assert run.place.look("unpause", run.folder.path).code == 0
    run.play()
    run.close()
    assert run.view.assert_nothing_lost().version == STEPS


GONE: dict[str, tuple[Callable[[Administrator], None], str, str]] = {
    "made anew": (lambda hand: hand.make_anew("outcomes", 1), "feeder", "outcomes: was deleted and made anew"),
    "gone": (lambda hand: hand.delete("outcomes"), "feeder", "outcomes: is gone, expected the topic"),
}
"""What becomes of a topic -> how, who reads it, and what ends the reader."""


@pytest.mark.parametrize("what", GONE)
def test_a_topic_that_is_gone_ends_its_readers_with_its_name(
    run: DrivenRun, administrator: Administrator, what: str
) -> None:
    hand, role, said = GONE[what]
    run.start_all()
    run.play(lambda: run.view.curve().version >= 1)
    reader = next(one for one in run.workers if one.role == role)
    look_at_log(reader.service, run.config)
    hand(administrator)
    with pytest.raises(RecordsDeleted, match=f"{said}.*what it held is lost: begin a new run") as lost:
        look_at_log(reader.service, run.config)
    assert lost.value.exit_code == 3


def _delete_groups(hand: Administrator) -> None:
    groups = [hand.name(group) for group in ("explorer", "verifier", "buffer")]
    await_true("no members", lambda: set(hand.client.delete_groups(groups).values()) == {"OK"}, PATIENCE_S)


GROUPS: dict[str, Callable[[Administrator], None]] = {
    "deleted": _delete_groups,
    "to the earliest": lambda hand: hand.move("verifier", "rollouts", {0: 0, 1: 0}),
    "to the latest": lambda hand: hand.move("explorer", "tasks", {0: 10**6, 1: 10**6}),
}


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


def test_brokers_that_throttle_are_named(
    run: DrivenRun, administrator: Administrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    throttled._said_at = -1e9
    before = throttled.total_s
    administrator.limit("feeder", producer_byte_rate=20.0)
    run.start_all()
    run.play(lambda: throttled.total_s > before)
    administrator.limit("feeder", producer_byte_rate=0.0)
    assert "the Kafka brokers throttle this process by their quotas" in caplog.text
    assert [one.service.health()["throttled_s"] for one in run.workers if one.role == "feeder"] != [0.0]


def test_fewer_replicas_than_configured_are_told(run: DrivenRun, servers: str) -> None:
    section = TransportSection(kind="kafka", servers=servers, options={"replication_factor": 3})
    with closing(KafkaTransport(run.folder.run_id, section)) as transport:
        wanted = {"tasks": transport.admin.topics()["tasks"]}
        told = transport.admin.look.topic_differences(wanted)["tasks"]
    assert "has 1 replica, expected 3 (transport.options.replication_factor)" in told
