"""A node on which a real kubelet runs pods with containerd, inside an engine of `scripts/docker`.

Between the node's network and the machine's lies a cable: the API server listens at this end, and so may what pods are
to reach. Images are those that the engine has, once `Node.load` has taken them over. No policy of a network is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.containers.engine import Engine
from tests.kubernetes.cluster import Cluster, logs_of, running, until
from tests.kubernetes.releases import is_so
from tests.surroundings import ROOT

NAME = "node-1"
BASE, PAUSE = "python:3.12-slim", "pause:local"
INSIDE = "/run/node"
"""Where the node's files are, in the engine's file system."""
REAPER = 'trap "exit 0" TERM; while :; do sleep 3600 & wait; done'
"""What keeps a pod's namespaces, and reaps."""
KERNEL = {"kernel/panic": 10, "kernel/panic_on_oops": 1, "vm/overcommit_memory": 1}
"""What a kubelet sets, of the whole machine. It is shown these, and sets nothing."""
CONTAINERD = f"""
version = 2
root = "@STATE@/containerd"
state = "{INSIDE}/containerd"
[grpc]
address = "{INSIDE}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{INSIDE}/bin"
conf_dir = "{INSIDE}/network"
"""
BRIDGE = {
    "cniVersion": "1.0.0", "name": "pods", "plugins": [{
        "type": "bridge", "bridge": "pods", "isGateway": True, "ipMasq": True,
        "ipam": {
            "type": "host-local", "dataDir": f"{INSIDE}/addresses", "ranges": [[{"subnet": "10.88.0.0/16"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }],
}  # fmt: skip
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"}, "containerRuntimeEndpoint": f"unix://{INSIDE}/containerd.sock",
    "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "failCgroupV1": False,
    "failSwapOn": False, "evictionHard": {f"{one}.available": "0%" for one in ("memory", "nodefs", "imagefs")},
    "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
}  # fmt: skip
"""Its pods' own limits hold. Those of kinds of pods, and of all pods together, would be cgroups of the machine's."""


def programs() -> list[Path]:
    """Return the folders of kubelet, kubectl and the network's programs. The first time they are built."""
    script: list[str | Path] = [sys.executable, ROOT / "scripts" / "kubernetes", "node"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [*map(Path, done.stdout.splitlines())]


class Node:
    """`joined` makes it."""

    def __init__(self, engine: Engine, cluster: Cluster, address: str) -> None:
        """`address`: that of the machine, where pods find it."""
        self.engine, self.cluster, self.address = engine, cluster, address
        self.folder = engine.folder / "node"
        self.kubectl = programs()[1] / "kubectl"

    def load(self, *images: str) -> None:
        """Take images over from the engine."""
        pipe = f"docker save {' '.join(images)} | ctr -a {INSIDE}/containerd.sock -n k8s.io images import -"
        self.engine.inside("sh", "-c", pipe)

    def build(self, name: str, dockerfile: str, *files: Path) -> None:
        """Build an image of a Dockerfile and the files beside it, and take it over."""
        folder = self.folder / "images" / name.partition(":")[0]
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(dockerfile)
        for file in files:
            if file.name != "Dockerfile":
                shutil.copy(file, folder)
        self.engine.docker("build", "-t", name, str(folder))
        self.load(name)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Pods reach nobody meanwhile."""
        rule = ("FORWARD", "-i", "pods", "-j", "DROP")
        self.engine.inside("iptables", "-I", *rule)
        yield
        self.engine.inside("iptables", "-D", *rule)

    def call(self, *words: str, check: bool = True) -> str:
        """Return what kubectl prints."""
        command = [self.kubectl, f"--kubeconfig={self.cluster.config}", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def kill(self, pod: dict[str, Any], container: str) -> None:
        """Kill a container's processes as the kernel does: neither kubelet nor containerd is asked."""
        [number] = [one["containerID"].rpartition("/")[2] for one in pod["status"]["containerStatuses"]
                    if one["name"] == container]  # fmt: skip
        command = f"ctr -a {INSIDE}/containerd.sock -n k8s.io task kill --signal KILL --all {number}"
        self.engine.inside("sh", "-c", command)


@contextmanager
def joined(engine: Engine, folder: Path) -> Iterator[Node]:
    """Have a cluster whose state is in a folder, with a node that is ready, in an engine that runs."""
    number = os.getpid() % 250
    here, there = f"10.79.{number}.1", f"10.79.{number}.2"
    with ExitStack() as stack:
        _connect(engine, here, there)
        stack.callback(subprocess.run, ["ip", "link", "del", f"node{os.getpid()}"], capture_output=True)
        cluster = stack.enter_context(running(folder, here))
        node = Node(engine, cluster, here)
        _furnish(node)
        path = f"PATH={INSIDE}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        for name, options in (
            ("containerd", (f"--config={INSIDE}/containerd.toml",)),
            ("kubelet", (
                f"--config={INSIDE}/kubelet.yaml", f"--kubeconfig={INSIDE}/kubeconfig", f"--node-ip={there}",
                f"--hostname-override={NAME}", f"--root-dir={node.folder}/kubelet",
            )),
        ):  # fmt: skip
            stack.enter_context(_server(engine, node.folder / f"{name}.log", path, name, *options))
        until(
            lambda: any(is_so(one, "Ready") for one in cluster.get("nodes")), "a node that is ready",
            lambda: logs_of(node.folder),
        )  # fmt: skip
        node.build(PAUSE, f"FROM {BASE}\nCMD {json.dumps(['sh', '-c', REAPER])}\n")
        yield node


def _connect(engine: Engine, here: str, there: str) -> None:
    """Lay a cable into the engine's network, and let what comes from pods pass there."""
    name, pid = f"node{os.getpid()}", engine.root.parent.name
    for command in (
        f"ip link add {name} type veth peer name eth1 netns {pid}", f"ip addr add {here}/30 dev {name}",
        f"ip link set {name} up", f"nsenter -t {pid} -n ip addr add {there}/30 dev eth1",
        f"nsenter -t {pid} -n ip link set eth1 up",
    ):  # fmt: skip
        subprocess.run(command.split(), check=True, capture_output=True)
    engine.inside("iptables", "-P", "FORWARD", "ACCEPT")


def _furnish(node: Node) -> None:
    """Put programs and settings where the engine runs, and hide what a kubelet would set of the machine's kernel."""
    engine, cluster = node.engine, node.cluster
    inside = engine.root / INSIDE[1:]
    kubelet, _, network = programs()
    shutil.copytree(network, inside / "bin")
    shutil.copy(kubelet / "kubelet", inside / "bin")
    (inside / "network").mkdir()
    node.folder.mkdir()
    settings = yaml.safe_load(cluster.config.read_text())
    settings["clusters"][0]["cluster"]["certificate-authority"] = f"{INSIDE}/server.crt"
    shutil.copy(cluster.folder / "server.crt", inside)
    (inside / "kubeconfig").write_text(yaml.safe_dump(settings))
    (inside / "containerd.toml").write_text(CONTAINERD.replace("@STATE@", str(node.folder)))
    (inside / "network" / "10-pods.conflist").write_text(json.dumps(BRIDGE))
    (inside / "kubelet.yaml").write_text(json.dumps(KUBELET))
    for name, value in KERNEL.items():
        file = name.replace("/", "-")
        (inside / file).write_text(f"{value}\n")
        engine.inside("mount", "--bind", f"{INSIDE}/{file}", f"/proc/sys/{name}")


@contextmanager
def _server(engine: Engine, log: Path, path: str, name: str, *options: str) -> Iterator[None]:
    """Have a program run where the engine does. Its containers end with the engine."""
    command = ("env", path, "sh", "-c", f'echo $$ >{INSIDE}/{name}.pid; exec {name} "$@"', "sh", *options)
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["nsenter", "-t", engine.root.parent.name, "-m", "-n", "-p", *command],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield
    finally:
        engine.inside("sh", "-c", f"kill $(cat {INSIDE}/{name}.pid)", check=False)
        process.wait()
