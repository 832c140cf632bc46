"""What `admin` asks brokers that have much to do, and for how long. Needs no broker."""

from types import SimpleNamespace

import pytest
from kafka import errors as kafka_errors
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, TransportError
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.kafka.admin import MAKING_S, KafkaAdmin, wait_for_leaders
from rftstream.transport.kafka.admin_connection import PATIENCE_S, AdminConnection


class Brokers:
    """Have a number of leaders at each look, and move the clock on."""

    def __init__(self, *counts):
        self.counts, self.now, self.num_looks = list(counts), 0.0, 0

    def num_led(self):
        self.num_looks += 1
        self.now += 20.0
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def wait(self, wanted=1000):
        wait_for_leaders(self.num_led, wanted, what="topics of r", now=lambda: self.now, sleep=lambda seconds: None)


def test_topics_are_waited_for_as_long_as_their_leaders_become_more():
    brokers = Brokers(*range(0, 1001, 50))
    brokers.wait()
    assert brokers.num_looks == 21 and brokers.now > 5 * MAKING_S


def test_brokers_that_make_no_progress_are_given_up_with_what_is_lacking():
    with pytest.raises(
        TransportError, match="topics of r: 310 of 1,000 partitions have a leader, and for 60 s no more"
    ):
        Brokers(0, 200, 310).wait()
    with pytest.raises(TransportError, match=r"0 of 1,000 .*start again, which goes on from there"):
        Brokers(0).wait()


def test_a_short_lapse_is_no_end():
    Brokers(10, 0, 0, 900, 0, 0, 1000).wait()


@pytest.fixture
def admin(monkeypatch):
    """An admin of the run `r`, and what it has asked brokers of which a commit in partition 7 is pending."""
    asked = []
    clients = SimpleNamespace(
        name=lambda name: f"r.{name}",
        partition=lambda place: KafkaPartition(f"r.{place.topic}", place.partition),
        place=lambda one: TopicPartition(one.topic.removeprefix("r."), one.partition),
        is_ours=lambda topic: topic.startswith("r."),
    )

    def list_group_offsets(specs):
        ((group, wanted),) = specs.items()
        asked.append(wanted)
        partitions = wanted or [KafkaPartition("r.tasks", number) for number in range(10)]
        if any(one.partition == 7 for one in partitions):
            raise kafka_errors.UnstableOffsetCommitError
        return {group: {one: OffsetAndMetadata(10 * one.partition, "", -1) for one in partitions}}

    def ask(self, what, question, *, but=None):
        return question(SimpleNamespace(list_group_offsets=list_group_offsets))

    monkeypatch.setattr(AdminConnection, "ask", ask)
    return KafkaAdmin(clients), asked


def test_a_topic_that_somebody_else_makes_meanwhile_with_fewer_partitions_is_an_error_at_once(monkeypatch):
    partitions = [{"leader_id": 1}] * 3
    looks = iter([[], [], ["r.tasks"]])  # it is not seen at first
    client = SimpleNamespace(
        list_topics=lambda: next(looks),
        describe_topics=lambda names: [{"name": name, "partitions": partitions} for name in names],
        describe_configs=lambda resources: {"topic": {"r.tasks": {"max.message.bytes": {"value": str(2 << 20)}}}},
    )

    def ask(self, what, question, *, but=None):
        if what == "create topics":
            raise TransportError("create topics: TopicAlreadyExistsError")
        return question(client)

    monkeypatch.setattr(AdminConnection, "ask", ask)
    clients = SimpleNamespace(
        name=lambda name: f"r.{name}", bare=lambda name: name.removeprefix("r."), replication_factor=1, run_id="r",
        is_ours=lambda topic: topic.startswith("r."),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"topic r\.tasks: exists with .*partitions=3.*partitions=8.* was asked for"):
        KafkaAdmin(clients).ensure_topics(
            {"tasks": TopicSettings(partitions=8, compacted=False, max_record_bytes=1 << 20)}
        )


def test_topics_are_there_when_their_leaders_answer_however_long_that_takes(monkeypatch):
    looks, asked = iter([[], ["r.tasks"], ["r.tasks"]]), []
    client = SimpleNamespace(
        list_topics=lambda: next(looks),
        create_topics=lambda topics: None,
        describe_topics=lambda names: [{"name": name, "partitions": [{"leader_id": 1}] * 3} for name in names],
        describe_configs=lambda resources: {"topic": {"r.tasks": {"max.message.bytes": {"value": str(2 << 20)}}}},
        list_partition_offsets=lambda wanted, **more: dict.fromkeys(wanted, SimpleNamespace(offset=0)),
    )

    def ask(self, what, question, *, but=None):
        answer = question(client)
        asked.append((what, len(answer or ()), self._patience_s))
        return answer

    monkeypatch.setattr(AdminConnection, "ask", ask)
    clients = SimpleNamespace(
        name=lambda name: f"r.{name}", bare=lambda name: name.removeprefix("r."), replication_factor=1, run_id="r",
        is_ours=lambda topic: topic.startswith("r."), place=lambda one: TopicPartition("tasks", one.partition),
    )  # fmt: skip
    settings = TopicSettings(partitions=3, compacted=False, max_record_bytes=1 << 20)
    KafkaAdmin(clients).ensure_topics({"tasks": settings})
    assert asked[-1] == ("ends of partitions", 3, MAKING_S)


def test_a_member_asks_for_its_own_positions_alone(admin):
    opened, asked = admin
    own = [TopicPartition("tasks", 2), TopicPartition("tasks", 3)]
    found = opened.stable_positions("explorer", own)
    assert found == {own[0]: Position(20), own[1]: Position(30)}, "a commit that is pending elsewhere is no matter"
    assert [len(one) for one in asked] == [2]
    assert opened.stable_positions("explorer", [TopicPartition("tasks", 7)]) is None
    assert opened.stable_positions("explorer", []) == {} and len(asked) == 2
    assert opened.stable_positions("explorer") is None and asked[-1] is None


def test_what_a_command_waits_for_is_told_within_seconds(admin, monkeypatch):
    opened, _ = admin
    now, answers = [0.0], iter([None] * 40 + [{TopicPartition("tasks", 1): Position(5)}] + [None] * 2000)
    monkeypatch.setattr("rftstream.transport.kafka.admin.time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + max(seconds, 0.1))
    ))  # fmt: skip
    told_at = []
    monkeypatch.setattr("rftstream.transport.kafka.admin.log", SimpleNamespace(
        warning=lambda text, *values: told_at.append((now[0], text % values))
    ))  # fmt: skip
    monkeypatch.setattr(opened, "stable_positions", lambda group: next(answers))
    assert opened.committed("explorer") == {TopicPartition("tasks", 1): Position(5)}
    ((at, text),) = told_at
    assert at < 5 and "group explorer: a commit of its positions is pending" in text and "at most 67 s more" in text
    with pytest.raises(TransportError, match="pending for 70 s"):
        opened.committed("explorer")
    assert len(told_at) == 2


def test_brokers_are_asked_for_longer_while_somebody_is_patient(monkeypatch):
    now = [0.0]
    client = SimpleNamespace(close=lambda: None, forget_coordinators=lambda: None)
    clients = SimpleNamespace(admin=lambda kind: client, reworded=lambda error, what: TransportError(what), servers="")
    monkeypatch.setattr("rftstream.transport.kafka.admin_connection.time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 1.0)
    ))  # fmt: skip
    connection = AdminConnection(clients)

    def fail(client):
        raise kafka_errors.CoordinatorNotAvailableError

    with pytest.raises(TransportError), connection.patient(60.0):
        connection.ask("positions", fail)
    assert 60 < now[0] < 63
    now[0] = 0.0
    with pytest.raises(TransportError):
        connection.ask("positions", fail)
    assert PATIENCE_S < now[0] < PATIENCE_S + 3
