"""Runs the chart and places on a real Kubernetes, and says what ran for real and how long it took.

python -m tests.kubernetes
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.suite.told import run_and_tell

if __name__ == "__main__":
    sys.exit(run_and_tell(
        Path(__file__).parent,
        "lost nodes, exit codes, ten kills: no kubelet there; pods' commands ran as processes",
        "network policies: the bridge of the one real node keeps none",
        "operators: KEDA and the Prometheus operator are there as definitions, Strimzi as names of kinds",
        "GPUs: no node has one",
    ))  # fmt: skip
