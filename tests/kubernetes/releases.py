"""A release of the chart on a cluster, in a namespace of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from tests.deploy.chart import ARITHMETIC, KAFKA, RELEASE
from tests.kubernetes.cluster import KINDS, Cluster, Refused, until

SINGLE = ("buffer", "evaluator", "feeder", "trainer")


class Release:
    """`with Release(...)`: its namespace goes afterwards. Pods run where a kubelet of the namespace is."""

    def __init__(
        self, cluster: Cluster, namespace: str, volume: Path, *, run_file: Path = ARITHMETIC,
        report: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """`volume`: a folder to which the trainer's claim may be bound. `report`: what else is said where something
        does not come about."""
        self.cluster, self.namespace, self.run_file = cluster, namespace, run_file
        self.volume, self.report = volume, report

    def __enter__(self) -> Self:
        self.cluster.namespace(self.namespace)
        spec = {
            "capacity": {"storage": "20Gi"}, "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": self.namespace, "name": f"{RELEASE}-trainer"},
            "hostPath": {"path": str(self.volume)}, "persistentVolumeReclaimPolicy": "Retain",
        }  # fmt: skip
        body = {"metadata": {"name": self.namespace}, "spec": spec}
        self.cluster.ask("POST", self.cluster.path("persistentvolumes"), body)
        return self

    def __exit__(self, *_: object) -> None:
        """It takes a while: nobody waits for it."""
        self.cluster.ask("DELETE", f"/api/v1/namespaces/{self.namespace}")

    # ------------------------------------------------------------------------------------------ what helm does

    def chart(self, word: str, *words: str, name: str = RELEASE, values: tuple[str, ...] = KAFKA, **more: Any) -> str:
        """`install` or `upgrade`."""
        more |= {"namespace": self.namespace, "run_file": self.run_file}
        return self.cluster.chart(word, name, *values, *words, **more)

    def helm(self, *words: str, user: str = "") -> str:
        return self.cluster.helm(*words, "--namespace", self.namespace, user=user)

    # ------------------------------------------------------------------------------------------ what is there

    def get(self, kind: str, role: str = "") -> list[dict[str, Any]]:
        """Return the chart's objects of a kind but those that are to go."""
        labels = {"name": "rftstream", **({"component": role} if role else {})}
        found = self.cluster.get(kind, self.namespace, **labels)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def names(self, kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.get(kind)}

    def owned(self) -> Counter[str]:
        """Return how many objects of each kind there are."""
        return Counter({kind: len(found) for kind in KINDS if (found := self.get(kind))})

    def wanted(self) -> int:
        """Return how many pods there are to be."""
        jobs = [one for one in self.get("jobs") if not one["spec"]["suspend"]]
        return len(jobs) + sum(one["spec"]["replicas"] for one in self.get("deployments"))

    def pods(self, role: str = "") -> dict[str, dict[str, Any]]:
        """Those that have neither ended nor been told to leave, by name."""
        found = self.get("pods", role)
        return {one["metadata"]["name"]: one for one in found
                if one["status"].get("phase") not in ("Failed", "Succeeded")}  # fmt: skip

    def ready(self, role: str = "") -> dict[str, dict[str, Any]]:
        return {name: pod for name, pod in self.pods(role).items() if is_so(pod, "Ready")}

    def nodes(self) -> set[str]:
        """Return where pods are."""
        return {pod["spec"].get("nodeName", "") for pod in self.pods().values()}

    def job(self, role: str) -> dict[str, Any]:
        (job,) = self.get("jobs", role)
        return job

    def outcome(self, role: str) -> str:
        """Return `Complete`, `Failed: REASON: MESSAGE` or nothing as long as its Job goes on."""
        for kind in ("Complete", "Failed"):
            for one in self.job(role)["status"].get("conditions", ()):
                if one["type"] == kind and one["status"] == "True":
                    return kind if kind == "Complete" else f"{kind}: {one['reason']}: {one['message']}"
        return ""

    def failures(self) -> dict[str, int]:
        """Return how many the Jobs have counted, where there are any."""
        found = {role: int(self.job(role)["status"].get("failed", 0)) for role in SINGLE}
        return {role: count for role, count in found.items() if count}

    # ------------------------------------------------------------------------------------------ what is waited for

    def until(self, condition: Any, what: str) -> Any:
        return until(condition, what, lambda: f"{self.cluster.report(self.namespace)}\n{self.report()}")

    def successor(self, role: str, *before: str) -> None:
        """Wait until pods of a role are ready of which none has one of these names."""
        self.until(lambda: (found := self.ready(role)) and not found.keys() & set(before), f"another {role}")

    def is_up(self) -> bool:
        """Return whether all pods are ready, and no others are there."""
        return len(self.ready()) == len(self.pods()) == self.wanted()

    def comes_up(self) -> None:
        self.until(self.is_up, "all pods")

    # ------------------------------------------------------------------------------------------ what is done to it

    def close(self, node: str, is_closed: bool = True) -> None:
        """`kubectl cordon`, or `uncordon`."""
        self.cluster.ask("PATCH", self.cluster.path("nodes", name=node), {"spec": {"unschedulable": is_closed}})

    def evict(self, name: str) -> bool:
        """Ask that a pod be evicted; False if a budget forbids it for now."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        try:
            self.cluster.ask("POST", f"{self.path('pods', name)}/eviction", body)
        except Refused as error:
            if error.status not in (404, 429):
                raise
            return error.status == 404
        return True

    def drain(self, node: str) -> list[str]:
        """Close a node and evict its pods, as often as it takes. Return who they were, once they have left."""
        self.close(node)
        before = [name for name, pod in self.pods().items() if pod["spec"].get("nodeName") == node]
        left = set(before)

        def are_evicted() -> bool:
            left.difference_update([name for name in left if self.evict(name)])
            return not left

        self.until(are_evicted, "evictions")
        self.until(lambda: not self.pods().keys() & set(before), "the end of those who were evicted")
        return before

    def path(self, kind: str, name: str = "") -> str:
        return self.cluster.path(kind, self.namespace, name)


def is_so(found: dict[str, Any], condition: str) -> bool:
    """Return whether a condition of an object is true."""
    return any(one["type"] == condition and one["status"] == "True" for one in found["status"].get("conditions", ()))


def one(found: Iterable[str]) -> str:
    [name] = found
    return name
