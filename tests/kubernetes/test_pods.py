"""A run of the chart comes up in pods of the image `roles` on a real kubelet, under PodSecurity `restricted`."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.broker.starting import owner, start_broker, warm_up
from tests.e2e.workplace import FAKE, Workplace
from tests.kubernetes.node import Node
from tests.kubernetes.releases import SINGLE, Release
from tests.s3 import BUCKET, KEYS, S3Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * 3600), pytest.mark.broker]

RESOURCES = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}


def test_a_run_comes_up_in_pods(
    node: Node, place: Workplace, run_id: Callable[[], str], tmp_path: Path, say: list[str]
) -> None:
    name = run_id()
    image = node.engine.build("roles")
    node.load(image)
    servers = start_broker(tmp_path / "kafka", owner(), "--address", node.address)
    warm_up(servers)
    volume = node.folder / "claim"
    volume.mkdir(mode=0o777)
    volume.chmod(0o777)
    text = FAKE.replace('name = "tiny"', f'name = "{name}"').replace("steps = 6", "steps = 100000")
    file = place.write("run.toml", f"{text}[backends.fake]\nstep_s = 0.5\n")
    with (
        closing(S3Server(node.address)) as s3,
        Release(node.cluster, name, volume, run_file=file, report=lambda: logs(node, name)) as release,
    ):
        values = ("--values", str(place.write("values.yaml", yaml.safe_dump({
            "image": {"tag": "local-roles"}, "kafka": {"servers": servers, "replicationFactor": 1},
            "roles": {role: {"resources": RESOURCES} for role in ("explorer", "verifier", *SINGLE)},
            "exporter": {"resources": RESOURCES},
            "store": {"url": f"s3://{BUCKET}/{{run}}", "endpoint": s3.url},
            "secretEnv": {key: {"secret": "s3", "key": key} for key in KEYS},
        }))))  # fmt: skip
        secret = {key: base64.b64encode(value.encode()).decode() for key, value in KEYS.items()}
        release.cluster.ask("POST", release.path("secrets"), {"metadata": {"name": "s3"}, "data": secret})
        release.chart("install", values=values)
        release.comes_up()
        images = {pod["spec"]["containers"][0]["image"] for pod in release.ready().values()}
        assert images == {image}
        say.append(f"{release.wanted()} pods of the image `roles` on a real kubelet: all ready")


def logs(node: Node, namespace: str) -> str:
    """Return the ends of what the workers' containers wrote."""
    names = [pod["metadata"]["name"] for pod in node.cluster.get("pods", namespace)]
    return "\n".join(
        f"{name}: {node.call('logs', '--namespace', namespace, '--tail=8', name, check=False)}" for name in names
    )
