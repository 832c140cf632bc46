"""Where the time of a step of examples/arithmetic.toml goes: the CPU of each role, beside that of all of them.

The roles take turns in one process, over a log and a store in memory, with one thread. So wake-ups, commits to a disk
and the reward's process are not in it, and neither are imports. What a role computes is: the model is so small that
nearly all of a step is what the roles do with records."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.testing import MemoryRun, RoleDriver

RUN_FILE = Path(__file__).parent.parent / "examples" / "arithmetic.toml"
ROLES = ("feeder", "explorer", "verifier", "buffer", "trainer")
FIRST, STEPS = 5, 25
"""Steps before those that are measured, and all steps."""
TICK_S = 0.002


def run() -> list[dict[str, Any]]:
    sets = [f"run.steps={STEPS}", "evaluator.count=0"]
    config = loader.load([RUN_FILE], sets=sets)
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        run = MemoryRun(config, folder=Path(folder))
        drivers = {role: RoleDriver(run, role) for role in ROLES}
        seconds: defaultdict[str, float] = defaultdict(float)
        _turns(run, drivers, seconds, until=FIRST)
        gc.collect()
        gc.freeze()  # what was loaded is no part of a step
        seconds.clear()
        began_at = _num_steps(run)
        _turns(run, drivers, seconds, until=STEPS)
        num_steps = _num_steps(run) - began_at
    gc.unfreeze()
    whole_ms = 1000 * sum(seconds.values()) / num_steps
    return [
        {
            "name": f"step: examples/arithmetic.toml, {role}",
            "unit": "CPU ms",
            "ours": 1000 * seconds[role] / num_steps,
            "reference": whole_ms,
            "reference_name": "all roles",
            "ratio": 1000 * seconds[role] / num_steps / whole_ms,
        }
        for role in ROLES
    ]


def _turns(run: MemoryRun, drivers: Mapping[str, RoleDriver], seconds: defaultdict[str, float], *, until: int) -> None:
    """Let all roles take turns until so many steps are on the log. Add up what each takes."""
    while _num_steps(run) < until:
        for role, driver in drivers.items():
            began = time.process_time()
            driver.tick()
            seconds[role] += time.process_time() - began
        run.clock.advance(TICK_S)


def _num_steps(run: MemoryRun) -> int:
    """Return the number of steps that trained: the first record is of none."""
    return len(run.records("steps")) - 1
