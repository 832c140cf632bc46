"""Pods of places as Kubernetes' API has them: what is asked for, and what their statuses say."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rftstream.environments.places.base import PlaceOrder, PlaceSettings, last_lines
from rftstream.environments.places.engine import LABEL, WRONG_MACHINE, name_owner
from rftstream.errors import HostedCodeError, HostError

PLACE, RELAY_NAME, POLICY = "place", "relay", "rftstream-places"
NETWORK = "rftstream.network"
"""Label of pods: `none`, which the NetworkPolicy selects, or `internet`."""
KEEPER = "cat >/dev/null; exit 0"
"""First process of a place's container. The shell stays, and reaps what loses its parent."""
IMAGE_TROUBLES = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "SignatureValidationFailed",
)  # fmt: skip
START_TROUBLES = (
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError", "ContainerCannotRun",
)  # fmt: skip
TOO_MUCH_WRITTEN = re.compile(r"local ephemeral storage limit|ephemeral local storage usage exceeds")
"""Words of the kubelet for a pod above its own limit; other pods are evicted since their node is full."""


def describe_pod(name: str, order: PlaceOrder, settings: PlaceSettings) -> dict[str, Any]:
    """Return the pod of a place as the API server takes it."""
    limits, life_s = order.limits, order.limits.life_s + order.source.build_timeout_s
    containers: list[dict[str, Any]] = [
        {
            "name": PLACE,
            "image": order.source.image,
            "command": ["sh", "-c", KEEPER],
            "stdin": True,
            "stdinOnce": True,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {
                "limits": {
                    "cpu": f"{round(limits.cpus * 1000)}m",
                    "memory": f"{limits.memory_mb}Mi",
                    "ephemeral-storage": f"{limits.disk_mb}Mi",
                }
            },
            "securityContext": {"capabilities": {"drop": ["NET_RAW", "MKNOD"]}},
        }
    ]
    if order.model_url:
        containers.append(_describe_relay(settings, life_s))
    spec = {
        "containers": containers,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": math.ceil(life_s),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    if not order.has_internet:  # so that a name fails at once
        spec |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {LABEL: "", NETWORK: "internet" if order.has_internet else "none"},
            "annotations": {
                LABEL: name_owner(life_s),
                **{f"rftstream.{key}": value for key, value in order.labels.items()},
            },
        },
        "spec": {**spec, **settings.pod},
    }


def _describe_relay(settings: PlaceSettings, life_s: float) -> dict[str, Any]:
    return {
        "name": RELAY_NAME,
        "image": settings.relay_image,
        "command": ["sleep", str(math.ceil(life_s))],
        "resources": {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"memory": "256Mi", "ephemeral-storage": "16Mi"},
        },
        "securityContext": {
            "runAsUser": 65534,
            "runAsGroup": 65534,
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def describe_policy() -> dict[str, Any]:
    """Return the NetworkPolicy that forbids places without internet every connection, in both directions."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY},
        "spec": {"podSelector": {"matchLabels": {NETWORK: "none"}}, "policyTypes": ["Ingress", "Egress"]},
    }


def waiting_for(pod: Mapping[str, Any]) -> str:
    """Return what a pod waits for that is to start; nothing if it runs."""
    status = pod.get("status", {})
    found = status.get("containerStatuses", ())
    if len(found) == len(pod["spec"]["containers"]) and all("running" in one["state"] for one in found):
        return ""
    says = [one["message"] for one in status.get("conditions", ()) if one["status"] == "False" and one.get("message")]
    waits = [one["state"]["waiting"].get("reason", "") for one in found if "waiting" in one["state"]]
    return "; ".join([*says, *filter(None, waits)]) or status.get("phase", "nothing")


def find_trouble(pod: Mapping[str, Any]) -> Exception | None:
    """Return the error of a pod that has ended, or that cannot begin; None if it may go on."""
    status = pod.get("status", {})
    said = ": ".join(filter(None, (status.get("reason", ""), status.get("message", ""))))
    if TOO_MUCH_WRITTEN.search(said):
        return HostedCodeError(f"the place was ended: it wrote more than it may: {said}")
    for one in status.get("containerStatuses", ()):
        state = one["state"].get("waiting") or one["state"].get("terminated") or {}
        reason, message = state.get("reason", ""), last_lines(state.get("message", ""))
        if reason in IMAGE_TROUBLES:
            return HostedCodeError(f"the image {one['image']} cannot be pulled: {reason}: {message}")
        if WRONG_MACHINE in message.lower():
            return HostedCodeError(f"{one['image']} is not for this cluster's processors: {message}; name one that is")
        if reason in START_TROUBLES:
            return HostedCodeError(f"{one['image']} cannot be started: {reason}: {message}")
        if reason == "OOMKilled":
            return HostedCodeError("the place was ended: it used more memory than it may")
        if "terminated" in one["state"]:
            said = said or f"its container {one['name']} ended: {reason}"
    if said or status.get("phase") in ("Failed", "Succeeded") or "deletionTimestamp" in pod["metadata"]:
        return HostError(f"the place has ended: {said or 'its pod was removed'}")
    return None
