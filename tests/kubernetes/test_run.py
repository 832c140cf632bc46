"""A whole run of the chart: Kubernetes' controllers over real workers, a real Kafka and an S3; and it balances."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import RELEASE
from tests.e2e.workplace import FAKE, Workplace
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import SINGLE, Release
from tests.moments import goes_on, moments
from tests.s3 import BUCKET, KEYS, S3Server

pytestmark = [
    pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.broker, pytest.mark.law("lost", "twice", "conservation"),
]  # fmt: skip


def test_a_run_is_killed_at_ten_moments_drained_and_upgraded(
    cluster: Cluster, place: Workplace, servers: str, s3: S3Server, run_id: Callable[[], str], tmp_path: Path,
    say: list[str],
) -> None:  # fmt: skip
    name = run_id()
    text = FAKE.replace('name = "tiny"', f'name = "{name}"').replace("steps = 6", "steps = 100000")
    file = place.write("run.toml", f"{text}[backends.fake]\nstep_s = 0.3\n[evaluations.sums]\nsource = 'arithmetic'\n")
    settings = {
        "kafka": {"servers": servers, "replicationFactor": 1}, "roles": {"explorer": {"replicas": 2}},
        "store": {"url": f"s3://{BUCKET}/{{run}}", "endpoint": s3.url},
        "secretEnv": {key: {"secret": "s3", "key": key} for key in KEYS},
    }  # fmt: skip
    values = ("--values", str(place.write("values.yaml", yaml.safe_dump(settings))))
    with (
        Release(cluster, name, tmp_path / "claim", run_file=file, report=lambda: pods.report()) as release,
        Workplace(tmp_path / "pods") as pods,
        Kubelet(release, pods) as kubelet,
    ):
        secret = {key: base64.b64encode(value.encode()).decode() for key, value in KEYS.items()}
        release.cluster.ask("POST", release.path("secrets"), {"metadata": {"name": "s3"}, "data": secret})
        release.close(kubelet.nodes[1])
        release.chart("install", values=values)
        release.comes_up()
        [config] = pods.folder.glob(f"*/runs/{name}/config.toml")  # of the feeder's pod
        view = pods.view(config.parent)
        deaths = []
        for role in moments(view, release.until, (*SINGLE, "explorer", "verifier"), "kubernetes"):
            victim, *_ = release.ready(role)
            codes = kubelet.pods[victim].exit_codes
            ends = len(codes)
            kubelet.kill(victim)
            release.until(lambda codes=codes, ends=ends: len(codes) > ends, f"the end of {victim}")
            assert codes[-1] == 137
            release.comes_up()
            deaths.append(role)
        goes_on(view, release.until)
        say.append(f"kill -9 of {', '.join(deaths)}: the run went on each time")

        failures = release.failures()
        release.close(kubelet.nodes[1], is_closed=False)
        moved = release.drain(kubelet.nodes[0])
        release.comes_up()
        goes_on(view, release.until)
        assert release.failures() == failures
        say.append(f"{len(moved)} pods of a drained node: no failure is counted, the run went on")

        release.chart("upgrade", "--set", "image.tag=next-cpu", values=values)
        goes_on(view, release.until)
        release.comes_up()
        goes_on(view, release.until)
        say.append("another image: new Jobs took the roles over")

        environment = {"RFTSTREAM__TRANSPORT__KIND": "kafka", "RFTSTREAM__TRANSPORT__SERVERS": servers}
        assert place.call("drain", file, env=environment).code == 0
        ended = {role: release.until(lambda role=role: release.outcome(role), f"the {role}'s end") for role in SINGLE}
        assert set(ended.values()) == {"Complete"}, ended
        final = release.volume / name / "final"
        assert list(final.iterdir())
        version = view.assert_nothing_lost().version
        release.helm("uninstall", RELEASE, "--wait")
        release.until(lambda: not kubelet.cluster.get("pods", name), "the end of all pods")
        assert list(final.iterdir())
        pods.assert_nobody_left()
        say.append(f"version {version}: four Jobs complete, audit balanced, no twins, final/ on the claim")
