"""A release of the chart on an API server, in a namespace of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.deploy.chart import ARITHMETIC, KAFKA, RELEASE
from tests.kubernetes.cluster import KINDS, Cluster


class Release:
    """What helm does with the chart there, and what is there then."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace, self.run_file = cluster, namespace, ARITHMETIC
        cluster.namespace(namespace)

    def chart(self, word: str, *words: str, name: str = RELEASE, values: tuple[str, ...] = KAFKA, **more: Any) -> str:
        """`install` or `upgrade`."""
        more |= {"namespace": self.namespace, "run_file": self.run_file}
        return self.cluster.chart(word, name, *values, *words, **more)

    def helm(self, *words: str, user: str = "") -> str:
        return self.cluster.helm(*words, "--namespace", self.namespace, user=user)

    def get(self, kind: str) -> list[dict[str, Any]]:
        """Return the chart's objects of a kind but those that are to go."""
        found = self.cluster.get(kind, self.namespace, name="rftstream")
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def names(self, kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.get(kind)}

    def path(self, kind: str, name: str = "") -> str:
        return self.cluster.path(kind, self.namespace, name)

    def owned(self) -> Counter[str]:
        """Return how many objects of each kind there are."""
        return Counter({kind: len(found) for kind in KINDS if (found := self.get(kind))})

    def admit_pods(self) -> int:
        """Have the server judge a pod of each Job and Deployment, which it does not keep. Return their number."""
        made = [*self.get("jobs"), *self.get("deployments")]
        for one in made:
            template = one["spec"]["template"]
            pod = {"metadata": {"name": "pod", "labels": template["metadata"]["labels"]}, "spec": template["spec"]}
            self.cluster.ask("POST", f"{self.path('pods')}?dryRun=All", pod)
        return len(made)
