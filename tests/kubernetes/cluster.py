"""A real Kubernetes on this machine for tests: etcd, API server, controllers and scheduler, as processes on loopback.

A kubelet is another matter: `tests.kubernetes.node` is a real one, and `tests.kubernetes.kubelet` stands in for many.
"""

from __future__ import annotations

import re
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from tests.deploy.chart import CHART, tools
from tests.loopback import free_ports
from tests.surroundings import ROOT

PATIENCE_S = 600.0
"""Only a hang takes as long."""
KINDS = {
    "configmaps": "/api/v1", "persistentvolumeclaims": "/api/v1", "pods": "/api/v1", "secrets": "/api/v1",
    "serviceaccounts": "/api/v1", "services": "/api/v1", "deployments": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1", "jobs": "/apis/batch/v1", "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1", "scaledobjects": "/apis/keda.sh/v1alpha1",
    "podmonitors": "/apis/monitoring.coreos.com/v1", "kafkausers": "/apis/kafka.strimzi.io/v1",
    "kafkas": "/apis/kafka.strimzi.io/v1", "kafkanodepools": "/apis/kafka.strimzi.io/v1",
}  # fmt: skip
"""Of the chart, and what controllers make of it."""
OTHERS = {"events": "/api/v1", "nodes": "/api/v1", "persistentvolumes": "/api/v1"}
STRIMZI = {"kafkas": "Kafka", "kafkanodepools": "KafkaNodePool", "kafkausers": "KafkaUser"}
"""Strimzi's CRDs are in no registry of packages. The server knows its kinds; what is in them its models judge
(tests/deploy/test_helm.py)."""
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
WARNED = re.compile(r"^W\d{4} |warning", re.IGNORECASE | re.MULTILINE)
_Told = TypeVar("_Told")


class Refused(Exception):
    """What the API server did not do, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def until(condition: Callable[[], _Told], what: str, report: Callable[[], object] = str) -> _Told:
    """Return what a condition is at last."""
    deadline = time.monotonic() + PATIENCE_S
    while not (told := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}\n{report()}"
        time.sleep(0.2)
    return told


class Cluster:
    """One whose servers run. `running` makes it."""

    def __init__(self, folder: Path, url: str, token: str) -> None:
        self.folder, self.url = folder, url
        self.config = folder / "kubeconfig"
        self.config.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url, "certificate-authority": f"{folder}/server.crt"}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
        }))  # fmt: skip
        self.config.chmod(0o600)
        trusted = ssl.create_default_context(cafile=folder / "server.crt")
        self._client = httpx.Client(
            base_url=url, verify=trusted, headers={"Authorization": f"Bearer {token}"}, timeout=60.0, trust_env=False
        )

    def ask(self, method: str, path: str, body: object = None, *, form: str = "merge-patch", user: str = "") -> Any:
        """Ask the API server, as somebody else if a user is given. Refused says what it says."""
        headers = {"Content-Type": f"application/{form}+json" if method == "PATCH" else "application/json"}
        if user:
            headers["Impersonate-User"] = user
        response = self._client.request(method, path, json=body, headers=headers)
        if response.status_code >= 400:
            raise Refused(response.status_code, response.text)
        return response.json() if "json" in response.headers["Content-Type"] else response.text

    def path(self, kind: str, namespace: str = "", name: str = "") -> str:
        parts = ((KINDS | OTHERS)[kind], f"namespaces/{namespace}" if namespace else "", kind, name)
        return "/".join(part for part in parts if part)

    def get(self, kind: str, namespace: str = "", **labels: str) -> list[dict[str, Any]]:
        """Return the objects with these labels of the chart: `component="trainer"`."""
        chosen = ",".join(f"app.kubernetes.io/{name}={value}" for name, value in labels.items())
        found = self.ask("GET", f"{self.path(kind, namespace)}?labelSelector={chosen}")["items"]
        assert isinstance(found, list)
        return found

    def namespace(self, name: str) -> None:
        """Make one that takes no pods but those under PodSecurity `restricted`."""
        body = {"metadata": {"name": name, "labels": RESTRICTED}}
        self.ask("POST", "/api/v1/namespaces", body)
        until(lambda: self.get("serviceaccounts", name), "its default service account")

    def helm(self, *words: str, user: str = "") -> str:
        """Return what helm prints. AssertionError if it fails, or if the server warned of something."""
        done = self.try_helm(*words, user=user)
        assert done.returncode == 0 and not WARNED.search(done.stderr), done.stderr
        return done.stdout

    def try_helm(self, *words: str, user: str = "") -> subprocess.CompletedProcess[str]:
        whom = ("--kube-as-user", user) if user else ()
        command = [tools()[0] / "helm", "--kubeconfig", self.config, *whom, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    def chart(
        self, word: str, release: str, *words: str, namespace: str, run_file: Path, chart: Path = CHART, user: str = ""
    ) -> str:
        """`helm install` or `helm upgrade` of the chart."""
        place = (release, str(chart), "--namespace", namespace)
        return self.helm(word, *place, "--set-file", f"runFile={run_file}", *words, user=user)

    def report(self, namespace: str) -> str:
        """Return what happened in a namespace, and the ends of the servers' logs."""
        lines = [f"{one['involvedObject']['name']}: {one['reason']}: {one['message']}"
                 for one in self.get("events", namespace)]  # fmt: skip
        return "\n".join([*lines[-60:], logs_of(self.folder)])


def logs_of(folder: Path) -> str:
    """Return the ends of the servers' logs."""
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))


def programs() -> tuple[dict[str, Path], Path]:
    """Return the programs by name, and where the CRDs are. The first time they are built."""
    script: list[str | Path] = [sys.executable, ROOT / "scripts" / "kubernetes", "servers"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *folders, crds = map(Path, done.stdout.splitlines())
    names = {folder: folder.name.partition("@")[0] for folder in folders}
    return {name: folder / name for folder, name in names.items()}, crds


@contextmanager
def running(folder: Path, address: str = "127.0.0.1") -> Iterator[Cluster]:
    """Have a cluster meanwhile, whose state is in a folder, and whose API server is at an address of this machine."""
    files, crds = programs()
    folder.mkdir(parents=True)
    store, peers, port, *others = free_ports(5)
    token, url, at_store = secrets.token_hex(16), f"https://{address}:{port}", f"http://127.0.0.1:{store}"
    key, certificate = folder / "server.key", folder / "server.crt"
    (folder / "tokens.csv").write_text(f'{token},admin,1,"system:masters"\n')
    openssl = ("openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2", "-subj", f"/CN={address}")
    names = ("-addext", f"subjectAltName=IP:{address}", "-keyout", key, "-out", certificate)
    subprocess.run([*openssl, *names], check=True, capture_output=True)
    cluster = Cluster(folder, url, token)
    commands: dict[str, tuple[str, ...]] = {
        "server": (
            f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-client-urls={at_store}",
            f"--advertise-client-urls={at_store}", f"--listen-peer-urls=http://127.0.0.1:{peers}",
        ),
        "kube-apiserver": (
            f"--etcd-servers={at_store}", f"--bind-address={address}", f"--secure-port={port}",
            f"--advertise-address={address}", "--endpoint-reconciler-type=none", f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}", f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", "--service-cluster-ip-range=10.96.0.0/16",
            "--kubelet-preferred-address-types=InternalIP", "--default-unreachable-toleration-seconds=5",
            "--default-not-ready-toleration-seconds=300",
        ),
        "kube-controller-manager": (
            f"--kubeconfig={cluster.config}", "--bind-address=127.0.0.1", f"--secure-port={others[0]}",
            f"--cert-dir={folder}", "--leader-elect=false", f"--root-ca-file={certificate}",
            f"--service-account-private-key-file={key}", "--node-monitor-grace-period=20s",
        ),
        "kube-scheduler": (
            f"--kubeconfig={cluster.config}", "--bind-address=127.0.0.1", f"--secure-port={others[1]}",
            "--leader-elect=false",
        ),
    }  # fmt: skip
    answers = {"server": f"{at_store}/health", "kube-apiserver": "/readyz"}
    with ExitStack() as stack:
        stack.callback(cluster._client.close)
        for name, options in commands.items():
            process = stack.enter_context(_server(files[name], options, folder / f"{name}.log"))
            if name in answers:  # the next one gives up on it after a while
                until(lambda name=name, process=process: _answers(cluster, answers[name], process), name,
                      lambda: logs_of(folder))  # fmt: skip
        for path in crds.iterdir():
            cluster.ask("POST", DEFINITIONS, yaml.load(path.read_text(), yaml.CSafeLoader))
        for plural, kind in STRIMZI.items():
            cluster.ask("POST", DEFINITIONS, _permissive(plural, kind))
        until(lambda: all(_is_known(cluster, kind) for kind in KINDS), "the CRDs")
        yield cluster


DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def _permissive(plural: str, kind: str) -> dict[str, Any]:
    """Return a definition of one of Strimzi's kinds that takes everything."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    group = "kafka.strimzi.io"
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }  # fmt: skip


def _answers(cluster: Cluster, path: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, logs_of(cluster.folder)
    with suppress(httpx.HTTPError, Refused):
        cluster.ask("GET", path)
        return True
    return False


def _is_known(cluster: Cluster, kind: str) -> bool:
    with suppress(Refused):
        cluster.get(kind)
        return True
    return False


@contextmanager
def _server(program: Path, options: tuple[str, ...], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *options], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
