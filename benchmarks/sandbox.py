"""Programs in a warm sandbox, beside the same programs in a bare `subprocess`, which protects nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rftstream.sandbox import run_check, run_function, run_program
from rftstream.sandbox.base import Limits
from rftstream.sandbox.local import LocalBackend

NUM_PROGRAMS = 200
SOURCE = "print(1)"
LIMITS = Limits(wall_s=60.0)
TEST = "def check(candidate):\n    assert candidate(1) == 2\n"
FUNCTION = "def f(x): return x + 1"


def run() -> list[dict[str, Any]]:
    backend = LocalBackend(slots=1)
    try:
        return _rows(backend)
    finally:
        backend.close()


def _rows(backend: LocalBackend) -> list[dict[str, Any]]:
    def warm() -> None:
        assert run_program(SOURCE, expected="1", limits=LIMITS, backend=backend).passed

    def bare() -> None:
        assert subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, check=True).stdout == b"1\n"

    def function() -> None:
        assert run_function(FUNCTION, "f", [[1]], expected=[2], limits=LIMITS, backend=backend).passed

    def check() -> None:
        assert run_check(FUNCTION, TEST, "f", limits=LIMITS, backend=backend).passed

    for work in (warm, check):
        work()
    ours, theirs = _times(warm), _times(bare)
    rows = [
        _row("trivial program, p50", "ms", 1000 * _at(ours, 0.5), 1000 * _at(theirs, 0.5)),
        _row("trivial program, p95", "ms", 1000 * _at(ours, 0.95), 1000 * _at(theirs, 0.95)),
        _row("trivial programs, one after the other", "1/s", len(ours) / sum(ours), len(theirs) / sum(theirs)),
        _row("function call, p50", "ms", 1000 * _at(_times(function), 0.5), 1000 * _at(theirs, 0.5)),
        _row("check in two sandboxes, p50", "ms", 1000 * _at(_times(check), 0.5), 1000 * _at(theirs, 0.5)),
    ]
    wide = LocalBackend()
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(run_program, SOURCE, expected="1", limits=LIMITS, backend=wide) for _ in range(NUM_PROGRAMS)
            ]
            assert all(job.result().passed for job in jobs)
        rows.append(_row("trivial programs, on all cores", "1/s", NUM_PROGRAMS / (time.perf_counter() - began), None))
    finally:
        wide.close()
    return rows


def _times(work: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(NUM_PROGRAMS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return sorted(found)


def _at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


def _row(name: str, unit: str, ours: float, reference: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": "bare subprocess" if reference is not None else None,
        "ratio": ours / reference if reference is not None else None,
    }
