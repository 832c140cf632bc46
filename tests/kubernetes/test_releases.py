"""The chart's releases on a real cluster: what it takes, what controllers make of it, and who may do what."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.deploy.chart import ARITHMETIC, CHART, KAFKA, RELEASE
from tests.deploy.test_helm import ACCEPTED, files
from tests.kubernetes.cluster import Cluster, Refused
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import Release

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KEPT = {"persistentvolumeclaims", "kafkas", "kafkanodepools"}
"""What `helm uninstall` leaves."""
GROUP = "rbac.authorization.k8s.io"


@pytest.mark.parametrize("case", ACCEPTED)
def test_values_are_taken_under_restricted(case: str, release: Release, say: list[str]) -> None:
    """The server has no complaint about an object, and its controllers may make each pod. No node takes them."""
    release.chart("install", values=ACCEPTED[case])
    release.until(lambda: len(release.pods()) == release.wanted(), "every pod")
    made = release.owned()
    release.helm("uninstall", RELEASE, "--wait")
    release.until(lambda: release.owned().keys() == KEPT & made.keys(), "the end of the rest")
    rest = ", ".join(sorted(release.owned())) or "nothing"
    say.append(f"{made.total()} objects, {made['pods']} of them pods; uninstall leaves {rest}")


def test_a_pod_that_asks_for_more_is_refused(release: Release) -> None:
    release.chart("install")
    spec = release.get("deployments")[0]["spec"]["template"]["spec"]
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Refused, match='violates PodSecurity \\\\"restricted'):
        release.cluster.ask("POST", release.path("pods"), {"metadata": {"name": "pod"}, "spec": spec})


def test_a_release_is_scaled_upgraded_stopped_rolled_back_and_installed_again(
    release: Release, kubelet: Kubelet, say: list[str]
) -> None:
    def come_up_as(tag: str) -> None:
        release.until(
            lambda: release.is_up() and {
                pod["spec"]["containers"][0]["image"] for pod in release.pods().values()
            } == {f"rftstream:{tag}"}, f"pods of {tag}",
        )  # fmt: skip

    release.chart("install")
    release.comes_up()
    first, pods = release.names("jobs"), release.ready()
    release.chart("upgrade", "--set", "roles.explorer.replicas=4")
    release.comes_up()
    assert len(release.ready("explorer")) == 4 and pods.keys() < release.ready().keys()
    say.append("scaled to 4 explorers: all other pods stayed")

    release.chart("upgrade", "--reuse-values", "--set", "image.tag=next-cpu")
    come_up_as("next-cpu")
    assert len(release.names("jobs")) == len(first) and not release.names("jobs") & first
    say.append("another image: four new Jobs in place of the old ones")

    release.chart("upgrade", "--reuse-values", "--set", "stopped=true")
    release.until(lambda: len(release.pods()) == 1 and release.ready("exporter"), "the end of all workers")
    release.chart("upgrade", "--reuse-values", "--set", "stopped=false")
    release.comes_up()
    assert release.failures() == {} and {kubelet.pods[name].exit_code for name in pods} <= {0, 75, None}
    say.append("stopped, and gone on with: no Job counts a failure")

    release.helm("rollback", RELEASE, "1")
    come_up_as("local-cpu")
    assert release.names("jobs") == first and len(release.ready("explorer")) == 1
    release.helm("uninstall", RELEASE, "--wait")
    release.until(lambda: release.owned() == Counter(persistentvolumeclaims=1), "the end of all but the claim")
    release.chart("install")
    release.comes_up()
    say.append("rolled back, removed but for the claim, and installed again on it")


def test_the_policy_of_jobs_may_change(release: Release, tmp_path: Path) -> None:
    """From one chart to a later one: the server lets nobody change the policy of a Job that is there."""
    release.chart("install")
    later = shutil.copytree(CHART, tmp_path / "later")
    template = later / "templates" / "single.yaml"
    template.write_text(template.read_text().replace("values: [5, 75]", "values: [5, 75, 76]"))
    release.chart("upgrade", chart=later)
    [name, *_] = release.names("jobs")
    with pytest.raises(Refused, match=r"podFailurePolicy: Invalid value.*field is immutable"):
        release.cluster.ask("PATCH", release.path("jobs", name), {"spec": {"podFailurePolicy": None}})


def test_a_second_release_of_a_run_is_refused(release: Release, tmp_path: Path) -> None:
    release.chart("install")
    with pytest.raises(AssertionError, match=f'must equal "second": current value is "{RELEASE}"'):
        release.chart("install", name="second")
    release.run_file = tmp_path / "other.toml"
    release.run_file.write_text(ARITHMETIC.read_text().replace('name = "arithmetic"', 'name = "other"'))
    release.chart("install", name="third")
    owners = {job["metadata"]["labels"]["app.kubernetes.io/instance"] for job in release.get("jobs")}
    assert owners == {RELEASE, "third"}


def test_an_autoscaler_is_not_undone_by_an_upgrade(release: Release) -> None:
    """What KEDA's does, by hand: it sets the scale of a Deployment."""
    values = (*files("keda"), *KAFKA)
    release.chart("install", values=values)
    scale = release.path("deployments", f"{RELEASE}-explorer/scale")
    release.cluster.ask("PATCH", scale, {"spec": {"replicas": 3}})
    release.chart("upgrade", "--set", "exporter.everySeconds=7", values=values)
    assert release.cluster.ask("GET", scale)["spec"]["replicas"] == 3


# ------------------------------------------------------------------------------------------------ rights


def rules(cluster: Cluster, user: str, namespace: str) -> list[str]:
    """Return what somebody may do in a namespace, as the server itself says, in some order."""
    review = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    found = cluster.ask("POST", review, {"spec": {"namespace": namespace}}, user=user)["status"]
    return sorted(map(str, found["resourceRules"]))


def test_pods_may_do_nothing_on_the_server(release: Release) -> None:
    """Their service account has the rights of any other one."""
    release.chart("install")
    account, other = (f"system:serviceaccount:{release.namespace}:{name}" for name in (RELEASE, "other"))
    assert rules(release.cluster, account, release.namespace) == rules(release.cluster, other, release.namespace)
    for kind in ("secrets", "pods", "configmaps"):
        with pytest.raises(Refused, match="forbidden"):
            release.cluster.ask("GET", release.path(kind), user=account)


def test_who_may_edit_a_namespace_may_install(release: Release) -> None:
    """By the rights of which Kubernetes makes its role `edit`, as long as no kind of an operator is asked for."""
    for part in ("edit", "view"):
        bindings = f"/apis/{GROUP}/v1/namespaces/{release.namespace}/rolebindings"
        release.cluster.ask("POST", bindings, {
            "metadata": {"name": part}, "subjects": [{"apiGroup": GROUP, "kind": "User", "name": "ada"}],
            "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": f"system:aggregate-to-{part}"},
        })  # fmt: skip
    with pytest.raises(AssertionError, match=r'"ada" cannot get resource "(podmonitors|scaledobjects)"'):
        release.chart("install", values=(*files("keda"), *KAFKA), user="ada")
    more = ("--set", "networkPolicy.enabled=true,roles.trainer.protect=true")
    release.helm("list", user="ada")
    release.chart("upgrade", "--install", *more, user="ada")
    release.chart("upgrade", *more, "--set", "image.tag=next-cpu", user="ada")
    release.helm("uninstall", RELEASE, user="ada")
