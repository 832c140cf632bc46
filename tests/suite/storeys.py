"""Which storey of the suite a test belongs to (docs/development.md), and what each storey and file took.

A test that takes more than MOST_S without saying why (`@pytest.mark.heavy("why")`) fails the collection of the next
run of the same marks, until its file is changed. What counts is processor time, and time by the clock where no crowd
explains it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MOST_S = 20.0
"""Seconds that a test may take on a quiet machine."""
CROWD = 1.0
"""Processes for each core from which on tests wait for one, and the clock says nothing of a test."""
CORES = os.cpu_count() or 1
FAILED_FILE = "RFTSTREAM_TEST_FAILED"
"""Variable that names the file in which a run leaves the tests that failed, with what they said."""
CACHED = "suite/unmarked"
"""Where pytest's cache has the tests that took longer: id -> [seconds, digest of the file, marks selected (-m)]."""
DURATIONS = "suite/durations"
"""Where it has the seconds of every test that was run: id -> seconds. scripts/affected.py reads them."""

BY_MARK = ("gpu", "vllm", "long", "broker", "process")
BY_FOLDER = {"e2e": "process", "deploy": "process", "flow": "flow", "simulation": "simulation", "faults": "faults"}
STOREYS = ("unit", "flow", "process", "broker", "faults", "simulation", "long", "vllm", "gpu")
ALLOWED = ("heavy", "long", "vllm", "gpu")
"""Marks of tests that may take longer."""


def storey_of(marks: set[str], folder: str) -> str:
    """Return the storey of a test with these marks in this folder of tests/."""
    return next((mark for mark in BY_MARK if mark in marks), BY_FOLDER.get(folder, "unit"))


@dataclass(slots=True)
class Taken:
    """What a test took so far. The report adds up its set-up, call and tear-down."""

    wall_s: float = 0.0
    quiet_s: float = 0.0
    """Seconds by the clock while the machine was not crowded."""
    failed: bool = False
    output: str = ""
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        """Return the seconds that are held against the test."""
        return max(self.quiet_s, self.told.get("cpu_s", 0.0))


class StoreyMarks:
    """A plugin of the processes that run tests: each report of a tear-down carries storey and processor time."""

    def __init__(self, config: pytest.Config) -> None:
        self._too_long: dict[str, list[Any]] = _cache_of(config).get(CACHED, {})
        self._digests: dict[Path, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report: pytest.CollectReport = yield  # type: ignore[misc, assignment]
        lines = [self._complaint(item) for item in report.result or () if isinstance(item, pytest.Item)]
        if found := [line for line in lines if line]:
            report.outcome, report.longrepr, report.result = "failed", "\n".join(found), []
        return report  # type: ignore[return-value]

    def _complaint(self, item: pytest.Item) -> str:
        if item.nodeid not in self._too_long or any(map(item.get_closest_marker, ALLOWED)):
            return ""
        seconds, digest, marks = self._too_long[item.nodeid]
        if marks != item.config.option.markexpr:
            return ""  # a run of other tests (make test-vllm) is to go on
        if self._digests.setdefault(item.path, digest_of(item.path)) != digest:
            return ""
        return (
            f"{item.nodeid}: took {seconds:.0f} s in the last run, expected at most {MOST_S:.0f}; make it cheaper, or "
            f'say why it takes so long: @pytest.mark.heavy("why"). After a change elsewhere: pytest --cache-clear'
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._began_s = processor_s()
        return (yield)  # type: ignore[return-value]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            marks = {mark.name for mark in item.iter_markers()}
            folder = item.path.relative_to(ROOT / "tests").parts[0] if item.path.is_relative_to(ROOT / "tests") else ""
            told = {"storey": storey_of(marks, folder), "cpu_s": processor_s() - self._began_s}
            item.user_properties.append(("suite", {**told, "allowed": bool(marks.intersection(ALLOWED))}))


class StoreyReport:
    """A plugin of the process that reports: minutes of each storey, the heaviest files, and who took too long."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._taken: dict[str, Taken] = defaultdict(Taken)
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken = self._taken[report.nodeid]
        taken.wall_s += report.duration
        if os.getloadavg()[0] < CROWD * CORES:
            taken.quiet_s += report.duration
        if report.failed:
            taken.failed = True
            taken.output += f"{report.longreprtext}\n{report.capstdout}"  # the seed that was drawn is in the second
        taken.told.update(dict(report.user_properties).get("suite", {}))

    def pytest_sessionfinish(self) -> None:
        """Leave which tests failed for who asked, and in pytest's cache what each took and which took too long."""
        if path := os.environ.get(FAILED_FILE):
            failed = {test: taken.output for test, taken in self._taken.items() if taken.failed}
            Path(path).write_text(json.dumps(failed), encoding="utf-8")
        cache = _cache_of(self._config)
        known: dict[str, Any] = cache.get(CACHED, {})
        known = {test: row for test, row in known.items() if test not in self._taken}
        marks = self._config.option.markexpr
        known.update({test: [taken.longest_s, digest_of(_file_of(test)), marks] for test, taken in self._too_long()})
        cache.set(CACHED, known)
        took = {test: round(taken.wall_s, 2) for test, taken in self._taken.items()}
        cache.set(DURATIONS, cache.get(DURATIONS, {}) | took)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def _too_long(self) -> list[tuple[str, Taken]]:
        return [
            (test, taken)
            for test, taken in self._taken.items()
            if taken.longest_s > MOST_S and not taken.told.get("allowed", True)
        ]

    def lines(self) -> Iterator[str]:
        """Return the lines at the end of the run."""
        storeys: dict[str, list[Taken]] = defaultdict(list)
        files: dict[str, list[Taken]] = defaultdict(list)
        for test, taken in self._taken.items():
            storeys[taken.told.get("storey", "unit")].append(taken)
            files[test.partition("::")[0]].append(taken)
        took_min = (time.monotonic() - self._began) / 60
        yield f"minutes of {len(self._taken)} tests, in {took_min:.1f} minutes by the clock"
        yield f"{'storey':<12} {'tests':>6} {'minutes':>8} {'processor':>10}"
        yield from (_row(name, storeys[name]) for name in STOREYS if name in storeys)
        yield "the ten heaviest files"
        heaviest = sorted(files, key=lambda name: -_sum_s(files[name])[0])[:10]
        yield from (_row(name, files[name]) for name in heaviest)
        for test, taken in self._too_long():
            yield f"{test}: took {taken.longest_s:.0f} s, more than {MOST_S:.0f}: the next run will not collect it"


class _NoCache:
    """Stands in for pytest's cache where it is turned off."""

    def get(self, _key: str, default: Any) -> Any:
        return default

    def set(self, key: str, value: Any) -> None: ...


def _cache_of(config: pytest.Config) -> Any:
    return getattr(config, "cache", None) or _NoCache()


def _row(name: str, taken: list[Taken]) -> str:
    wall_s, cpu_s = _sum_s(taken)
    return f"{name:<12} {len(taken):>6} {wall_s / 60:>8.1f} {cpu_s / 60:>10.1f}"


def _sum_s(taken: list[Taken]) -> tuple[float, float]:
    return sum(one.wall_s for one in taken), sum(one.told.get("cpu_s", 0.0) for one in taken)


def _file_of(test: str) -> Path:
    return ROOT / test.partition("::")[0]


def digest_of(path: Path) -> str:
    """Return a short digest of a file, or of nothing."""
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()[:16]


def processor_s() -> float:
    """Return the processor seconds of this process, of the children it waited for, and of what it forked warm."""
    from tests import warm

    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + warm.cpu_s
