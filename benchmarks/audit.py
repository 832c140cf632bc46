"""Audit and trace of a long run: the first audit, which builds the index, and later ones, which read what is new.

RFTSTREAM_BENCH_ROLLOUTS says how many rollouts (the aims are for a million; the default keeps this short),
RFTSTREAM_BENCH_RUN keeps the run in that folder, or measures the one that is there. Each is a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import _longrun

NUM_ROLLOUTS = 50_000
LIMIT_ROLLOUTS = 1_000_000
FIRST_LIMIT_S = 120.0
LATER_LIMIT_S = 10.0
LIMIT_MIB = 1024.0
GROUP = "sums/0/17/0"


def run() -> list[dict[str, Any]]:
    num_rollouts = int(os.environ.get("RFTSTREAM_BENCH_ROLLOUTS", NUM_ROLLOUTS))
    kept = os.environ.get("RFTSTREAM_BENCH_RUN")
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as scratch:
        folder = Path(kept) if kept else Path(scratch) / "long"
        if not folder.exists():
            _longrun.make(folder, num_rollouts).run.transport.close()
        shutil.rmtree(folder / "index", ignore_errors=True)
        return _rows(folder)


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for what, limit_s, arguments in (
        ("without an index", None, ["audit", "--no-index"]),
        ("first, building the index", FIRST_LIMIT_S, ["audit"]),
        ("later", LATER_LIMIT_S, ["audit"]),
        ("trace of a rollout", LATER_LIMIT_S, ["trace", f"{GROUP}/3"]),
        ("trace of a rollout, without an index", None, ["trace", f"{GROUP}/3", "--no-index"]),
    ):
        command, *rest = arguments
        took_s, cpu_s, peak_mib, answer = measured([command, str(folder), *rest, "--json"])
        if command == "audit":
            found = json.loads(answer)
            assert found["balanced"], found["problems"]
            name = f"audit of {found['rollouts']['admitted']:,} rollouts, {what}"
        else:
            name = what
        limits = (limit_s, None, LIMIT_MIB)
        for unit, ours, limit in zip(("s", "s of CPU", "MiB at most"), (took_s, cpu_s, peak_mib), limits, strict=True):
            rows.append(
                {
                    "name": f"audit: {name}",
                    "unit": unit,
                    "ours": ours,
                    "reference": limit,
                    "reference_name": f"limit for {LIMIT_ROLLOUTS:,}" if limit else None,
                    "ratio": limit / ours if limit else None,
                }
            )
    return rows


def measured(arguments: list[str]) -> tuple[float, float, float, str]:
    """Seconds, seconds of CPU, peak MiB, and what it printed."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import re, sys; from rftstream.commands import cli\n"
        f"try: cli({arguments!r})\n"  # ru_maxrss would hold the peak of this process, too, of which it is a fork
        "finally: print('peak', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = re.search(r"^peak (\d+)$", done.stderr, re.MULTILINE)
    assert peak is not None, done.stderr
    return took_s, cpu_s, int(peak[1]) / 1024, done.stdout
