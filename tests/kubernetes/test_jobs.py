"""What Kubernetes' controllers make of the ends of the chart's pods: exit codes, drained and lost nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import SINGLE, Release, one

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_jobs_take_exit_codes_as_they_are_meant(
    release: Release, kubelet: Kubelet, orders: Path, say: list[str]
) -> None:
    release.chart("install")
    release.comes_up()

    before = {role: one(release.ready(role)) for role in SINGLE}
    for role, code in (("trainer", 1), ("evaluator", 3), ("feeder", 5)):
        (orders / role).write_text(str(code))
    kubelet.kill(before["buffer"])
    for role, name in before.items():
        release.successor(role, name)
    assert {role: kubelet.pods[name].exit_code for role, name in before.items()} == {
        "trainer": 1, "evaluator": 3, "feeder": 5, "buffer": 137,
    }  # fmt: skip
    counted = {"trainer": 1, "evaluator": 1, "buffer": 1}
    assert release.failures() == counted
    say.append("1, 3 and 137 are counted as failures, 5 is not; each time another pod came")

    told = one(release.ready("feeder"))
    release.cluster.ask("DELETE", release.path("pods", told))
    release.successor("feeder", told)
    assert kubelet.pods[told].exit_code == 75 and release.failures() == counted
    (orders / "explorer").write_text("2")
    release.until(
        lambda: sum(state["restartCount"] for state in one_pod(release, "explorer")["status"]["containerStatuses"]),
        "another start",
    )
    say.append("75 of a pod that was deleted is not; an explorer is started again, even after 2")

    for role, code in {"buffer": 2, "evaluator": 4, "trainer": 6}.items():
        (orders / role).write_text(str(code))
        ended = release.until(lambda role=role: release.outcome(role), f"the end of the {role}")
        assert ended.startswith("Failed: PodFailurePolicy: ") and f"exit code {code}" in ended
        assert release.pods(role) == {}
    say.append("2, 4 and 6 fail the Job at once")

    # What the chart's page says of a Job that has failed.
    failed = release.path("jobs", one(job["metadata"]["name"] for job in release.get("jobs", "trainer")))
    release.cluster.ask("DELETE", failed, {"propagationPolicy": "Background"})
    release.until(lambda: not release.get("jobs", "trainer"), "the end of the Job")
    release.chart("upgrade")
    release.successor("trainer")
    (orders / "trainer").write_text("0")
    assert release.until(lambda: release.outcome("trainer"), "the end of the run") == "Complete"
    assert release.pods("trainer") == {}
    say.append("a failed Job that is deleted is made anew by helm upgrade; 0 completes it")

    (orders / "finished").touch()
    release.cluster.ask("DELETE", release.path("pods", one(release.ready("feeder"))))
    ended = release.until(lambda: release.outcome("feeder"), "the end of the feeder")
    assert ended.startswith("Failed: PodFailurePolicy: ")
    say.append("a feeder that comes back to a run that has ended fails its Job, and begins no other one")


def one_pod(release: Release, role: str) -> dict[str, dict[str, list[dict[str, int]]]]:
    (pod,) = release.pods(role).values()
    return pod


def test_a_node_is_drained_and_the_other_one_is_lost(release: Release, kubelet: Kubelet, say: list[str]) -> None:
    first, second = kubelet.nodes
    release.close(second)
    protected = "roles.explorer.replicas=3,roles.trainer.protect="
    release.chart("install", "--set", f"{protected}true")
    release.comes_up()
    release.close(second, is_closed=False)
    release.close(first)
    trainer = one(release.ready("trainer"))
    release.until(lambda: budget(release, "explorer") == 1, "a budget")
    assert not release.evict(trainer), "its budget lets nobody evict it"
    explorers = list(release.ready("explorer"))
    assert [release.evict(name) for name in explorers[:2]] == [True, False], "one at a time"
    release.chart("upgrade", "--set", f"{protected}false")
    moved = release.drain(first)
    release.comes_up()
    assert release.nodes() == {second}
    assert trainer in moved and kubelet.pods[trainer].exit_code == 75 and release.failures() == {}
    say.append(f"{len(moved) + 1} pods of a drained node moved, explorers one at a time; no Job counts a failure")

    # Nobody says that the pods of a lost node have ended, so those of Jobs have no successors until somebody does.
    release.close(first, is_closed=False)
    before = release.ready()
    kubelet.power_off(second)
    release.until(lambda: not release.pods().keys() & before.keys(), "the cluster to notice")
    concurrent = ("explorer", "verifier", "exporter")
    release.until(lambda: all(release.ready(role) for role in concurrent), "successors")
    assert not any(release.ready(role) for role in SINGLE)
    [forced] = [name for name in before if "trainer" in name]
    release.cluster.ask("DELETE", release.path("pods", forced), {"gracePeriodSeconds": 0})
    assert release.cluster.ask("GET", release.path("pods", forced))["metadata"]["finalizers"], "its Job waits for it"
    path = release.cluster.path("nodes", name=second)
    taints = release.cluster.ask("GET", path)["spec"]["taints"]
    lost = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    release.cluster.ask("PATCH", path, {"spec": {"taints": [*taints, lost]}})
    release.comes_up()
    assert release.nodes() == {first} and release.failures() == {}
    say.append(
        "a lost node: pods of Deployments come up on the other one, those of Jobs once it is marked out of service"
    )


def budget(release: Release, role: str) -> int:
    [found] = release.get("poddisruptionbudgets", role)
    return int(found["status"].get("disruptionsAllowed", 0))
