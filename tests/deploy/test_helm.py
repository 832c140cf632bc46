"""deploy/helm: helm, kubeconform and the operators' models accept what it makes, and refuse planted mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.chart import (
    ARITHMETIC,
    CHART,
    FOLDER,
    KAFKA,
    RELEASE,
    SEPARATOR,
    SYNTHESIS,
    helm,
    kubeconform,
    kubernetes_versions,
    models,
    render,
    split,
    template,
    with_mistakes,
)

EXAMPLES = FOLDER / "examples"


def sets(*assignments: str) -> tuple[str, ...]:
    return tuple(word for assignment in assignments for word in ("--set", assignment))


def files(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--values", str(EXAMPLES / f"{name}.yaml")))


ACCEPTED: dict[str, tuple[str, ...]] = {
    "least": KAFKA,
    "kafka": files("kafka"),
    "strimzi": files("strimzi"),
    "keda": (*files("keda"), *KAFKA),
    "gpu": (*files("gpu"), *KAFKA),
    "all": files("strimzi", "keda", "gpu"),
    "stopped": (*files("keda"), *KAFKA, "--set", "stopped=true"),
    "certificates": (*KAFKA, *sets("kafka.protocol=SSL", "kafka.certificateSecret.name=user-{role}",
                                   "kafka.caSecret.name=ca")),
    "little": (*KAFKA, *sets("exporter.enabled=false", "storage.size=", "roles.explorer.replicas=0")),
    "more": (*KAFKA, *sets("env.MODE=fast", "files.rewards\\.py=x = 1", "keda.authentication=prom",
                           "secretEnvFrom={keys}")),
}  # fmt: skip
"""Arguments of helm."""


@pytest.fixture
def synthesis(tmp_path: Path) -> Path:
    """A run file with a synthesiser and without evaluations."""
    file = tmp_path / "more.toml"
    file.write_text(SYNTHESIS)
    return file


def test_examples_are_all_tried() -> None:
    tried = {Path(word).stem for case in ACCEPTED.values() for word in case if word.endswith(".yaml")}
    assert tried == {path.stem for path in EXAMPLES.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("version", kubernetes_versions())
def test_kubeconform_accepts_what_is_made(version: str) -> None:
    parts = [part for case, arguments in ACCEPTED.items()
             for part in split(render(*arguments, version=version, release=case))[0]]  # fmt: skip
    found = kubeconform(SEPARATOR.join(parts), version)
    assert len(found) == len(parts) > 100
    assert [one for one in found if one.refused] == []


@pytest.mark.slow
def test_kubeconform_accepts_a_run_with_a_synthesiser(synthesis: Path) -> None:
    version = kubernetes_versions()[-1]
    found = kubeconform(render(*KAFKA, run_file=synthesis), version)
    assert [one for one in found if one.refused] == []
    names = {one.name.rpartition("-")[0] if one.name.startswith("Job") else one.name for one in found}
    assert "Deployment sums-synthesiser" in names and "Job sums-evaluator" not in names


@pytest.mark.slow
@pytest.mark.parametrize("case", ["least", "all"])
def test_helm_lint_finds_nothing(case: str) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), "--kube-version", kubernetes_versions()[-1],
                "--set-file", f"runFile={ARITHMETIC}", *ACCEPTED[case])  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ planted mistakes

BY_HELM: dict[str, tuple[tuple[str, ...], str]] = {
    "a section misspelt": (sets("kafak.servers=x:1"), "additional properties 'kafak' not allowed"),
    "a key misspelt": (sets("kafka.server=x:1"), "at '/kafka': additional properties 'server' not allowed"),
    "a role misspelt": (sets("roles.explorers.replicas=2"), "at '/roles': additional properties 'explorers' not"),
    "replicas of a single role": (
        sets("roles.trainer.replicas=2"),
        "at '/roles/trainer': additional properties 'replicas' not allowed",
    ),
    "a text for a number": (sets("roles.explorer.replicas=many"), "/roles/explorer/replicas': got string, want int"),
    "a protocol that Kafka has not": (sets("kafka.protocol=TLS"), "at '/kafka/protocol': value must be one of"),
    "servers without a port": (sets("kafka.servers=kafka"), "at '/kafka/servers': 'kafka' does not match pattern"),
    "the newest image, whichever": (sets("image.tag=latest"), "at '/image/tag': 'not' failed"),
    "a store that pods do not share": (sets("store.url=file://weights"), "at '/store/url': 'file://weights' does not"),
    "a store for all runs": (sets("store.url=s3://models/all"), "at '/store/url': 's3://models/all' does not match"),
    "a secret in plain values": (
        sets("env.AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI"),
        "invalid propertyName 'AWS_SECRET_ACCESS_KEY'",
    ),
    "a password in an address": (
        sets("env.HTTPS_PROXY=http://me:word@proxy:8080"),
        "at '/env/HTTPS_PROXY': 'not' failed",
    ),
    "a setting that belongs to the run file": (
        sets("env.RFTSTREAM__TRANSPORT__PARTITIONS=4"),
        "invalid propertyName 'RFTSTREAM__TRANSPORT__PARTITIONS'",
    ),
    "a secret without a key": (
        sets("secretEnv.HF_TOKEN.secret=hub"),
        "at '/secretEnv/HF_TOKEN': missing property 'key'",
    ),
    "more explorers than partitions": (
        sets("roles.explorer.replicas=9"),
        "roles.explorer.replicas: 9, expected at most 8",
    ),
    "scaled above the partitions": (
        (*files("keda"), *sets("keda.verifier.max=9")),
        "keda.verifier.max: 9, expected at most 8",
    ),
    "a least above the most": (sets("keda.explorer.min=5"), "keda.explorer.min: 5, expected at most its max, 4"),
    "more than the most, where nothing is known": (
        sets("keda.fallbackReplicas=3"),
        "keda.fallbackReplicas: 3, expected at most keda.verifier.max, 2",
    ),
    "scaled by nobody's word": (sets("keda.enabled=true"), "keda.prometheus: empty"),
    "scaled by an exporter that is off": (
        (*files("keda"), *sets("exporter.enabled=false")),
        "keda.enabled: reads the exporter's metrics",
    ),
    "passwords for whom": (sets("kafka.protocol=SASL_SSL"), "kafka.protocol: SASL_SSL asks for a user"),
    "users that are never sent": (sets("kafka.username=me"), "kafka.protocol: PLAINTEXT knows no passwords"),
    "a cluster without users": (
        sets("strimzi.createCluster=true"),
        "strimzi.createCluster: its listener asks for users",
    ),
    "more copies than nodes": (
        (*files("strimzi"), *sets("strimzi.kafka.nodes=2")),
        "kafka.replicationFactor: 3, expected at most strimzi.kafka.nodes, 2",
    ),
}  # fmt: skip
"""Arguments of helm -> what it says."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BY_HELM)
def test_helm_refuses(mistake: str) -> None:
    arguments, said = BY_HELM[mistake]
    done = template(*KAFKA, *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert said in done.stderr


def test_helm_refuses_a_release_without_a_run_file() -> None:
    done = helm("template", RELEASE, str(CHART), "--kube-version", kubernetes_versions()[0], *KAFKA)
    assert done.returncode != 0 and "runFile: empty" in done.stderr


def test_helm_refuses_a_run_without_a_kafka() -> None:
    done = template()
    assert done.returncode != 0 and "kafka.servers: empty" in done.stderr


RUN_FILES: dict[str, tuple[str, str, str]] = {
    "no TOML": ("[run]", "[run", "runFile: no TOML"),
    "no name": ('name = "arithmetic"', "", 'runFile: run.name is ""'),
    "a name for no topic": ('name = "arithmetic"', 'name = "My Run"', 'runFile: run.name is "My Run"'),
    "a password": (
        "[transport]",
        '[transport]\noptions.sasl_plain_password = "hunter2"',
        "runFile: options.sasl_plain_password is a secret",
    ),
    "a key in a table of one line": (
        "[transport]",
        '[policies]\nopenai = { url = "http://x", api_key = "sk-1234" }\n[transport]',
        "is a secret, expected",
    ),
    "a second key in a line": (
        "[transport]",
        '[policies]\nopenai = { api_key = "env:KEY", auth_token = "sk-1234" }\n[transport]',
        "runFile: auth_token is a secret, expected",
    ),
    "fewer partitions than explorers": (
        "partitions = 8",
        "partitions = 2",
        "keda.explorer.max: 4, expected at most 2",
    ),
}
"""What is replaced in a run file that is good, and what helm says."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", RUN_FILES)
def test_helm_refuses_a_run_file_with(mistake: str, tmp_path: Path) -> None:
    good, bad, said = RUN_FILES[mistake]
    text = ARITHMETIC.read_text()
    assert good in text
    file = tmp_path / "run.toml"
    file.write_text(text.replace(good, bad))
    done = template(*KAFKA, run_file=file)
    assert done.returncode != 0 and said in done.stderr, done.stderr


def test_names_of_secrets_are_none(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    named = '[policies.openai]\napi_key = "env:SERVER_KEY"\n# password = "no setting"\n'
    file.write_text(ARITHMETIC.read_text() + named)
    render(*KAFKA, run_file=file)


BY_KUBECONFORM: dict[str, tuple[str, str, str]] = {
    "a field of pods misspelt": (
        "terminationGracePeriodSeconds",
        "terminationGracePeriod",
        "additional properties 'terminationGracePeriod' not allowed",
    ),
    "a budget of a list": ("maxUnavailable: 1\n  unhealthy", "maxUnavailable: [1]\n  unhealthy", "got array, want"),
    "a probe's number as text": ("failureThreshold: 90", 'failureThreshold: "90"', "got string, want null or integer"),
    "an action without a name": ("action: FailJob, ", "", "missing property 'action'"),
    "a variable that is a number": ('value: "3"', "value: 3", "got number, want null or string"),
    "a claim without a list": ("accessModes: [ReadWriteOnce]", "accessModes: ReadWriteOnce", "got string, want"),
    "a policy's port misspelt": ("protocol: TCP, port", "protocol: TCP, ports", "additional properties 'ports' not"),
    "a kind that there is not": ("kind: PodDisruptionBudget", "kind: PodBudget", "could not find schema for PodBudget"),
    "a field of KEDA misspelt": ("pollingInterval", "pollInterval", "additional properties 'pollInterval' not allowed"),
    "a trigger without a type": ("- type: prometheus\n      metricType", "- metricType", "missing property 'type'"),
    "a threshold as a number": ('threshold: "512"', "threshold: 512", "got number, want string"),
}  # fmt: skip
"""What is replaced in what helm made, and what kubeconform says."""


@pytest.fixture(scope="module")
def chart() -> tuple[list[str], list[str]]:
    """Everything that the chart can make."""
    return split(render(*files("strimzi", "keda", "gpu")))


@pytest.fixture(scope="module")
def conformed(chart: tuple[list[str], list[str]]) -> dict[str, str]:
    """Name of a mistake -> what kubeconform says."""
    text = with_mistakes(chart[0], [mistake[:2] for mistake in BY_KUBECONFORM.values()])
    judged = {one.name.partition(" ")[2]: one.refused for one in kubeconform(text, kubernetes_versions()[-1])}
    return {mistake: judged[f"mistake-{number}"] for number, mistake in enumerate(BY_KUBECONFORM)}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BY_KUBECONFORM)
def test_kubeconform_refuses(mistake: str, conformed: dict[str, str]) -> None:
    assert BY_KUBECONFORM[mistake][2] in conformed[mistake]


BY_MODELS: dict[str, tuple[str, str, str]] = {
    "a right misspelt": ('"Read"', '"Reed"', "acls[0].operations"),
    "a resource that Kafka has not": ("type: topic", "type: table", "'table' as a subtype"),
    "a field of a right misspelt": ("operations:", "operation_s:", "unknown field .spec.authorization.acls[]"),
    "a version that Strimzi has not": ("v1\nkind: Kafka\n", "v9\nkind: Kafka\n", "there is no model of"),
    "a listener's field misspelt": ("tls: true", "TLS: true", "unknown field .spec.kafka.listeners[].TLS"),
    "a port as a text": ("port: 9093", "port: secure", 'from String "secure"'),
    "an operator misspelt": ("userOperator", "usersOperator", "unknown field .spec.entityOperator.usersOperator"),
    "a role of nodes that there is not": ("[controller, broker]", "[zookeeper, broker]", "roles[0]"),
    "a monitor's field misspelt": ("honorLabels", "honourLabels", "unknown field .spec.podMetricsEndpoints[]"),
}
"""What is replaced in the first document that has it, and what its model says."""


@pytest.fixture(scope="module")
def modelled(chart: tuple[list[str], list[str]], made: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, str]:
    """Name of a document, as it is made or with a mistake -> why its model refuses it. Java is started once for all."""

    def judge(folder: Path) -> None:
        text = with_mistakes(chart[1], [mistake[:2] for mistake in BY_MODELS.values()])
        refused = {one.name.partition(" ")[2]: one.refused for one in models(text)}
        (folder / "refused.json").write_text(json.dumps(refused), encoding="utf-8")

    found: dict[str, str] = json.loads((made("helm-models", judge) / "refused.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_the_models_accept_what_is_made(modelled: dict[str, str], chart: tuple[list[str], list[str]]) -> None:
    found = {name: why for name, why in modelled.items() if "mistake-" not in name}
    assert len(found) == len(chart[1])
    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BY_MODELS)
def test_the_models_refuse(mistake: str, modelled: dict[str, str]) -> None:
    assert BY_MODELS[mistake][2] in modelled[f"mistake-{list(BY_MODELS).index(mistake)}"]
