"""A whole run of examples/arithmetic.toml, from the command to its end, beside the time that it may take."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUN_FILE = Path(__file__).parent.parent / "examples" / "arithmetic.toml"
REPETITIONS = 3
LIMIT_S = 120.0
LEARNED = 0.85
"""Of samples at the temperature that explores; the run's evaluations, at 1, are above 0.9."""


def run() -> list[dict[str, Any]]:
    seconds, rewards = [], []
    for _ in range(REPETITIONS):
        took_s, reward = _whole_run()
        seconds.append(took_s)
        rewards.append(reward)
    took_s, reward = statistics.median(seconds), statistics.median(rewards)
    return [
        {
            "name": "run: examples/arithmetic.toml, wall time",
            "unit": "s",
            "ours": took_s,
            "reference": LIMIT_S,
            "reference_name": "limit",
            "ratio": LIMIT_S / took_s,
        },
        {
            "name": "run: examples/arithmetic.toml, reward of the last tenth",
            "unit": "",
            "ours": reward,
            "reference": LEARNED,
            "reference_name": "expected at least",
            "ratio": reward / LEARNED,
        },
    ]


def _whole_run() -> tuple[float, float]:
    """Seconds, and the reward at the end."""
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        command = [sys.executable, "-m", "rftstream", "run", str(RUN_FILE), "--run-dir", f"{folder}/run"]
        began = time.perf_counter()
        done = subprocess.run([*command, "--json", "--progress", "none"], stdout=subprocess.PIPE, check=True, text=True)
        took_s = time.perf_counter() - began
    return took_s, json.loads(done.stdout.splitlines()[-1])["reward_last"]
