"""The rights of users follow from the declarations of the roles."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rftstream.commands import cli
from rftstream.config import loader, log_users
from rftstream.config.log_users import OPERATOR, READER
from rftstream.config.sections import RunConfig
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError
from rftstream.queries.state.access import AccessDifference, compare_access, find_named, needed_access
from rftstream.queries.state.topics import find_log
from rftstream.roles import role_specs
from rftstream.runs.access import grants_of, principals, rights_of, user_kinds
from rftstream.runs.folder import RunFolder
from rftstream.transport.access import Grant, Operation, Resource
from tests.configs import small_run
from tests.suite.each import each


def make_config(**options: Any) -> RunConfig:
    return small_run(
        run={"name": "sums", "steps": 1}, transport={"kind": "kafka", "servers": "broker:9092", "options": options},
    )  # fmt: skip


CONFIG = make_config()


def topics_with(kind: str, operation: Operation, config: RunConfig = CONFIG) -> set[str]:
    return {
        topic
        for topic in TOPICS
        for right in rights_of(kind, config)
        if right.resource is Resource.topic and operation in right.operations
        if topic == right.name or (right.prefixed and topic.startswith(right.name))
    }


@each("spec", role_specs(), ids=lambda spec: spec.name)
def test_a_role_has_what_it_declares(spec: Any) -> None:
    assert topics_with(spec.name, Operation.read) == set(spec.reads(CONFIG))
    assert topics_with(spec.name, Operation.write) == set(spec.writes())
    assert topics_with(spec.name, Operation.delete) == set(spec.deletes)
    assert not topics_with(spec.name, Operation.create)
    assert set(spec.reads(CONFIG)) >= {*spec.consumes, *spec.follows, *spec.produces, *spec.positions, "control"}


def test_nobody_else_writes_what_one_role_is_there_for() -> None:
    writers = {
        topic: [kind for kind in user_kinds() if kind != OPERATOR and topic in topics_with(kind, Operation.write)]
        for topic in TOPICS
    }
    shared = {"control", "dead"}
    assert {topic: kinds for topic, kinds in writers.items() if topic not in shared} == {
        "tasks": ["feeder"], "rollouts": ["explorer"], "partials": ["explorer"], "verified": ["verifier"],
        "batches": ["buffer"], "outcomes": ["buffer"], "questions": ["buffer"], "judgements": ["buffer"],
        "weights": ["trainer"], "steps": ["trainer"], "evals": ["evaluator"], "problems": ["synthesiser"],
        "experts": [], "feedback": [], "summaries": ["buffer", "trainer"],
    }  # fmt: skip
    assert "explorer" not in writers["control"]
    assert READER not in {kind for kinds in writers.values() for kind in kinds}


def test_what_the_run_file_chooses_is_read() -> None:
    synthesiser = next(spec for spec in role_specs() if spec.name == "synthesiser")
    chosen = replace(synthesiser, chosen=lambda config: ("verified",))
    assert "verified" in chosen.reads(CONFIG)
    assert "verified" not in synthesiser.reads(CONFIG)


def test_names_on_the_servers() -> None:
    trainer = grants_of("trainer", "User:t", CONFIG, "sums-2")
    assert Grant("User:t", Resource.topic, "sums-2.weights", False, Operation.write) in trainer
    assert Grant("User:t", Resource.transactional_id, "sums-2.trainer", False, Operation.write) in trainer
    assert {grant.name for grant in trainer if grant.resource is Resource.group} == {"sums-2."}
    explorer = grants_of("explorer", "User:e", CONFIG, "sums-2")
    assert Grant("User:e", Resource.transactional_id, "sums-2.explorer.", True, Operation.write) in explorer
    assert Grant("User:e", Resource.group, "sums-2.explorer", False, Operation.read) in explorer
    assert {grant.name for grant in explorer if grant.operation is Operation.write and grant.prefixed} == {
        "sums-2.explorer."
    }, "no write by the prefix of the run"


@each(
    ("options", "prefix", "named", "explorer"),
    [
        ({}, None, {}, "User:rft-explorer"),
        ({}, "CN=", {}, "User:CN=explorer"),
        ({"sasl_plain_username": "team-{role}"}, None, {}, "User:team-explorer"),
        ({"sasl_plain_username": "team-{role}"}, "a-", {}, "User:a-explorer"),
        ({"sasl_plain_username": "all"}, None, {}, "User:all"),
        ({}, "a-", {"explorer": "CN=gpu,O=us"}, "User:CN=gpu,O=us"),
        ({}, None, {"explorer": "User:x"}, "User:x"),
    ],
)
def test_who_the_users_are(options: dict[str, str], prefix: str | None, named: dict[str, str], explorer: str) -> None:
    assert principals(make_config(**options), prefix=prefix, named=named)["explorer"] == explorer


def test_one_user_for_all_has_each_right_once() -> None:
    report = needed_access(make_config(sasl_plain_username="all"), RunFolder(Path("sums")))
    assert {grant.principal for grant in report.all_grants()} == {"User:all"}
    commands = report.to_commands().splitlines()
    assert len(commands) == len(set(commands))


def test_the_commands_say_the_same_rights() -> None:
    report = needed_access(CONFIG, RunFolder(Path("sums")), named={"reader": "a reader"})
    resources = {"--topic": Resource.topic, "--group": Resource.group, "--transactional-id": Resource.transactional_id}
    said = set()
    for command in report.to_commands().splitlines():
        words = shlex.split(command)
        assert words[:3] == ["kafka-acls", "--bootstrap-server", "broker:9092"]
        of = [(words[at], words[at + 1] if at + 1 < len(words) else "") for at in range(len(words))]
        (principal,) = (value for word, value in of if word == "--allow-principal")
        operations = [Operation(value) for word, value in of if word == "--operation"]
        prefixed = ("--resource-pattern-type", "prefixed") in of
        things = [(resources[word], value) for word, value in of if word in resources]
        things += [(Resource.cluster, "kafka-cluster")] if "--cluster" in words else []
        said |= {Grant(principal, kind, name, prefixed, one) for kind, name in things for one in operations}
    assert said == report.all_grants()
    assert "User:a reader" in {grant.principal for grant in said}


def test_a_difference_tells_what_is_missing_and_what_is_too_much() -> None:
    one = Grant("User:e", Resource.topic, "sums.tasks", False, Operation.read)
    more = Grant("User:e", Resource.topic, "sums.", True, Operation.write)
    difference = AccessDifference(missing=(one,), superfluous=(more,), others=("User:x may Read on the topic *",))
    assert not difference.fine
    assert difference.to_lines() == [
        "missing: 1 right",
        "  + User:e: Read on the topic sums.tasks",
        "not needed (--prune removes them): 1 right",
        "  - User:e: Write on the topic prefixed sums.",
        "rules of others, left as they are:",
        "  User:x may Read on the topic *",
    ]
    assert replace(difference, added=True).fine


def test_no_server_is_asked_for_the_name_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(loader.to_toml(CONFIG))
    assert find_named(file)[1].run_id == "sums"
    assert find_named(file, "sums-7")[1].run_id == "sums-7"
    (layer := tmp_path / "broker.toml").write_text('[run]\nname = "over"\n[transport]\npartitions = 3\n')
    (here := tmp_path / "here.toml").write_text(loader.to_toml(loader.replace(CONFIG, transport__kind="embedded")))
    for config, folder in (find_named(file, None, [layer]), find_log(here, [layer])):
        assert (folder.run_id, config.transport.partitions, config.model) == ("over", 3, CONFIG.model)


def test_a_log_without_servers_has_no_users(tmp_path: Path) -> None:
    config, folder = loader.replace(CONFIG, transport__kind="embedded"), RunFolder(tmp_path / "sums")
    report = needed_access(config, folder)
    with pytest.raises(ConfigError, match="'embedded' has no users, expected a log on servers"):
        compare_access(report, config, folder)
    assert not folder.path.exists()


def called(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["topics", "acls", *map(str, arguments)])


def test_the_command_shows_what_each_role_needs(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(loader.to_toml(CONFIG))
    text = called(file, "--user-prefix", "a-", "--user", "reader=grafana").stdout
    assert "\nverifier: User:a-verifier\n  group             sums.verifier    Read\n" in text
    assert "\nreader: User:grafana\n" in text
    told = json.loads(called(file, "--json", "--run", "sums-2").stdout)
    trainer = next(one for one in told["users"] if one["role"] == "trainer")
    assert {"resource": "topic", "name": "sums-2.weights", "pattern": "literal", "operations": ["Read", "Write"]} in (
        trainer["rights"]
    )
    assert called(file, "--format", "kafka-acls").stdout.startswith("kafka-acls --bootstrap-server broker:9092 ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prune"], "give --apply with it"),
        (["--apply", "--dry-run"], "give one of them"),
        (["--format", "kafka-acls", "--json"], "prints commands alone"),
        (["--user", "reader"], "expected ROLE=NAME"),
        (["--user", "nobody=x"], "no such role"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(loader.to_toml(CONFIG))
    done = called(file, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


# ------------------------------------------------------------------------------------------------ who a process is


def test_the_placeholder_becomes_the_user() -> None:
    options = {"sasl_plain_username": "rft-{role}", "sasl_plain_password": "env:PASSWORD_{role}", "retries": 3}
    assert log_users.options_of(options, "explorer") == {
        "sasl_plain_username": "rft-explorer", "sasl_plain_password": "env:PASSWORD_explorer", "retries": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("said", "user"), [(None, OPERATOR), ("", OPERATOR), ("reader", READER)])
def test_who_gives_commands(monkeypatch: pytest.MonkeyPatch, said: str | None, user: str) -> None:
    monkeypatch.delenv(log_users.VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(log_users.VARIABLE, said)
    assert log_users.command_user() == user


def test_nobody_gives_commands_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_users.VARIABLE, "trainer")
    with pytest.raises(ConfigError, match="RFTSTREAM_LOG_USER: got 'trainer', expected operator or reader"):
        log_users.command_user()
