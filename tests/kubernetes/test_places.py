"""Places as pods of a real kubelet: their limits, their network, what ends a rollout, and that nothing runs on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.environments.harbor.agent import HarborAgent, HarborConfig
from rftstream.environments.hosts.agents import AgentWork
from rftstream.environments.places.base import PlaceLimits, PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.kubernetes import KubernetesPlace, KubernetesPlaces
from rftstream.errors import ConfigError, HostedCodeError, HostError
from tests.kubernetes.cluster import until
from tests.kubernetes.node import BASE, Node
from tests.loopback import HttpServer
from tests.places import ASK, CONNECT, MANY, ends_what_takes_too_long, made_model, takes_commands_and_files
from tests.surroundings import ROOT
from tests.unit.data.test_harbor_tasks import EXAMPLES, task_at
from tests.unit.data.test_tasksets_sources import open_source
from tests.unit.environments.places.test_bubblewrap import program_of_another_processor

pytestmark = [pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(1800)]

NAMESPACE = "rftstream-places"
LIMITS = PlaceLimits(cpus=0.5, memory_mb=256, disk_mb=64)
IMAGES = {
    "foreign": "FROM scratch\nCOPY sh /bin/sh\n",
    "empty": "FROM scratch\nCOPY sh /no-shell\n",
    "other-user": f"FROM {BASE}\nUSER 1000\n",
    "find-token": (EXAMPLES / "find-token" / "environment" / "Dockerfile").read_text(),
}


@pytest.fixture(scope="module")
def kubectl(node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kubectl with the rights of deploy/places.yaml and no others."""
    node.call("apply", "-f", str(ROOT / "deploy" / "places.yaml"))
    until(lambda: node.cluster.get("serviceaccounts", NAMESPACE), "the namespace")
    node.load(BASE)
    folder = tmp_path_factory.mktemp("kubectl")
    (folder / "sh").write_bytes(program_of_another_processor())
    (folder / "sh").chmod(0o755)
    for name, dockerfile in IMAGES.items():
        node.build(f"{name}:local", dockerfile, folder / "sh", *(EXAMPLES / "find-token" / "environment").iterdir())
    program = folder / "kubectl"
    who = "--as=system:serviceaccount:rftstream:rftstream"
    program.write_text(f'#!/bin/sh\nexec {node.kubectl} --kubeconfig={node.cluster.config} {who} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def model() -> Iterator[HttpServer]:
    with made_model() as found:
        yield found


@pytest.fixture
def order(model: HttpServer) -> PlaceOrder:
    source = PlaceSource(image=BASE, build_timeout_s=240.0)
    return PlaceOrder(source=source, limits=LIMITS, model_url=f"{model.url}/v1", variables={"OF_ALL": "1"})


@pytest.fixture
def settings(node: Node, kubectl: str) -> Iterator[PlaceSettings]:
    """On a network that lets pods reach nobody, as one that keeps the NetworkPolicy does."""
    with node.cut():
        yield PlaceSettings(engine=kubectl, namespace=NAMESPACE)
    until(lambda: not pods(node), "the end of all places")


@pytest.fixture
async def place(settings: PlaceSettings, order: PlaceOrder) -> AsyncIterator[KubernetesPlace]:
    made = await KubernetesPlaces(settings).create(order)
    yield made
    await made.close()


def pods(node: Node) -> list[str]:
    return [one["metadata"]["name"] for one in node.cluster.get("pods", NAMESPACE)]


async def test_a_place_runs_commands_and_takes_and_gives_files(place: KubernetesPlace, tmp_path: Path) -> None:
    await takes_commands_and_files(place, tmp_path)
    ran = await place.run("id -u; echo $HOME", timeout_s=60, user="www-data", cwd="/usr")
    assert ran.output == "33\n/var/www\n"
    await ends_what_takes_too_long(place)


async def test_it_reaches_the_model_and_nothing_else(place: KubernetesPlace, node: Node) -> None:
    assert not place.has_called
    assert (await place.run(ASK, timeout_s=60)).output == "asked for /v1/x\n"
    assert place.has_called
    port = node.cluster.url.rpartition(":")[2]
    others = f"{CONNECT} {node.address} {port} & {CONNECT} 10.96.0.1 443 & {CONNECT} some.where 80; wait"
    ran = await place.run(others, timeout_s=120)
    assert (ran.output.count("TimeoutError"), ran.output.count("gaierror")) == (2, 1), ran.output
    assert (await place.run("ls /var/run/secrets", timeout_s=60)).exit_code == 2, "no account of the cluster's"


async def test_a_network_that_keeps_no_policy_is_refused(node: Node, kubectl: str, order: PlaceOrder) -> None:
    places = KubernetesPlaces(PlaceSettings(engine=kubectl, namespace=NAMESPACE))
    with pytest.raises(ConfigError, match="a pod reaches the cluster's API server although the NetworkPolicy"):
        await places.create(order)
    until(lambda: not pods(node), "the end of all places")
    place = await places.create(replace(order, has_internet=True))
    port = node.cluster.url.rpartition(":")[2]
    assert (await place.run(f"{CONNECT} {node.address} {port}", timeout_s=60)).exit_code == 0
    await place.close()


async def test_limits(place: KubernetesPlace) -> None:
    memory = await place.run("python3 -c 'x = bytearray(400 << 20)'", timeout_s=120)
    assert memory.exit_code == 137
    for command in (MANY, "true"):
        with pytest.raises(HostedCodeError, match=r"the place was ended: it wrote more than it may: .* limit of .*Mi"):
            await place.run(command, timeout_s=240)


async def use(place: KubernetesPlace) -> None:
    for _ in range(100):
        await place.run("sleep 2", timeout_s=60)


@pytest.mark.parametrize("how", ["place", "relay", "deleted"])
async def test_a_place_that_is_killed_is_lost(place: KubernetesPlace, node: Node, how: str) -> None:
    if how == "deleted":
        node.call("delete", "pod", "--namespace", NAMESPACE, place._name, "--wait=false")
    else:
        [pod] = node.cluster.get("pods", NAMESPACE)
        node.kill(pod, how)
    with pytest.raises(HostError, match=r"the place has (ended|lost the model)|to the place was lost|not found"):
        await use(place)


async def begin(settings: PlaceSettings, order: PlaceOrder) -> None:
    """Make a place and try it: the cluster may show what ended at once as running before."""
    place = await KubernetesPlaces(settings).create(order)
    try:
        await place.run("true", timeout_s=60)
    finally:
        await place.close()


@pytest.mark.parametrize(
    ("image", "error"),
    [
        ("localhost:1/none:1", "the image localhost:1/none:1 cannot be pulled: .*ErrImagePull: .*connection refused"),
        ("foreign:local", "foreign:local is not for this cluster's processors: .*exec format error"),
        ("empty:local", "empty:local cannot be started: .*executable file not found"),
    ],
)
async def test_images_that_do_not_start(settings: PlaceSettings, order: PlaceOrder, image: str, error: str) -> None:
    with pytest.raises(HostedCodeError, match=f"(?s){error}"):
        await begin(settings, replace(order, source=PlaceSource(image=image)))


async def test_settings_that_the_cluster_refuses(settings: PlaceSettings, order: PlaceOrder) -> None:
    for changed, error in (
        (replace(settings, pod={"nodeSelect": {}}), r"environments.harbor.pod: .*unknown field .*nodeSelect"),
        (replace(settings, pod={"hostNetwork": True}), r"environments.harbor.namespace: .*violates PodSecurity"),
        (replace(settings, namespace="default"), r"environments.harbor.place: .*cannot list.* deploy/places.yaml"),
        (replace(settings, engine="/nowhere"), r"environments.harbor.engine: '/nowhere' cannot be run: .*install"),
    ):
        with pytest.raises(ConfigError, match=error):
            await KubernetesPlaces(changed).create(order)


async def test_tasks_of_harbor(settings: PlaceSettings, model: HttpServer, tmp_path: Path) -> None:
    agent = HarborAgent(HarborConfig(
        command=ASK, place="kubernetes", engine=settings.engine, namespace=NAMESPACE, memory_mb=256, cpus=0.5
    ))  # fmt: skip
    problem, other = [
        open_source(f"harbor:{folder}").problem(0) for folder in (
            task_at(tmp_path / image, toml=f'[environment]\ndocker_image = "{image}:local"')
            for image in ("find-token", "other-user")
        )
    ]  # fmt: skip
    solved = await agent.rehearse(problem)
    assert solved is not None and solved.reward == 1.0
    work = AgentWork(problem=problem, base_url=f"{model.url}/v1", api_key="key", seed=1, rollout_id="a/0", run_id="r")
    assert (await agent.run(work)).reward == 0.0
    with pytest.raises(HostedCodeError, match="the image begins as user 1000, expected root"):
        await agent.run(replace(work, problem=other))
    with pytest.raises(ConfigError, match=r"builds no images; build that of .*/environment/Dockerfile, push it"):
        await agent.rehearse(open_source(f"harbor:{EXAMPLES / 'find-token'}").problem(0))


OWNER = """
import asyncio, sys
from rftstream.environments.places.base import PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.kubernetes import KubernetesPlaces

async def main():
    order = PlaceOrder(source=PlaceSource(image="python:3.12-slim"), model_url="http://127.0.0.1:9/v1")
    place = await KubernetesPlaces(PlaceSettings(engine=sys.argv[1], namespace=sys.argv[2])).create(order)
    print("made", flush=True)
    await place.run("sleep 600", timeout_s=600)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_runs_on_when_its_owner_is_killed(
    node: Node, settings: PlaceSettings, end: signal.Signals
) -> None:
    """Without anybody who sweeps: the place ends with the connection of its owner. What is left is swept."""
    command = [sys.executable, "-c", OWNER, settings.engine, NAMESPACE]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout and owner.stdout.readline() == "made\n"
    os.kill(owner.pid, end)
    owner.wait()
    owner.stdout.close()

    def is_over() -> bool:
        [pod] = node.cluster.get("pods", NAMESPACE)
        return any("terminated" in one["state"] for one in pod["status"]["containerStatuses"] if one["name"] == "place")

    until(is_over, "the end of the place", lambda: json.dumps(node.cluster.get("pods", NAMESPACE)))
    await KubernetesPlaces(settings).sweep()
