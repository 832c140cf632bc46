"""Each role with a user of its own: what the broker allows is what the role declares, and the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.commands import cli
from rftstream.config import loader
from rftstream.config.log_users import ADMIN, OPERATOR, READER
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError, TransportError
from rftstream.runs.access import rights_of, user_kinds
from rftstream.testing.conformance_tests.bench import PATIENCE_S, await_true, new
from rftstream.transport.access import Operation, Resource
from rftstream.transport.base import TopicSettings
from rftstream.transport.kafka.admin import KafkaAdmin
from rftstream.transport.kafka.connection import KafkaClientFactory
from rftstream.transport.kafka.transport import KafkaTransport
from tests.broker.conftest import Made, OwnBroker
from tests.broker.guarded import PASSWORD, TEAMS, Guarded, allow
from tests.broker.test_kafka_own import connect_securely, started
from tests.commands import PARTITIONS, call, write_run_file
from tests.docs.reading import ROOT, read
from tests.e2e.workplace import Workplace

pytestmark = pytest.mark.broker

A, B = "run-a", "run-b"


@pytest.fixture(scope="session")
def runs(guarded: Guarded, made: Made) -> Guarded:
    """Two runs, of two teams, whose users have what they need."""
    made("rights", lambda folder: give_rights(guarded))
    return guarded


def give_rights(guarded: Guarded) -> None:
    for team, name in zip(TEAMS, (A, B), strict=True):
        file = guarded.folder / f"{name}.toml"
        file.write_text(guarded.run_file(name, guarded.options(team)))
        environment = guarded.passwords_of(team, ADMIN, OPERATOR)
        before = called(environment, "topics", "acls", file, "--dry-run", "--json", code=1)
        assert not before["fine"] and before["missing"]
        done = called(environment, "topics", "acls", file, "--apply", "--json")
        assert done["missing"] == before["missing"]
        await_true("the rights hold", lambda file=file, env=environment: holds(env, file), PATIENCE_S)
        assert called(environment, "topics", "apply", file, "--json")["made"] == list(TOPICS), "by the operator"


def holds(env: dict[str, str], file: Path) -> bool:
    """Whether the broker knows by now what it was told."""
    return CliRunner(env=env).invoke(cli, ["topics", "acls", str(file), "--dry-run"]).exit_code == 0


def called(env: dict[str, str], *arguments: object, code: int = 0) -> dict[str, object]:
    done = CliRunner(env=env).invoke(cli, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if "--json" in arguments else {"text": done.stdout}


# ------------------------------------------------------------------------------------------------ what is allowed


@pytest.mark.law("fencing")
@pytest.mark.parametrize("kind", user_kinds())
def test_the_broker_allows_what_the_role_declares_and_nothing_else(runs: Guarded, kind: str) -> None:
    """By the broker's own answer to the user, for every topic and group of both runs."""
    config = loader.load([runs.folder / f"{A}.toml"])
    allowed: dict[str, set[str]] = {topic: set() for topic in TOPICS}
    for right in rights_of(kind, config):
        if right.resource is Resource.topic:
            for topic in TOPICS:
                if topic == right.name or (right.prefixed and topic.startswith(right.name)):
                    allowed[topic] |= {_broker_name(operation) for operation in right.operations}
    with runs.admin(f"{TEAMS[0]}{kind}", A) as client:
        told = client.describe_topics([f"{A}.{topic}" for topic in TOPICS])
        assert {one["name"].removeprefix(f"{A}."): set(one["authorized_operations"]) for one in told} == allowed
        assert not [name for name in client.list_topics() if name.startswith(f"{B}.")], "of another team"


def _broker_name(operation: Operation) -> str:
    return {"DescribeConfigs": "DESCRIBE_CONFIGS"}.get(operation.value, operation.value.upper())


# ------------------------------------------------------------------------------------------------ what is refused


@dataclass(frozen=True)
class As:
    """A user of run A, who tries something. Everything that is tried raises what the broker says."""

    guarded: Guarded
    kind: str

    @property
    def clients(self) -> KafkaClientFactory:
        return self.guarded.clients(f"{TEAMS[0]}{self.kind}", A)

    def write(self, topic: str) -> None:
        """Without a transaction, which would need an id of its own."""
        with closing(self.clients.producer(max_block_ms=8000)) as producer:
            producer.send(topic, b"{}", partition=0).get(10)

    def read(self, topic: str) -> None:
        place = KafkaPartition(topic, 0)
        if not topic.startswith(f"{A}."):  # not even told where it is
            self.ask(
                lambda client: _raise_all([kafka_errors.for_code(client.describe_topics([topic])[0]["error_code"])])
            )
        with closing(self.clients.consumer()) as consumer:
            consumer.assign([place])
            consumer.seek(place, 0)
            for _ in range(20):
                consumer.poll(timeout_ms=500)

    def produce_as(self, transactional_id: str) -> None:
        with closing(self.clients.producer(transactional_id=transactional_id, max_block_ms=8000)) as producer:
            producer.init_transactions()

    def commit(self, group: str, topic: str) -> None:
        with self.guarded.admin(f"{TEAMS[0]}{self.kind}", A) as client:
            done = client.alter_group_offsets(group, {KafkaPartition(topic, 0): OffsetAndMetadata(0, "", -1)})
            for error in done.values():
                if error is not kafka_errors.NoError:
                    raise error

    def ask(self, question: Callable[[object], object]) -> None:
        with self.guarded.admin(f"{TEAMS[0]}{self.kind}", A) as client:
            question(client)


def admin_rule() -> ACL:
    pattern = ResourcePattern(ResourceType.TOPIC, f"{A}.", ACLResourcePatternType.PREFIXED)
    return ACL(f"User:{TEAMS[0]}explorer", "*", ACLOperation.WRITE, ACLPermissionType.ALLOW, pattern)


FORBIDDEN: dict[str, tuple[str, Callable[[As], None]]] = {
    "an explorer writes `verified`": ("explorer", lambda user: user.write(f"{A}.verified")),
    "an explorer writes `control`": ("explorer", lambda user: user.write(f"{A}.control")),
    "a verifier writes `weights`": ("verifier", lambda user: user.write(f"{A}.weights")),
    "a feeder writes `outcomes`": ("feeder", lambda user: user.write(f"{A}.outcomes")),
    "a buffer writes `rollouts`": ("buffer", lambda user: user.write(f"{A}.rollouts")),
    "a trainer writes `batches`": ("trainer", lambda user: user.write(f"{A}.batches")),
    "an evaluator writes `weights`": ("evaluator", lambda user: user.write(f"{A}.weights")),
    "a synthesiser writes `tasks`": ("synthesiser", lambda user: user.write(f"{A}.tasks")),
    "a reader writes `control`": (READER, lambda user: user.write(f"{A}.control")),
    "a user without rights writes `tasks`": ("nobody", lambda user: user.write(f"{A}.tasks")),
    "an explorer reads `verified`": ("explorer", lambda user: user.read(f"{A}.verified")),
    "a verifier reads `experts`": ("verifier", lambda user: user.read(f"{A}.experts")),
    "a trainer reads `batches` of another run": ("trainer", lambda user: user.read(f"{B}.batches")),
    "an operator reads `tasks` of another run": (OPERATOR, lambda user: user.read(f"{B}.tasks")),
    "an explorer writes `rollouts` of another run": ("explorer", lambda user: user.write(f"{B}.rollouts")),
    "a buffer takes the trainer's transactional id": ("buffer", lambda user: user.produce_as(f"{A}.trainer")),
    "an explorer takes a verifier's transactional id": ("explorer", lambda user: user.produce_as(f"{A}.verifier.v.1")),
    "a trainer takes that of another run": ("trainer", lambda user: user.produce_as(f"{B}.trainer")),
    "a reader starts a producer": (READER, lambda user: user.produce_as(f"{A}.reader")),
    "an explorer commits positions of the verifiers": (
        "explorer",
        lambda user: user.commit(f"{A}.verifier", f"{A}.rollouts"),
    ),
    "a reader commits positions of the buffer": (READER, lambda user: user.commit(f"{A}.buffer", f"{A}.verified")),
    "a feeder deletes records of `tasks`": (
        "feeder",
        lambda user: user.ask(lambda client: client.delete_records({KafkaPartition(f"{A}.tasks", 0): 0})),
    ),
    "an explorer deletes the topic `tasks`": (
        "explorer",
        lambda user: user.ask(lambda client: client.delete_topics([f"{A}.tasks"])),
    ),
    "a trainer makes a topic": (
        "trainer",
        lambda user: user.ask(lambda client: client.create_topics({f"{A}.more": {"num_partitions": 1}})),
    ),
    "a reader deletes a consumer group": (
        READER,
        lambda user: user.ask(lambda client: _raise(client.delete_groups([f"{A}.buffer"]))),
    ),
    "an operator gives rights": (
        OPERATOR,
        lambda user: user.ask(lambda client: _raise_all(client.create_acls([admin_rule()])["failed"])),
    ),
}
"""What somebody tries -> who, and how."""


def _raise(said: dict[str, str]) -> None:
    for name, error in said.items():
        if error != "OK":
            raise getattr(kafka_errors, error.partition(":")[0], kafka_errors.KafkaError)(name)


def _raise_all(errors: list[type[Exception]]) -> None:
    for error in errors:
        raise error


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_forbidden_is_refused(runs: Guarded, what: str) -> None:
    kind, attempt = FORBIDDEN[what]
    with pytest.raises(kafka_errors.KafkaError) as error:
        attempt(As(runs, kind))
    refusals = [one for one in (error.value, error.value.__cause__, *error.value.args) if one is not None]
    assert any(isinstance(one, kafka_errors.AuthorizationError) or "Authorization" in str(one) for one in refusals), (
        repr(error.value)
    )


def test_the_docs_have_what_is_tried_here() -> None:
    assert f"[{len(FORBIDDEN)} attempts](../tests/broker/test_kafka_acls.py)" in read(ROOT / "docs" / "kafka.md")


# ------------------------------------------------------------------------------------------------ what is said


def made_topics(transport: KafkaTransport, topics: dict[str, TopicSettings]) -> bool:
    """A broker needs a moment for what it was told to allow."""
    try:
        transport.admin.ensure_topics(topics)
    except ConfigError:
        return False
    return True


def test_a_missing_acl_is_one_line_that_says_what_to_grant(guarded: Guarded) -> None:
    def refused(what: Callable[[], object]) -> str:
        with pytest.raises(ConfigError) as error:
            what()
        text = str(error.value)
        assert error.value.exit_code == 2
        assert len(text) < 600
        assert "\n" not in text
        return text

    transport = connect_securely(guarded.secure, "SASL_PLAINTEXT")
    topics = {name: TopicSettings(partitions=3) for name in ("a", "b", "c", "d")}
    told = refused(lambda: transport.admin.ensure_topics(topics))
    assert told.startswith(f"create topics: {guarded.passwords} does not allow it to the user 'user' (Topic")
    assert (
        "grant Read, Write, Create, Describe, DescribeConfigs and Delete on the topics whose names begin with 'sec"
        in told
    )
    assert told.endswith("--operation Delete --topic secured. --resource-pattern-type prefixed")
    of_topics = (ACLOperation.CREATE, ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS)
    allow(guarded, ResourceType.TOPIC, "secured.", *of_topics)
    await_true("made", lambda: made_topics(transport, topics), PATIENCE_S)
    assert "Read, Describe and Delete on the consumer groups" in refused(lambda: transport.admin.committed("g"))
    producer = transport.producer("p")
    told = refused(producer.start)
    assert told.startswith("producer secured.p: could not start: ")
    assert "Write and Describe on the transactional ids" in told
    allow(guarded, ResourceType.TRANSACTIONAL_ID, "secured.", ACLOperation.WRITE, ACLOperation.DESCRIBE)
    await_true("started", lambda: started(producer), PATIENCE_S)
    told = refused(lambda: producer.commit([new("a", 0, "not mine to write")]))
    assert told.startswith("producer secured.p: commit: ")
    assert "on the topics whose names begin with 'secured.'" in told
    producer.close()
    transport.close()


def test_a_difference_is_shown_and_mended(runs: Guarded) -> None:
    """Of run B, which no other test counts on."""
    file, admin = runs.folder / f"{B}.toml", runs.passwords_of(TEAMS[1], ADMIN, OPERATOR)
    user = f"User:{TEAMS[1]}explorer"
    with closing(KafkaAdminClient(bootstrap_servers=runs.open)) as client:
        for name, kind in ((f"{B}.verified", ACLResourcePatternType.LITERAL), ("run", ACLResourcePatternType.PREFIXED)):
            pattern = ResourcePattern(ResourceType.TOPIC, name, kind)
            client.create_acls([ACL(user, "*", ACLOperation.WRITE, ACLPermissionType.ALLOW, pattern)])

    def differs(*more: str) -> dict[str, object]:
        return called(admin, "topics", "acls", file, *more, "--json")

    await_true("it is shown", lambda: len(differs("--dry-run")["superfluous"]) == 1, PATIENCE_S)
    found = differs("--apply")
    assert found["superfluous"] == [
        {"principal": user, "resource": "topic", "name": f"{B}.verified", "pattern": "literal", "operation": "Write"}
    ]
    assert found["others"] == [f"{user} may Write on the topic prefixed run"]
    assert not found["removed"]
    assert differs("--apply", "--prune")["removed"]
    await_true("it is gone", lambda: not differs("--dry-run")["superfluous"], PATIENCE_S)
    assert differs("--dry-run")["others"] == found["others"], "it holds for more than this run"
    with closing(KafkaAdminClient(bootstrap_servers=runs.open)) as client:
        wider = ResourcePatternFilter(ResourceType.TOPIC, "run", ACLResourcePatternType.PREFIXED)
        client.delete_acls([ACLFilter(user, "*", ACLOperation.WRITE, ACLPermissionType.ALLOW, wider)])


def test_who_may_not_set_rights_is_told_so(runs: Guarded) -> None:
    file = runs.folder / f"{A}.toml"
    as_explorer = {"KAFKA_PASSWORD_admin": f"{PASSWORD}{TEAMS[0]}explorer"}
    name = "RFTSTREAM__TRANSPORT__OPTIONS__SASL_PLAIN_USERNAME"
    done = CliRunner(env={**as_explorer, name: f"{TEAMS[0]}explorer"}).invoke(
        cli, ["topics", "acls", str(file), "--apply", "--user-prefix", TEAMS[0]]
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert "describe ACLs: this user may not; do it as a user with Describe and Alter on the cluster" in done.stderr


def test_brokers_that_know_no_rights_say_so(tmp_path: Path, own_broker: OwnBroker, run_id: Callable[[], str]) -> None:
    file = write_run_file(tmp_path, f'{PARTITIONS}kind = "kafka"\nservers = "{own_broker.address}"\n', name=run_id())
    done = call("topics", "acls", file, "--dry-run")
    assert done.exit_code == 2
    assert "these brokers have no authorizer, so everybody may do everything" in done.stderr


def test_positions_that_may_not_be_committed_are_told(runs: Guarded) -> None:
    said = r"commit positions of more: .* does not allow it to the user 'a-reader'"
    clients = runs.clients(f"{TEAMS[0]}{READER}", A)
    with closing(KafkaAdmin(clients, create=False)) as admin, pytest.raises(ConfigError, match=said):
        admin.commit_initial("more", ["tasks"])


def test_ends_of_a_topic_that_may_only_be_described(runs: Guarded) -> None:
    """Whoever may not ask who is committing waits a moment, and takes the end that it sees."""
    record, place = f"{A}.rollouts", TopicPartition("rollouts", 0)
    ends: dict[str, int] = {}
    with closing(runs.clients(f"{TEAMS[0]}explorer", A).producer(transactional_id=f"{A}.explorer.open")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(record, b"{}", partition=0).get(10)
        for kind in ("explorer", "evaluator"):
            clients = runs.clients(f"{TEAMS[0]}{kind}", A)
            with closing(KafkaAdmin(clients, create=False)) as admin:
                ends[kind] = admin.end_offsets("rollouts")[place]
                with pytest.raises(TransportError, match="a transaction is open"):
                    admin.end_offsets("rollouts", settled=True)
        producer.abort_transaction()
    assert ends == {"explorer": 0, "evaluator": 0}


# ------------------------------------------------------------------------------------------------ a whole run

MORE = """
[evaluations.held-out]
source = "arithmetic"
options = { seed = 1 }
every = 2
[retention]
"""
"""An evaluator, and a trainer that deletes."""


@pytest.mark.long
@pytest.mark.parametrize("way", ["passwords", "certificates"])
def test_a_whole_run_each_role_with_a_user_of_its_own(place: Workplace, guarded: Guarded, way: str) -> None:
    """No worker has the password of another."""
    team, name = TEAMS[0], f"whole-{way}"
    options = guarded.options(team) if way == "passwords" else guarded.by_certificate()
    file = place.write(f"{name}.toml", guarded.run_file(name, options) + MORE)
    users = ["--user-prefix", "CN="] if way == "certificates" else []

    def known(*kinds: str) -> dict[str, str]:
        return guarded.passwords_of(team, *kinds) if way == "passwords" else {}

    given = place.call("topics", "acls", file, "--apply", *users, env=known(ADMIN))
    assert given.code == 0, given.err
    made = place.call("run", file, "--no-workers", env=known(OPERATOR))
    assert made.code == 0, made.err
    looking = {**known(READER), "RFTSTREAM_LOG_USER": READER}
    refused = place.call("pause", file, env=looking)
    assert refused.code == 2, refused.err
    assert "does not allow it" in refused.err
    if way == "passwords":
        roles = [kind for kind in user_kinds() if kind not in (OPERATOR, READER, "synthesiser")]
        workers = [place.start("worker", file, "--role", role, env=known(role)) for role in roles]
        assert [worker.finish().code for worker in workers] == [0] * len(roles), place.report()
    else:  # a supervisor starts them; each finds its own certificate
        supervised = place.call("resume", file)
        assert supervised.code == 0, place.report()
    place.assert_nobody_left()

    told = place.call("audit", file, "--json", env=looking)
    assert told.code == 0, told.err
    assert (told.result["balanced"], told.result["version"]) == (True, 6)
    assert not told.result["undeleted"], "the trainer may delete what retention gives up"
    for command in (["status", file], ["inspect", file, "rollouts"], ["trace", file, "version:6"]):
        looked = place.call(*command, env=looking)
        assert looked.code == 0, looked.err
    differs = place.call("topics", "acls", file, "--dry-run", "--json", *users, env=known(ADMIN)).result
    assert (differs["fine"], differs["superfluous"]) == (True, [])
    assert_no_secret(place)


def assert_no_secret(place: Workplace) -> None:
    """Of no user, in no file that a run leaves, and in nothing that was said."""
    for path in place.folder.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
