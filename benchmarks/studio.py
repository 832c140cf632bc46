"""Pages of the studio at 1,000 and at many rollouts, beside bare queries of the same catalog; events to 50 browsers.

The large catalog is that of the small run, filled up with made-up records by the code that fills every catalog; so it
takes minutes less than a log of as many rollouts. RFTSTREAM_BENCH_ROLLOUTS says how many (default: a million).
RFTSTREAM_BENCH_RUN names a run folder to be measured instead, with its whole log. The studio is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import _longrun
from rftstream.contracts import codec
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.tasks import Task
from rftstream.queries.catalog.counts import count_fates, count_letters, newest_time, read_rates
from rftstream.queries.catalog.database import CatalogDatabase, CatalogReader
from rftstream.queries.catalog.finding import GroupFilter, find_batch, find_group, find_groups
from rftstream.queries.catalog.listing import RolloutFilter, find_rollouts, list_tools
from rftstream.queries.catalog.moments import Moment, find_moment
from rftstream.queries.catalog.problems import count_problems, find_problems, list_tasksets
from rftstream.queries.catalog.updating import FILE
from rftstream.queries.catalog.writer import CatalogWriter
from rftstream.queries.curves.history import HistoryReader
from rftstream.queries.facts.database import identity_of
from rftstream.runs.folder import OpenRun, RunFolder, open_run
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log

SMALL, LARGE = 1_000, 1_000_000
NUM_BROWSERS = 50
REPEATS = 9
GROUPS_A_TRANSACTION = 2_000
NUM_TRAINED = 8
"""Batches that the small run has trained, at least."""
FIRST_LIMIT_S = 1.0
LIMIT_S = 1800.0


def run() -> list[dict[str, Any]]:
    large = int(os.environ.get("RFTSTREAM_BENCH_ROLLOUTS", LARGE))
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as scratch:
        if kept := os.environ.get("RFTSTREAM_BENCH_RUN"):
            shutil.rmtree(Path(kept) / "index", ignore_errors=True)
            return [*_made(Path(kept), "the run"), *_measured(Path(kept), "the run")]
        folder = Path(scratch) / "long"
        _longrun.make(folder, SMALL).run.transport.close()
        rows = [*_made(folder, f"{SMALL:,} rollouts"), *_measured(folder, f"{SMALL:,} rollouts")]
        filled_s = _fill(folder, SMALL // _longrun.GROUP_SIZE, large // _longrun.GROUP_SIZE)
        rows.append(_row(f"{large:,} rollouts: made-up records into the catalog", "s of CPU", filled_s))
        return rows + _measured(folder, f"{large:,} rollouts")


def _made(folder: Path, size: str) -> list[dict[str, Any]]:
    with studio_of(folder) as (url, process):
        took_s = until_read(f"{url}/runs/{folder.name}")
        return [
            _row(f"{size}: catalog made from the log", "s", took_s),
            _row(f"{size}: memory meanwhile", "MiB", _peak_mib(process)),
        ]


def _fill(folder: Path, begin: int, end: int) -> float:
    """Fill the catalog with groups from one sequence up to another. Return the seconds of CPU that writing took."""
    opened = open_run(folder)
    manifest = read_manifest(opened.transport)
    assert manifest is not None
    tasks, rollouts, verified = _longrun.flow_forms(opened.run_id)
    opened.transport.close()
    database = CatalogDatabase(RunFolder(folder).index / FILE, identity_of(manifest))
    spent_s = 0.0
    for first in range(begin, end, GROUPS_A_TRANSACTION):
        sequences = range(first, min(end, first + GROUPS_A_TRANSACTION))
        siblings = [_longrun.Sibling.of(one) for sequence in sequences for one in _longrun._siblings(sequence)]
        outcomes = [
            codec.to_record(_longrun._outcome(n, *_end(n)), "outcomes", 0, run=opened.run_id) for n in sequences
        ]
        chunks = [
            ("outcomes", [_recorded(one, n, n) for n, one in zip(sequences, outcomes, strict=True)]),
            *(
                (topic, [_recorded(form.record(0, one), one.ids.sequence, i) for i, one in enumerate(siblings)])
                for topic, form in (("verified", verified), ("rollouts", rollouts), ("tasks", tasks))
            ),
        ]
        before = time.process_time()
        with database.transaction() as db:
            writer = CatalogWriter(db)
            for topic, records in chunks:
                writer.absorb(topic, records)
            writer.flush()
        spent_s += time.process_time() - before
    database.close()
    return spent_s


def _end(sequence: int) -> tuple[GroupResult, int | None]:
    """What becomes of a group, and in which batch: one of the first, which the log says were trained."""
    result = _longrun.REJECTED.get(sequence % 16, GroupResult.batched)
    return result, sequence % NUM_TRAINED if result is GroupResult.batched else None


def _recorded(record: NewRecord, sequence: int, offset: int) -> Record:
    at_s = time.time() - 10_000 + sequence / 100
    return Record(record.topic, record.partition, offset, at_s, record.key, record.value, record.headers)


def _measured(folder: Path, size: str) -> list[dict[str, Any]]:
    rows = []
    with studio_of(folder) as (url, process), httpx.Client(timeout=LIMIT_S) as client:
        rows.append(_row(f"{size}: first page of a new studio", "s", until_read(f"{url}/runs/{folder.name}"),
                         FIRST_LIMIT_S, "limit"))  # fmt: skip
        until_texts_read(f"{url}/runs/{folder.name}")
        for name, path, bare in _pages(folder):
            page_ms = 1000 * _median(partial(_get, client, f"{url}/runs/{folder.name}", path))
            rows.append(_row(f"{size}: {name}", "ms", page_ms, 1000 * _median(bare), "bare queries"))
        heard_s, refreshed_s = asyncio.run(_told(url, folder))
        rows.append(_row(f"{size}: a change to {NUM_BROWSERS} browsers, the last one", "s", heard_s))
        rows.append(_row(f"{size}: and all of them have the new page", "s", refreshed_s))
        rows.append(_row(f"{size}: memory after all of it", "MiB", _peak_mib(process)))
    return rows


def _pages(folder: Path) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield name and address of pages, with what they ask the catalog."""
    file = RunFolder(folder).index / FILE
    opened = open_run(folder)
    history = HistoryReader(Log(opened.transport))
    history.read()
    opened.transport.close()
    now = find_moment("", history)
    past = find_moment(f"v{max(1, now.version // 2)}", history)
    with CatalogReader(file) as catalog:
        first = catalog.row("SELECT group_id FROM groups WHERE batch IS NOT NULL ORDER BY sequence LIMIT 1")
    assert first is not None, "the run has trained nothing"
    group = str(first["group_id"])  # the log has its records; those of later ones may be made up

    def ask(*questions: Callable[[CatalogReader], object]) -> Callable[[], object]:
        def asked() -> object:
            with CatalogReader(file) as catalog:
                return [question(catalog) for question in questions]

        return asked

    def glance(moment: Moment) -> Callable[[], object]:
        return ask(
            lambda c: count_fates(c, moment),
            lambda c: read_rates(c, moment, now=newest_time(c)),
            lambda c: count_letters(c, moment),
            lambda c: find_groups(c, moment, GroupFilter(), limit=6),
        )

    yield "at a glance", "", glance(now)
    yield "at a glance, as of half the versions", f"?as_of={past.text}", glance(past)
    yield (
        "groups",
        "/groups",
        ask(lambda c: find_groups(c, now, GroupFilter()), lambda c: count_fates(c, now), lambda c: list_tasksets(c)),
    )
    yield (
        "dead groups",
        "/groups?fate=dead",
        ask(
            lambda c: find_groups(c, now, GroupFilter(fate="dead")),
            lambda c: count_fates(c, now),
            lambda c: list_tasksets(c),
        ),
    )
    yield "a group", f"/groups/{group}", ask(lambda c: find_group(c, now, group), lambda c: find_batch(c, now, 0))
    yield (
        "a rollout",
        f"/rollouts/{group}/3",
        ask(lambda c: find_group(c, now, group), lambda c: find_batch(c, now, 0)),
    )
    yield (
        "problems, hardest first",
        "/problems?order=hardest",
        ask(
            lambda c: find_problems(c, now, order="hardest"),
            lambda c: count_problems(c, now),
            lambda c: list_tasksets(c),
        ),
    )
    yield (
        "rollouts that mention a text, the worst first",
        "/rollouts?text=again&order=worst",
        ask(lambda c: find_rollouts(c, now, RolloutFilter(text="again"), order="worst"), list_tools),
    )
    taskset, _, problem, _ = group.split("/")
    yield (
        "a problem at two versions",
        f"/problems/{taskset}/{problem}",
        ask(lambda c: find_groups(c, now, GroupFilter(taskset=taskset, problem=int(problem)), limit=50)),
    )
    yield (
        "a version with its batch",
        "/versions/1",
        ask(lambda c: find_batch(c, now, 0), lambda c: find_groups(c, now, GroupFilter(batch=0), limit=50)),
    )


async def _told(url: str, folder: Path) -> tuple[float, float]:
    """Seconds from a commit to the last browser's event, and until all browsers have the page of after it."""
    limits = httpx.Limits(max_connections=3 * NUM_BROWSERS)
    opened = open_run(folder)
    ready = asyncio.Barrier(NUM_BROWSERS + 1)
    heard: list[float] = []
    seen: list[float] = []

    async def browser(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", f"{url}/runs/{folder.name}/events", timeout=LIMIT_S) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await ready.wait()
            await _changed(lines)
            heard.append(time.perf_counter())
            (await client.get(f"{url}/runs/{folder.name}", timeout=LIMIT_S)).raise_for_status()
            seen.append(time.perf_counter())

    async with httpx.AsyncClient(limits=limits) as client, asyncio.timeout(LIMIT_S):
        browsers = [asyncio.create_task(browser(client)) for _ in range(NUM_BROWSERS)]
        await ready.wait()
        began = time.perf_counter()
        _add_group(opened)
        await asyncio.gather(*browsers)
    opened.transport.close()
    return max(heard) - began, max(seen) - began


def _add_group(run: OpenRun) -> None:
    """Admit one more group, so that there is something new."""
    ends = run.transport.admin.end_offsets("tasks")
    sequence = sum(ends.values()) // _longrun.GROUP_SIZE
    task = partial(Task, problem=_longrun.PROBLEM, sampling=_longrun.SAMPLING, seed=7)
    records = [
        codec.to_record(task(ids=one), "tasks", sequence % len(ends), run=run.run_id)
        for one in _longrun._siblings(sequence)
    ]
    producer = run.transport.producer("bench")
    producer.start()
    producer.commit(records)
    producer.close()


async def _changed(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        if line == "event: changed":
            return


@contextlib.contextmanager
def studio_of(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "rftstream", "studio", str(folder), "--port", "0"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        found = re.search(r"http://\S+:\d+", started.stdout.readline())
        assert found is not None
        yield found[0], psutil.Process(started.pid)
    finally:
        started.send_signal(signal.SIGINT)
        started.wait()


def until_read(url: str) -> float:
    """Seconds until the page has numbers of the whole log."""
    began = time.perf_counter()
    while True:
        with contextlib.suppress(httpx.HTTPError):
            page = httpx.get(url, timeout=60).text
            if 'data-number="version"' in page and "reading the log" not in page:
                return time.perf_counter() - began
        time.sleep(0.02)


def until_texts_read(url: str) -> None:
    """Wait until the studio has read the texts of all rollouts, which it does beside the pages."""
    while "being read" in httpx.get(f"{url}/rollouts", params={"unique": time.perf_counter()}, timeout=60).text:
        time.sleep(0.2)


def _get(client: httpx.Client, url: str, path: str) -> None:
    """Get a page that nobody else has asked for, since a page that was rendered is kept."""
    mark = "&" if "?" in path else "?"
    client.get(f"{url}{path}{mark}unique={time.perf_counter()}").raise_for_status()


def _median(ask: Callable[[], object]) -> float:
    """Seconds of the median of some repeats, after one that warms up."""
    ask()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _peak_mib(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def _row(name: str, unit: str, ours: float, reference: float | None = None, which: str | None = None) -> dict[str, Any]:
    return {
        "name": f"studio: {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": None if reference is None else reference / ours,
    }
