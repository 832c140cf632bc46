"""docker-compose.yml: valid by its specification, and true to the commands, settings and broker that there are."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from pages import configuration

from rftstream.commands import COMMANDS, cli
from rftstream.config.loader import load
from rftstream.roles import ROLES
from tests.containers import engine
from tests.deploy.conftest import ROOT, read_yaml
from tests.deploy.dockerfile import read_stages
from tests.suite.each import each

FILES = [ROOT / "docker-compose.yml", ROOT / "deploy" / "docker" / "compose.gpu.yml"]
SERVICES = {f"{path.name}: {name}": service for path in FILES for name, service in read_yaml(path)["services"].items()}
OURS = {name: service for name, service in SERVICES.items() if service.get("image", "").startswith("rftstream:")}


def filled(text: str) -> str:
    """`${NAME:-default}` as it is where nobody sets NAME."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_file_is_valid(path: Path) -> None:
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(read_yaml(path), json.loads(vendored.read_text(encoding="utf-8")))


@each("service", SERVICES)
def test_images_have_a_version(service: str) -> None:
    """And what others build is named by its digest, too."""
    name, colon, tag = filled(SERVICES[service]["image"]).partition(":")
    assert colon and tag and "latest" not in tag
    assert name == "rftstream" or re.fullmatch(r"[\w.]+@sha256:[0-9a-f]{64}", tag)


@each("service", [name for name in OURS if "bucket" not in name])
def test_commands_are_commands(service: str) -> None:
    """Parsed as rftstream does, and not run."""
    name, *arguments = OURS[service]["command"]
    assert name in COMMANDS
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    context = command.make_context(name, list(arguments))
    if name == "worker":
        assert context.params["role"] == service.partition(": ")[2]
        assert context.params["role"] in ROLES


def test_every_role_has_a_service(compose: dict[str, Any]) -> None:
    assert set(ROLES) <= set(compose["services"])


def test_settings_in_the_environment_are_settings(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known = configuration.keys()
    for service in compose["services"].values():
        for variable, value in service.get("environment", {}).items():
            if variable.startswith("RFTSTREAM__"):
                key = ".".join(part.lower() for part in variable.split("__")[1:])
                assert key in known
                monkeypatch.setenv(variable, filled(value))
    create = compose["services"]["create"]
    mounts = dict(reversed(filled(mount).removesuffix(":ro").split(":")) for mount in create["volumes"])
    file = filled(create["environment"]["RFTSTREAM_CONFIG"]).replace("/work", str(ROOT / mounts["/work"]))
    config = load([file])
    assert (config.transport.kind, config.transport.servers) == ("kafka", "kafka:9092")
    assert config.run.folder in mounts, "on a volume that all workers see"


def test_every_worker_sees_the_same_and_is_given_time_to_finish(compose: dict[str, Any]) -> None:
    workers = [compose["services"][role] for role in ROLES]
    for worker in workers:
        assert worker["environment"] == compose["services"]["create"]["environment"]
        assert worker["volumes"] == compose["services"]["create"]["volumes"]
        assert worker["restart"].startswith("on-failure:")
        assert int(worker["stop_grace_period"].removesuffix("s")) > 40
        assert worker["depends_on"]["create"]["condition"] == "service_completed_successfully"
        assert "container_name" not in worker and "ports" not in worker, "or it could not be scaled"


def test_who_looks_on_begins_no_run(compose: dict[str, Any]) -> None:
    """`up exporter` after a run's end is to show that run. `create` would begin the next one."""
    for onlooker in ("exporter", "studio"):
        assert "create" not in compose["services"][onlooker]["depends_on"]
        assert not compose["services"][onlooker]["restart"].partition(":")[2], "a run may take long to come"


def test_it_starts_on_a_small_and_busy_machine(compose: dict[str, Any]) -> None:
    """Docker refuses more CPUs than there are. A health check that starts a JVM is late where much else runs."""
    for service in compose["services"].values():
        assert "cpus" not in service.get("deploy", {}).get("resources", {}).get("limits", {})
    assert ".sh" not in str(compose["services"]["kafka"]["healthcheck"])


def test_containers_have_no_rights_and_write_to_volumes_alone(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or not service["image"].startswith("rftstream:"), name
        assert service.get("healthcheck") or service["image"].startswith("rftstream:"), f"{name}: our images have one"
        assert set(service.get("profiles", ["monitoring"])) <= {"monitoring", "studio", "synthesis"}


@each("service", OURS)
def test_an_image_is_named_after_its_target(service: str) -> None:
    """And roles that need PyTorch have one with it."""
    target, role = filled(OURS[service]["build"]["target"]), service.partition(": ")[2]
    assert filled(OURS[service]["image"]) == f"rftstream:local-{target}"
    assert target in read_stages()
    assert (target == "roles") is (role not in ("trainer", "explorer", "evaluator", "synthesiser"))


def test_the_broker_is_as_the_tested_one(compose: dict[str, Any]) -> None:
    kafka = compose["services"]["kafka"]
    tested = runpy.run_path(str(ROOT / "scripts" / "kafka"))
    assert filled(kafka["image"]).startswith(f"apache/kafka:{tested['VERSION']}@")
    settings = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for name, value in kafka["environment"].items() if name.startswith("KAFKA_")
    }  # fmt: skip
    expected = dict(line.split("=", 1) for line in tested["PROPERTIES"].splitlines())
    for name in (
        "process.roles", "transaction.abort.timed.out.transaction.cleanup.interval.ms", "offsets.retention.minutes",
        "auto.create.topics.enable",
    ):  # fmt: skip
        assert settings[name] == expected[name], name
    assert {settings[name] for name in settings if name.endswith((".factor", ".min.isr"))} == {"1"}, "there is one node"


def test_stand_ins_have_the_names_of_what_they_stand_for(compose: dict[str, Any]) -> None:
    """Where no registry gives images, those that are made here are found under these names, less the digest."""
    script = (ROOT / "scripts" / "docker").read_text(encoding="utf-8")
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / engine.DOCKERFILE).read_text(encoding="utf-8"), re.MULTILINE)
    assert base is not None
    named = [base[1], *(filled(compose["services"][service]["image"]) for service in ("kafka", "s3"))]
    assert [name.partition("@")[0] for name in named] == [engine.PYTHON, engine.KAFKA, engine.S3]
    assert f"PYTHON={engine.PYTHON} KAFKA={engine.KAFKA} S3={engine.S3}\n" in script


def test_no_secret_stands_in_the_file(compose: dict[str, Any]) -> None:
    """Whatever is one comes from the environment; what stands there is for this machine alone."""
    for service in compose["services"].values():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|ACCESS_KEY", variable):
                assert re.fullmatch(r"\$\{\w+:-(only-for-this-machine|rftstream)\}", value), variable


def test_what_is_reached_from_outside_is_reached_from_this_machine_alone(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_dockerfile_is_clean_and_copies_what_there_is() -> None:
    dockerfile = ROOT / "deploy" / "docker" / "Dockerfile"
    lint = subprocess.run([Path(sys.executable).with_name("hadolint"), dockerfile], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout
    text = dockerfile.read_text(encoding="utf-8")
    assert "# syntax=" not in text, "the builder would ask a registry for nothing"
    assert "UV_SYSTEM_CERTS=1" in text and "ARG TORCH_FROM=" in text, "behind a company's proxy, and with its index"
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(one.removeprefix("!")) for one in ignored if one.startswith("!")), source


def test_volumes_and_files_that_are_mounted_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for mount in service.get("volumes", []):
            source = filled(mount).partition(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], mount
