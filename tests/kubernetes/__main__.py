"""Runs the chart on a real Kubernetes without containers, and says what ran for real and how long it took.

python -m tests.kubernetes
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.suite.told import run_and_tell

if __name__ == "__main__":
    sys.exit(run_and_tell(
        Path(__file__).parent,
        "containers, limits, probes that end a pod, network policies: no kubelet; pods' commands ran as processes",
        "operators: KEDA and the Prometheus operator are there as definitions, Strimzi as names of kinds",
        "GPUs: no node has one",
    ))  # fmt: skip
