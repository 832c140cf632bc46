"""The chart's releases on a real API server: what it takes, what an upgrade may change, and who may do what."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deploy.chart import ARITHMETIC, CHART, KAFKA, RELEASE
from tests.deploy.test_helm import ACCEPTED, files
from tests.kubernetes.cluster import Cluster, Refused
from tests.kubernetes.releases import Release

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KEPT = {"persistentvolumeclaims", "kafkas", "kafkanodepools"}
"""What `helm uninstall` leaves."""
GROUP = "rbac.authorization.k8s.io"


@pytest.mark.parametrize("case", ACCEPTED)
def test_values_are_taken_under_restricted(case: str, release: Release, say: list[str]) -> None:
    """The server has no complaint, and takes each pod. KEDA's and the Prometheus operator's kinds are as they say."""
    release.chart("install", values=ACCEPTED[case])
    made, pods = release.owned(), release.admit_pods()
    release.helm("uninstall", RELEASE)
    assert release.owned().keys() == KEPT & made.keys()
    rest = ", ".join(sorted(release.owned())) or "nothing"
    say.append(f"{made.total()} objects, {pods} pods admitted; uninstall leaves {rest}")


def test_a_pod_that_asks_for_more_is_refused(release: Release) -> None:
    release.chart("install")
    spec = release.get("deployments")[0]["spec"]["template"]["spec"]
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Refused, match='violates PodSecurity \\\\"restricted'):
        release.cluster.ask("POST", release.path("pods"), {"metadata": {"name": "pod"}, "spec": spec})


def test_a_release_is_upgraded_stopped_rolled_back_and_installed_again(release: Release, say: list[str]) -> None:
    release.chart("install")
    first = release.names("jobs")
    release.chart("upgrade", "--set", "roles.explorer.replicas=4")
    scale = release.path("deployments", f"{RELEASE}-explorer/scale")
    assert release.names("jobs") == first and release.cluster.ask("GET", scale)["spec"]["replicas"] == 4
    release.chart("upgrade", "--set", "image.tag=next-cpu")
    assert len(release.names("jobs")) == len(first) and not release.names("jobs") & first
    for stopped in (True, False):
        release.chart("upgrade", "--set", f"stopped={str(stopped).lower()}")
        assert {job["spec"]["suspend"] for job in release.get("jobs")} == {stopped}
    release.helm("rollback", RELEASE, "3")
    images = {job["spec"]["template"]["spec"]["containers"][0]["image"] for job in release.get("jobs")}
    assert images == {"rftstream:next-cpu"}
    release.helm("rollback", RELEASE, "1")
    assert release.names("jobs") == first
    release.helm("uninstall", RELEASE)
    release.chart("install")
    assert release.names("jobs") == first
    say.append("another image gives four new Jobs in place of the old ones; the claim is taken up again")


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
