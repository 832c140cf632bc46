"""One explorer to 64, each with an engine of the same speed and with batches that grow alike: what comes out per
second, how old it is, and what is lost for being too old.

The engine is simulated by waiting (four places in each explorer, lengths with a long tail, a second in the mean), and
so is the optimizer step; the rest of the run is real. Explorers are many in few processes, at most 16 in each: 64
processes would share two cores, and it is the system that is to be measured, not the start of interpreters. What is
trained comes from the log: over so many seconds, after some at the beginning that are not counted. Staleness in
flight is how many versions came while a rollout was sampled, in the queue how many came from its last token to its
batch. `on_stale` is "drop", so what is too old expires.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._ideal import Plan
from benchmarks._simulated import MEAN_TOKENS, Flow, begin, flow_of, started, tokens_of
from rftstream.contracts.batches import Experience

COUNTS = (1, 2, 4, 8, 16, 32, 64)
IN_A_PROCESS = 16
PLACES = 4
"""Of each explorer."""
GROUP_SIZE = 4
MAX_STALENESS = 8
WARM_S, MEASURED_S = 4.0, 8.0
MIN_STEPS, LONGER_S = 3, 30.0
"""On a machine that has much else to do it takes longer until there is something to measure."""


def run() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        for count in COUNTS:
            rows += _rows(Path(folder), count)
    return rows


def _rows(folder: Path, count: int) -> list[dict[str, Any]]:
    plan = Plan(
        steps=1_000_000,
        groups_per_batch=count,
        group_size=GROUP_SIZE,
        max_staleness=MAX_STALENESS,
        on_stale="drop",
        slots=PLACES * count,
        tokens_per_s=float(MEAN_TOKENS),
        step_s=0.2,
    )
    with (
        started(folder, f"explorers-{count}", plan, explorers=count, partitions=64, by_hand=True) as (run_dir, process),
        _explorers(run_dir, count),
    ):
        begin(run_dir, process, [f"explorer-{number}" for number in range(count)])
        since = time.time() + WARM_S
        until = since + MEASURED_S
        while time.time() < until or (_num_steps(run_dir, since) < MIN_STEPS and time.time() < until + LONGER_S):
            time.sleep(0.5)
        until = time.time()
    with flow_of(run_dir) as flow:
        return _measured(flow, count, plan, since, until)


def _num_steps(run_dir: Path, since: float) -> int:
    with flow_of(run_dir) as flow:
        return sum(one.recorded_at >= since for one in flow.steps)


def _measured(flow: Flow, count: int, plan: Plan, since: float, until: float) -> list[dict[str, Any]]:
    steps = [one for one in flow.steps if since <= one.recorded_at <= until]
    if len(steps) < 2:
        raise RuntimeError(f"explorers: {len(steps)} steps in {until - since:g} s with {count}; is the machine busy?")
    took_s = steps[-1].recorded_at - steps[0].recorded_at
    rate = (steps[-1].trained_rollouts - steps[0].trained_rollouts) / took_s
    capacity = plan.slots * plan.tokens_per_s / float(np.mean([tokens_of(one.seed) for one in flow.tasks]))
    batches = {one.batch_sequence for one in steps}
    trained = [one for one in flow.experiences if one.batch_sequence in batches]
    decided = [one for one in flow.outcomes if since <= one.decided_at <= until]
    expired = sum(one.result == "expired" for one in decided) / len(decided)
    in_flight, in_queue = np.mean([_staleness(one) for one in trained], axis=0)
    return [
        _row(count, "trained", "rollouts/s", rate, capacity, "what the engines can", rate / capacity),
        _row(count, "staleness in flight", "versions", float(in_flight)),
        _row(count, "staleness in the queue", "versions", float(in_queue)),
        _row(count, "groups expired", "%", 100 * expired),
    ]


def _staleness(one: Experience) -> tuple[int, int]:
    """In flight, in the queue."""
    versions = [span.version for segment in one.segments for span in segment.versions]
    return max(versions) - min(versions), one.batch_sequence - max(versions)


@contextmanager
def _explorers(run_dir: Path, count: int) -> Iterator[None]:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks._explorers",
                str(run_dir),
                str(first),
                str(min(IN_A_PROCESS, count - first)),
            ],
            start_new_session=True,
        )
        for first in range(0, count, IN_A_PROCESS)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _row(
    count: int,
    name: str,
    unit: str,
    ours: float,
    reference: float | None = None,
    which: str | None = None,
    ratio: float | None = None,
) -> dict[str, Any]:
    return {
        "name": f"explorers: {count}, {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": ratio,
    }
