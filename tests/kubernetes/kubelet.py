"""Stands in for the kubelets of a namespace's nodes: what a pod's containers run runs here, as processes.

Commands, variables, Secrets, ConfigMaps, volumes, readiness, exit codes, the time to leave and restarts are those of
the pods. There are no images, no limits and no networks of their own, who is to be started again is at once, and
nobody asks `/livez`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.workplace import Process, Workplace
from tests.kubernetes.cluster import Refused
from tests.kubernetes.releases import Release
from tests.loopback import free_ports

LEASE_S = 5.0
PORT = 9100


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Kubelet:
    """Of two nodes. `with Kubelet(...)`: they take the pods of a release's namespace meanwhile."""

    def __init__(self, release: Release, place: Workplace, *, program: Path | None = None) -> None:
        """`place` is for the pods alone. `program`: the folder of a `rftstream` that the test made. Without one it is
        the real one, and a pod is ready when `/readyz` says so."""
        self.cluster, self.place, self._namespace = release.cluster, place, release.namespace
        self.nodes = tuple(f"{release.namespace}-{number}" for number in (1, 2))
        self.asks = program is None
        self.path = f"{program or Path(sys.executable).parent}:{os.environ['PATH']}"
        self.down: set[str] = set()
        """Nodes whose power is off."""
        self.pods: dict[str, Pod] = {}
        """Those that were started, by name; what has gone stays here."""
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Kubelet:
        for name in self.nodes:
            self._join(name)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        for name in self.nodes:
            self.cluster.ask("DELETE", self.cluster.path("nodes", name=name))
        if self._failed is not None:
            raise self._failed

    def kill(self, name: str) -> None:
        """End a pod's container as the kernel does that has no more memory."""
        with self._lock:
            self.pods[name].kill()

    def power_off(self, node: str) -> None:
        with self._lock:
            self.down.add(node)
            for pod in self.pods.values():
                if pod.node == node:
                    pod.kill()

    # ------------------------------------------------------------------------------------------ nodes

    def _join(self, name: str) -> None:
        room = {"cpu": "64", "memory": "512Gi", "pods": "100"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
        nodes = self.cluster.path("nodes")
        self.cluster.ask("POST", nodes, {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.cluster.ask("PATCH", f"{nodes}/{name}/status", {"status": status})
        self._renew(name)

    def _renew_in_time(self) -> None:
        if time.monotonic() > self._renewed + LEASE_S:
            self._renewed = time.monotonic()
            for name in set(self.nodes) - self.down:
                self._renew(name)

    def _renew(self, name: str) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now()}
        try:
            self.cluster.ask("PATCH", f"{leases}/{name}", {"spec": spec})
        except Refused as error:
            if error.status != 404:
                raise
            self.cluster.ask("POST", leases, {"metadata": {"name": name}, "spec": spec})

    # ------------------------------------------------------------------------------------------ pods

    def _look(self, found: dict[str, Any]) -> None:
        node, name = found["spec"].get("nodeName"), found["metadata"]["name"]
        if node in self.nodes and node not in self.down:
            (self.pods.get(name) or self.pods.setdefault(name, Pod(self, found))).look(found)

    def _run(self) -> None:
        pods = self.cluster.path("pods", self._namespace)
        try:
            while not self._ending.wait(0.2):
                for found in self.cluster.ask("GET", pods)["items"]:
                    with self._lock:
                        self._look(found)
                    self._renew_in_time()
                self._renew_in_time()
        except (Refused, httpx.HTTPError) as error:
            self._failed = error


class Pod:
    """One whose containers run here, one after the other: the last one is the one that stays."""

    def __init__(self, kubelet: Kubelet, found: dict[str, Any]) -> None:
        self._kubelet, self._cluster = kubelet, kubelet.cluster
        self.node = found["spec"]["nodeName"]
        self.namespace, self.name = found["metadata"]["namespace"], found["metadata"]["name"]
        self.folder = kubelet.place.folder / self.name
        self.port = free_ports(1)[0]
        """In place of the one that containers listen on."""
        self.process: Process | None = None
        self._containers = [*found["spec"].get("initContainers", ()), *found["spec"]["containers"]]
        self._at = self._restarts = 0
        self.exit_codes: list[int] = []
        """Those of the container that stays."""
        self._ends: dict[str, dict[str, Any]] = {}
        """Container -> how it has ended, as its pod's status has it."""
        self._leaves_by: float | None = None
        self._is_over = self._answers = False
        self._asked_at = 0.0
        self._said: dict[str, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """That of the container that stays, at its last end."""
        return self.exit_codes[-1] if self.exit_codes else None

    def kill(self) -> None:
        if self.process is not None and self.process.alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.process.pid)
                for one in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()

    def look(self, found: dict[str, Any]) -> None:
        """Do what is to be done now, and tell the API server if something is new."""
        is_to_leave = "deletionTimestamp" in found["metadata"]
        if is_to_leave:
            self._leave(found["metadata"]["deletionGracePeriodSeconds"])
        if self.process is not None and not self.process.alive:
            self._ended(self.process.finish().code, found["spec"]["restartPolicy"])
        if self.process is None:
            self._is_over |= is_to_leave
            if not self._is_over:
                self._start(found["spec"])
        self._tell()
        if self._is_over and is_to_leave:
            with contextlib.suppress(Refused):
                self._cluster.ask("DELETE", self._path, {"gracePeriodSeconds": 0})

    def _leave(self, grace_s: float) -> None:
        if self._leaves_by is None:
            self._leaves_by = time.monotonic() + grace_s
            if self.process is not None and self.process.alive:
                self.process.send(signal.SIGTERM)
        elif time.monotonic() > self._leaves_by:
            self.kill()

    def _ended(self, code: int, restart: str) -> None:
        self.process = None
        code = code if code >= 0 else 128 - code
        end = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        self._ends[self._containers[self._at]["name"]] = end
        if self._is_main:
            self.exit_codes.append(code)
        if self._at < len(self._containers) - 1 and code == 0:
            self._at += 1
        elif restart == "Always":
            self._restarts += 1
        else:
            self._is_over = True

    @property
    def _path(self) -> str:
        return self._cluster.path("pods", self.namespace, self.name)

    # ------------------------------------------------------------------------------------------ what is told

    @property
    def _is_main(self) -> bool:
        """Whether the container that stays has its turn."""
        return self._at == len(self._containers) - 1

    def _is_ready(self) -> bool:
        if not self._is_main or self.process is None or self._leaves_by is not None:
            return False
        if not self._kubelet.asks:
            return True
        probe = self._containers[-1]["readinessProbe"]["httpGet"]["path"]
        if time.monotonic() > self._asked_at + 1:
            self._asked_at = time.monotonic()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{probe}", timeout=2).close()
            except OSError:
                self._answers = False
            else:
                self._answers = True
        return self._answers

    def _tell(self) -> None:
        ready = self._is_ready()
        phase = "Running" if self._is_main else "Pending"
        if self._is_over:
            phase = "Succeeded" if self.exit_code == 0 else "Failed"
        states = []
        for index, container in enumerate(self._containers):
            state: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}
            if index == self._at and self.process is not None:
                state = {"running": {}}
            elif container["name"] in self._ends:
                state = {"terminated": self._ends[container["name"]]}
            states.append({
                "name": container["name"], "image": container["image"], "imageID": "", "state": state,
                "ready": ready and index == self._at, "restartCount": self._restarts if index == self._at else 0,
            })  # fmt: skip
        word = "True" if ready else "False"
        status = {
            "phase": phase, "conditions": [{"type": kind, "status": word} for kind in ("Ready", "ContainersReady")],
            "initContainerStatuses": states[:-1], "containerStatuses": states[-1:],
        }  # fmt: skip
        if status != self._said:
            self._said = status
            with contextlib.suppress(Refused):
                self._cluster.ask("PATCH", f"{self._path}/status", {"status": status}, form="strategic-merge-patch")

    # ------------------------------------------------------------------------------------------ what runs

    def _start(self, spec: dict[str, Any]) -> None:
        """Start the container that is next. It waits for what it needs."""
        container = self._containers[self._at]
        try:
            places = self._mounted(spec, container)
            variables = self._variables(container)
        except Refused as error:
            if error.status != 404:
                raise
            return
        here = {**places, str(PORT): str(self.port)}
        ways = "|".join(re.escape(word) for word in sorted(here, key=len, reverse=True))

        def placed(text: str) -> str:
            return re.sub(rf"(?<![\w.])(?:{ways})(?!\w)", lambda word: here[word[0]], text)

        environment = {name: placed(value) for name, value in variables.items()}
        words = [*container.get("command", ["rftstream"]), *container.get("args", ())]
        environment["PATH"] = self._kubelet.path
        self.process = self._kubelet.place.start(command=[placed(word) for word in words], env=environment)

    def _variables(self, container: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            secret = self._read("secrets", source["secretRef"]["name"])
            found |= {name: base64.b64decode(value).decode() for name, value in secret.items()}
        for one in container["env"]:
            found[one["name"]] = one.get("value", "")
            if "valueFrom" in one:
                wanted = one["valueFrom"]["secretKeyRef"]
                found[one["name"]] = base64.b64decode(self._read("secrets", wanted["name"])[wanted["key"]]).decode()
        return found

    def _mounted(self, spec: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
        """Return where the container's paths are here."""
        sources = {volume["name"]: volume for volume in spec["volumes"]}
        places = {}
        for mount in container["volumeMounts"]:
            source = self.folder / mount["name"]
            volume = sources[mount["name"]]
            if "configMap" in volume:  # the same path in all pods
                source = self._kubelet.place.folder / "maps" / volume["configMap"]["name"]
            if "persistentVolumeClaim" in volume:
                claim = self._cluster.ask("GET", self._cluster.path(
                    "persistentvolumeclaims", self.namespace, volume["persistentVolumeClaim"]["claimName"]
                ))  # fmt: skip
                volumes = self._cluster.path("persistentvolumes", name=claim["spec"]["volumeName"])
                source = Path(self._cluster.ask("GET", volumes)["spec"]["hostPath"]["path"])
            source.mkdir(parents=True, exist_ok=True)
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                if kind in volume:
                    for name, text in self._read(f"{kind.lower()}s", volume[kind][key]).items():
                        data = base64.b64decode(text) if kind == "secret" else text.encode()
                        if not (source / name).exists() or (source / name).read_bytes() != data:
                            (source / name).write_bytes(data)
            places[mount["mountPath"]] = str(source / mount.get("subPath", ""))
        return places

    def _read(self, kind: str, name: str) -> dict[str, str]:
        found: dict[str, str] = self._cluster.ask("GET", self._cluster.path(kind, self.namespace, name)).get("data", {})
        return found
