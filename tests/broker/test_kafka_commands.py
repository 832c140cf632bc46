"""The commands that look after topics, groups and brokers, on a real broker."""

from __future__ import annotations

import contextlib
import gc
import itertools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient

from rftstream.config import loader
from rftstream.contracts.topics import TOPICS
from rftstream.runs.folder import OpenRun, RunFolder, consumer_groups, open_transport
from rftstream.testing.conformance_tests.bench import await_true
from rftstream.transport.findings import Level
from rftstream.transport.kafka.cluster_check import REPLICATED
from rftstream.transport.kafka.transport import KafkaTransport
from tests.commands import PARTITIONS, call, called, write_run_file
from tests.unit.synthetic import SyntheticLog

# The client leaves sockets that never connected to the garbage collector, which warns.
pytestmark = [pytest.mark.broker, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Here, and not in the next test of another module."""
    yield
    gc.collect()


@pytest.fixture
def run_file(tmp_path: Path, servers: str, run_id: Callable[[], str]) -> Path:
    return write_run_file(tmp_path, f'{PARTITIONS}kind = "kafka"\nservers = "{servers}"\n', name=run_id())


def opened(run_file: Path) -> OpenRun:
    config = loader.load([run_file], env={})
    folder = RunFolder(run_file.parent / "runs" / config.run.name)
    return OpenRun(folder, config, open_transport(config, folder, create=True))


def test_doctor_finds_the_broker_fit(run_file: Path) -> None:
    found = {one["what"]: one for one in called("doctor", run_file)["findings"]}
    assert found["broker version"]["found"].startswith("Kafka 4.")
    for what in ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "offsets.retention.minutes",
                 "transaction.max.timeout.ms", "group.min.session.timeout.ms", "replication"):  # fmt: skip
        assert found[what]["level"] == "ok", found[what]


def test_settings_that_will_not_do(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(run_file)
    assert isinstance(run.transport, KafkaTransport)
    look = run.transport.admin.look
    real = look._settings_of(1)
    bad = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "10000", "transaction.max.timeout.ms": "5000"}
    monkeypatch.setattr(look, "_settings_of", lambda node: {**real, **bad})
    found = {one.what: one for one in look.broker()}
    run.transport.close()
    assert found["transaction.abort.timed.out.transaction.cleanup.interval.ms"].level is Level.warning
    assert found["transaction.max.timeout.ms"].level is Level.problem
    assert found["transaction.max.timeout.ms"].found == "5000"


def test_topics_with_the_right_settings(run_file: Path) -> None:
    assert called("topics", "list", run_file, code=1)["fine"] is False
    assert called("topics", "apply", run_file)["made"] == list(TOPICS)
    assert called("topics", "apply", run_file)["made"] == []
    assert called("topics", "list", run_file)["fine"] is True
    run_file.write_text(run_file.read_text().replace("partitions = 2", "partitions = 3"))
    refused = call("topics", "apply", run_file)
    assert refused.exit_code == 2
    assert "tasks: has 2 partitions, expected 3 (transport.partitions)" in refused.stderr


def test_what_others_make_by_the_plan_is_what_a_run_wants(run_file: Path, servers: str) -> None:
    plan = called("topics", "plan", run_file)
    looked_at = {one["what"] for one in called("doctor", run_file)["findings"]}
    wished = {one["name"] for one in plan["brokers"]}
    assert wished - looked_at <= {"version", *REPLICATED}, "doctor looks at the others on three brokers"
    commands = call("topics", "plan", run_file, "--format", "kafka-topics").stdout.splitlines()
    made = {}
    for command in map(shlex.split, commands):
        options = list(itertools.pairwise(command))
        configs = dict(value.split("=") for option, value in options if option == "--config")
        (name,), (partitions,) = (
            [value for option, value in options if option == wanted] for wanted in ("--topic", "--partitions")
        )
        made[name] = {"num_partitions": int(partitions), "replication_factor": -1, "configs": configs}
    assert [one["name"] for one in plan["topics"]] == list(made)
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=servers)) as client:
        client.create_topics(made)
    await_true("all topics are as wanted", lambda: call("topics", "list", run_file).exit_code == 0, 60.0)


def test_a_setting_that_would_delete_unread_records_is_shown_and_refused(run_file: Path) -> None:
    """As on a Kafka whose topics are made by others, with the company's retention."""
    called("topics", "apply", run_file)
    run = opened(run_file)
    assert isinstance(run.transport, KafkaTransport)
    admin = run.transport.admin
    from kafka.admin import ConfigResource, ConfigResourceType

    name = f"{run.run_id}.steps"
    resource = ConfigResource(ConfigResourceType.TOPIC, name, configs={"retention.ms": "1000"})
    admin.connection.ask("alter", lambda client: client.alter_configs([resource]))
    run.transport.close()
    steps = next(one for one in called("topics", "list", run_file, code=1)["topics"] if one["topic"] == "steps")
    assert steps["differences"] == ["retention.ms is 1000, expected -1"]
    sentence = (
        f"{run.run_id}: steps: retention.ms is 1000, expected -1; brokers would delete records that nobody has read"
    )
    for command, options in (("check", ()), ("run", ("--progress", "none"))):
        refused = call(command, run_file, *options)
        assert refused.exit_code == 2
        assert sentence in refused.stdout + refused.stderr
    found = {one["what"]: one for one in called("doctor", run_file, code=1)["findings"]}
    assert found[f"topics of {run.run_id}"]["found"] == "steps: retention.ms is 1000, expected -1"
    assert "kafka-configs.sh" in found[f"topics of {run.run_id}"]["todo"]


def test_delete_takes_topics_and_groups_and_refuses_while_a_member_is_there(run_file: Path) -> None:
    called("topics", "apply", run_file)
    run = opened(run_file)
    run.folder.config_file.write_text(loader.to_toml(run.config))
    run.folder.lock_file.write_text("1")
    SyntheticLog(run.transport).flow(0)
    member = run.transport.member("explorer", ["tasks"], name="somebody")
    while not member.assignment():
        member.poll()
        run.transport.wait([member], 1.0)
    refused = call("delete", run.folder.path, "--yes")
    assert refused.exit_code == 2
    assert "explorer somebody at " in refused.stderr
    member.close()
    run.transport.admin.delete_topics(["control"])  # a deletion was stopped half way
    plan = called("delete", run.folder.path, "--yes")
    assert (plan["topics"], plan["groups"]) == (sorted(TOPICS.keys() - {"control"}), list(consumer_groups(run.config)))
    assert not run.folder.path.exists()
    assert isinstance(run.transport, KafkaTransport)
    await_true("no topics", lambda: not run.transport.admin.topics(), 60.0)  # a broker forgets them soon after
    assert run.transport.admin.committed("explorer") == {}
    run.transport.close()
