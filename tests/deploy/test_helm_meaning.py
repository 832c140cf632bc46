"""deploy/helm: what the chart makes is true to the commands, roles, settings, rights and metrics that there are."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from rftstream.commands import COMMANDS, cli
from rftstream.config import secrets
from rftstream.config.loader import load
from rftstream.config.role_sections import ExplorerSection, SynthesiserSection, VerifierSection
from rftstream.config.sections import RunConfig, TransportSection
from rftstream.errors import ENDS_THE_RUN, TransportError
from rftstream.launch import host
from rftstream.queries.audits.balance import Balance
from rftstream.queries.curves.exported import EXPORTED
from rftstream.queries.state.access import needed_access
from rftstream.queries.state.following import scale_plan
from rftstream.roles import role_specs
from rftstream.runs.folder import RunFolder, open_transport
from rftstream.service.role_spec import RoleKind
from tests.deploy.chart import (
    ARITHMETIC,
    CHART,
    FOLDER,
    KAFKA,
    RELEASE,
    SYNTHESIS,
    by_name,
    documents,
    helm,
    kubernetes_versions,
    pods,
    render,
)
from tests.suite.each import each

EXAMPLES = FOLDER / "examples"
STRIMZI = ("--values", str(EXAMPLES / "strimzi.yaml"))
KEDA = ("--values", str(EXAMPLES / "keda.yaml"), *KAFKA)


@pytest.fixture(scope="module")
def plain() -> str:
    return render(*KAFKA)


@pytest.fixture(scope="module")
def strimzi() -> str:
    return render(*STRIMZI)


@pytest.fixture
def synthesis(tmp_path: Path) -> Path:
    file = tmp_path / "more.toml"
    file.write_text(SYNTHESIS)
    return file


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Those of a container whose values stand there."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


# ------------------------------------------------------------------------------------------------ roles


def test_single_roles_are_jobs_and_others_deployments(synthesis: Path, plain: str) -> None:
    more = render(*KAFKA, run_file=synthesis)
    for spec in role_specs():
        found = by_name(more if spec.name == "synthesiser" else plain)
        kind = "Job" if spec.kind is RoleKind.single else "Deployment"
        assert f"{kind} {RELEASE}-{spec.name}" in found
        assert (f"PodDisruptionBudget {RELEASE}-{spec.name}" in found) == (spec.kind is not RoleKind.single)
    assert f"Deployment {RELEASE}-synthesiser" not in by_name(plain), "its run file asks for none"
    assert f"Job {RELEASE}-evaluator" not in by_name(more), "its run file has no evaluations"


def test_commands_are_commands(synthesis: Path, plain: str) -> None:
    """Parsed as rftstream does, and not run."""
    for component, template in {**pods(render(*KAFKA, run_file=synthesis)), **pods(plain)}.items():
        name, *arguments = template["spec"]["containers"][0]["args"]
        assert name in COMMANDS
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        context = command.make_context(name, list(arguments))
        port = context.params["port" if name == "exporter" else "metrics_port"]
        assert template["spec"]["containers"][0]["ports"] == [{"name": "metrics", "containerPort": port}]
        assert context.params.get("role", "exporter") == component


def test_a_device_of_its_own_and_gpus_of_its_own() -> None:
    found = pods(render("--values", str(EXAMPLES / "gpu.yaml"), *KAFKA))
    for role in ("trainer", "explorer"):
        (container,) = found[role]["spec"]["containers"]
        assert container["args"][-2:] == ["--device", "cuda"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    (verifier,) = found["verifier"]["spec"]["containers"]
    assert verifier["image"] == "registry.example.org/rftstream:2026-11-roles"
    assert "nvidia.com/gpu" not in verifier["resources"]["limits"]


def test_exit_codes_that_another_try_cannot_mend_end_a_job(plain: str) -> None:
    """But the one of a log that cannot be reached: it comes back, and nobody looks on as a supervisor does."""
    (rules,) = {json.dumps(one["spec"]["podFailurePolicy"]["rules"])
                for one in documents(plain) if one["kind"] == "Job"}  # fmt: skip
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in json.loads(rules) if "onExitCodes" in rule}
    assert set(codes["FailJob"]) == ENDS_THE_RUN - {TransportError.exit_code}
    assert codes["Ignore"][0] not in ENDS_THE_RUN


def test_workers_have_the_time_that_they_take_to_leave(plain: str) -> None:
    for template in pods(plain).values():
        assert template["spec"]["terminationGracePeriodSeconds"] > host.DEADLINE_S + host._LAST_RESORT_S + 10


def test_probes_ask_what_is_answered(plain: str) -> None:
    source = (Path(host.__file__).with_name("health.py")).read_text(encoding="utf-8")
    for template in pods(plain).values():
        for container in template["spec"]["containers"]:
            probes = {name: one["httpGet"] for name, one in container.items() if name.endswith("Probe")}
            assert {"livenessProbe", "readinessProbe"} <= set(probes)
            for probe in probes.values():
                assert f'"{probe["path"]}"' in source and probe["port"] == "metrics"


def test_pods_have_no_rights_that_they_do_not_need(strimzi: str) -> None:
    certificates = render(*KAFKA, "--set", "kafka.protocol=SSL,kafka.certificateSecret.name=user-{role}")
    for template in (*pods(strimzi).values(), *pods(certificates).values()):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.slow
def test_names_of_jobs_change_with_their_pods_and_with_nothing_else() -> None:
    def names(*arguments: str) -> list[str]:
        made = documents(render(*KAFKA, *arguments))
        return [one["metadata"]["name"] for one in made if one["kind"] == "Job"]

    before = names()
    assert names("--set", "stopped=true", "--set", "exporter.everySeconds=9") == before
    assert not set(names("--set", "image.tag=next")) & set(before)
    changed = set(names("--set", "roles.trainer.resources.limits.memory=32Gi")) - set(before)
    assert [name.rpartition("-")[0] for name in changed] == [f"{RELEASE}-trainer"]


@pytest.mark.slow
def test_names_of_jobs_change_with_their_policy(tmp_path: Path) -> None:
    """A later chart's: Kubernetes does not let the one of a Job that is there be changed."""
    later = shutil.copytree(CHART, tmp_path / "later")
    template = later / "templates" / "single.yaml"
    text = template.read_text()
    assert "values: [5, 75]" in text
    template.write_text(text.replace("values: [5, 75]", "values: [5, 75, 76]"))
    made = helm("template", RELEASE, str(later), "--set-file", f"runFile={ARITHMETIC}", *KAFKA,
                "--kube-version", kubernetes_versions()[0])  # fmt: skip
    names = [{one["metadata"]["name"] for one in documents(text) if one["kind"] == "Job"}
             for text in (render(*KAFKA), made.stdout)]  # fmt: skip
    assert len(names[0]) == len(names[1]) == 4 and not names[0] & names[1]


def test_a_stopped_release_has_no_workers() -> None:
    found = documents(render(*KEDA, "--set", "stopped=true"))
    assert all(one["spec"]["suspend"] for one in found if one["kind"] == "Job")
    scaled = [one for one in found if one["kind"] == "ScaledObject"]
    assert {one["metadata"]["annotations"]["autoscaling.keda.sh/paused-replicas"] for one in scaled} == {"0"}
    workers = [one for one in found if one["kind"] == "Deployment" and not one["metadata"]["name"].endswith("exporter")]
    assert [one["spec"]["replicas"] for one in workers] == [0, 0]


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("values", ["kafka", "strimzi"])
def test_the_environment_makes_settings_that_reach_kafka(
    values: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of each container with rftstream in it: who it is to Kafka, and by which key."""
    seen = set()
    for component, template in pods(render("--values", str(EXAMPLES / f"{values}.yaml"))).items():
        for container in containers(template):
            user = {"run": "operator", "wait": "reader", "exporter": "reader"}.get(container["name"], component)
            with monkeypatch.context() as patch:
                for name, value in variables(container).items():
                    if name != "HOME":
                        patch.setenv(name, value)
                given = {one["name"]: one["valueFrom"]["secretKeyRef"]
                         for one in container["env"] if "valueFrom" in one}  # fmt: skip
                for name in given:
                    patch.setenv(name, "hunter2")
                config = load([ARITHMETIC])
                options = config.transport.options
                patch.setitem(options, "ssl_cafile", None)
                as_whom = None if user in ("operator", "reader") else user
                transport = open_transport(config, RunFolder(tmp_path / "arithmetic"), user=as_whom)
                reached = transport._clients._options  # type: ignore[attr-defined]
                transport.close()
            assert config.transport.kind == "kafka" and config.run.folder == "/runs"
            assert config.weights.store == "s3://models/{run}" and options["replication_factor"] == 3
            assert reached["sasl_plain_password"] == "hunter2"
            assert reached["security_protocol"] == "SASL_SSL" and reached["sasl_mechanism"] == "SCRAM-SHA-512"
            named = {"kafka": f"rft-{user}", "strimzi": f"{RELEASE}-{user}"}[values]
            assert reached["sasl_plain_username"] == named
            assert given["KAFKA_PASSWORD"] == {
                "kafka": {"name": "kafka-users", "key": user}, "strimzi": {"name": named, "key": "password"},
            }[values]  # fmt: skip
            seen.add(user)
    assert seen >= {"operator", "reader", "feeder", "trainer", "explorer"}


@pytest.mark.slow
def test_no_secret_stands_in_what_is_made() -> None:
    for values in ("kafka", "strimzi", "gpu"):
        for template in pods(render("--values", str(EXAMPLES / f"{values}.yaml"), *KAFKA)).values():
            for container in containers(template):
                for name, value in variables(container).items():
                    assert not secrets._IS_SECRET_VARIABLE.search(name) or value == "env:KAFKA_PASSWORD"
    assert "kind: Secret\n" not in render(*STRIMZI)


def test_the_schema_knows_the_names_of_secrets_as_the_code_does() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = schema["definitions"]["env"]["propertyNames"]["not"]["pattern"]
    assert refused == f"(?i)^RFTSTREAM__|{secrets._IS_SECRET_VARIABLE.pattern}"
    template = (CHART / "templates" / "_run.tpl").read_text()
    assert f'"{secrets._IS_SECRET.pattern.removesuffix("$")}"' in template


def test_numbers_that_a_run_file_leaves_out_are_the_codes() -> None:
    template = (CHART / "templates" / "_run.tpl").read_text()
    found = dict(re.findall(r'\(dig "(\w+" "\w+)" "?(\w+)"? \$toml', template))
    assert found == {
        'transport" "partitions': str(TransportSection().partitions),
        'explorer" "max_concurrent': str(ExplorerSection().max_concurrent),
        'verifier" "max_concurrent': str(VerifierSection().max_concurrent),
        'synthesiser" "read': SynthesiserSection().read,
    }


def test_files_lie_beside_the_run_file_in_every_pod(plain: str) -> None:
    made = render(*KAFKA, "--set", r"files.rewards\.py=x = 1")
    for template in pods(made).values():
        for container in containers(template):
            mounts = {one["mountPath"]: one.get("subPath") for one in container["volumeMounts"]}
            assert mounts["/work/run.toml"] == "run.toml" and mounts["/work/rewards.py"] == "rewards.py"
    written = by_name(plain)[f"ConfigMap {RELEASE}"]["data"]["run.toml"]
    assert written.strip() == ARITHMETIC.read_text().strip()


@pytest.mark.slow
def test_two_releases_of_one_run_share_one_object_that_helm_refuses_to_the_second(plain: str, tmp_path: Path) -> None:
    def marks(text: str) -> set[str]:
        return {name for name in by_name(text) if name.startswith("ConfigMap rftstream-run-")}

    other = tmp_path / "other.toml"
    other.write_text(ARITHMETIC.read_text().replace('name = "arithmetic"', 'name = "another_run"'))
    second = render(*KAFKA, release="second")
    assert by_name(plain).keys() & by_name(second).keys() == marks(plain) == marks(second) != set()
    assert len(marks(plain)) == 1 and not marks(plain) & marks(render(*KAFKA, run_file=other))


# ------------------------------------------------------------------------------------------------ rights


def granted(text: str) -> set[tuple[str, str, str, bool, str]]:
    """What KafkaUsers may, as `topics acls` has it."""
    found = set()
    for document in documents(text):
        if document["kind"] != "KafkaUser":
            continue
        for rule in document["spec"]["authorization"]["acls"]:
            resource = rule["resource"]
            kind = resource["type"].replace("transactionalId", "transactional-id")
            name, prefixed = resource.get("name", "kafka-cluster"), resource.get("patternType") == "prefix"
            user = f"User:{document['metadata']['name']}"
            found |= {(user, kind, name, prefixed, operation) for operation in rule["operations"]}
    return found


def needed(config: RunConfig, folder: RunFolder) -> set[tuple[str, str, str, bool, str]]:
    grants = needed_access(config, folder, prefix=f"{RELEASE}-").all_grants()
    return {(one.principal, one.resource.value, one.name, one.prefixed, one.operation.value) for one in grants}


def test_users_may_what_their_roles_need_and_no_more(strimzi: str) -> None:
    assert granted(strimzi) == needed(load([ARITHMETIC]), RunFolder(Path("arithmetic")))


@pytest.mark.parametrize("read", ["outcomes", "verified", "tasks", "problems"])
def test_a_synthesiser_may_read_what_its_run_file_says(read: str, synthesis: Path) -> None:
    synthesis.write_text(SYNTHESIS.replace('read = "verified"', f'read = "{read}"'))
    assert granted(render(*STRIMZI, run_file=synthesis)) == needed(load([synthesis]), RunFolder(Path("more")))


def test_a_cluster_has_the_settings_of_the_tested_broker(strimzi: str, compose: dict[str, Any]) -> None:
    config = by_name(strimzi)["Kafka kafka"]["spec"]["kafka"]["config"]
    of_compose = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for name, value in compose["services"]["kafka"]["environment"].items() if name.startswith("KAFKA_")
    }  # fmt: skip
    for name, value in config.items():
        if not name.endswith((".factor", ".replicas", ".isr")):
            assert str(value).lower() == of_compose[name], name
    assert config["min.insync.replicas"] == 2 and config["default.replication.factor"] == 3


# ------------------------------------------------------------------------------------------------ scaling


def scaled() -> dict[str, dict[str, Any]]:
    """Role -> the spec of its ScaledObject."""
    return {
        one["metadata"]["name"].removeprefix(f"{RELEASE}-"): one["spec"]
        for one in documents(render(*KEDA)) if one["kind"] == "ScaledObject"
    }  # fmt: skip


def backlog_of(num: int) -> Balance:
    pending = Counter({"to_be_sampled": num, "sampled": num})
    return Balance(admitted=2 * num, pending_by_stage=pending, trained=0, expired=0, filtered=0, dead=0)


def test_only_roles_whose_backlog_is_known_are_scaled() -> None:
    assert set(scaled()) == {one.role for one in scale_plan(load([ARITHMETIC]), backlog_of(0))}
    for role, spec in scaled().items():
        deployment = by_name(render(*KEDA))[f"Deployment {spec['scaleTargetRef']['name']}"]
        assert deployment["metadata"]["name"] == f"{RELEASE}-{role}"
        assert "replicas" not in deployment["spec"], "or each upgrade would set them back"


@each("backlog", [0, 1, 511, 512, 513, 1024, 1025, 5000, 100_000])
def test_the_autoscaler_wants_what_scale_plan_says(backlog: int) -> None:
    made = scaled()
    for one in scale_plan(load([ARITHMETIC]), backlog_of(backlog)):
        spec = made[one.role]
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "prometheus" and trigger["metricType"] == "AverageValue"
        wanted = math.ceil(backlog / int(trigger["metadata"]["threshold"]))
        assert min(one.most, max(spec["minReplicaCount"], wanted)) == one.wanted
        assert spec["minReplicaCount"] <= spec["maxReplicaCount"] <= one.most


def test_queries_are_of_metrics_that_there_are() -> None:
    labels = {one.name: one.labels for one in EXPORTED}
    for role, spec in scaled().items():
        (trigger,) = spec["triggers"]
        found = re.fullmatch(r"max\((\w+)\{(.+)\}\)", trigger["metadata"]["query"])
        assert found is not None
        chosen = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
        assert set(chosen) == set(labels[found[1]])
        assert chosen == {"run": load([ARITHMETIC]).run.name, "role": role}


# ------------------------------------------------------------------------------------------------ docs


def test_the_docs_name_every_value() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    table = told.partition("\n## Values\n")[2].partition("\n## ")[0]
    named = {name for row in table.splitlines() if row.startswith("| `")
             for name in re.findall(r"`(\w+)`", row.split("|")[1])}  # fmt: skip
    assert named == set(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_the_docs_say_which_versions_were_tried() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(FOLDER.parents[1] / "scripts" / "kubernetes"))
    for name in ("HELM", "KEDA", "STRIMZI"):
        assert script[name].removeprefix("v") in told, name
    oldest, newest = (version.removesuffix(".0") for version in script["KUBERNETES"])
    assert f"{oldest} and {newest}" in told
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={oldest}.0-0"
