"""Gives releases of the chart to a real API server, and says what ran for real and how long it took.

python -m tests.kubernetes
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.suite.told import run_and_tell

if __name__ == "__main__":
    sys.exit(run_and_tell(
        Path(__file__).parent,
        "controllers, scheduler, kubelet: Jobs' policies by exit codes, drained nodes and pods are not tried",
        "operators: KEDA and the Prometheus operator are there as definitions, Strimzi as names of kinds",
    ))  # fmt: skip
