"""The Python API: what an import costs, and frames of a run beside reading the same columns from Parquet.

RFTSTREAM_BENCH_ROLLOUTS says how many rollouts the made-up run has (default: 100,000). Its index is made beforehand, as
after any look at the run. Bodies are read beside a reader that does nothing with the messages of the log.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import rftstream
from benchmarks import _joined, _longrun
from benchmarks.kafka import brokers
from rftstream.runs.folder import open_run
from rftstream.service.role import Log

ROLLOUTS = 100_000
NUM_BODIES = 20_000
REPEATS = 9
IMPORTS = 15


def run() -> list[dict[str, Any]]:
    return [
        _import_row(),
        *_look_rows(),
        *_joined_rows(),
    ]


def _import_row() -> dict[str, Any]:
    ours = statistics.median(_interpreter_s("import rftstream") for _ in range(IMPORTS))
    bare = statistics.median(_interpreter_s("pass") for _ in range(IMPORTS))
    return _row("import rftstream", "ms", 1000 * (ours - bare))


def _interpreter_s(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def _look_rows() -> Iterator[dict[str, Any]]:
    count = int(os.environ.get("RFTSTREAM_BENCH_ROLLOUTS", ROLLOUTS))
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as scratch:
        folder = Path(scratch) / "long"
        _longrun.make(folder, count).run.transport.close()
        with rftstream.open(folder) as opened:
            table = opened.rollouts()
            found = table.count()  # the index is made
            yield _row(f"first page of {found:,} rollouts", "ms", 1000 * _median_s(lambda: list(table.head(25))))
            file = Path(scratch) / "rollouts.parquet"
            pq.write_table(pa.Table.from_pandas(table.to_pandas()), file)
            ours, theirs = _in_turn(table.to_pandas, lambda: pq.read_table(file).to_pandas())
            yield _row(
                f"to_pandas of {found:,} rollouts", "s", ours, theirs, "the same columns from Parquet by pyarrow"
            )
            few = opened.rollouts(order="oldest").head(NUM_BODIES)
            names = ["rollout_id", "reward", "completion", "token_ids", "logprobs"]
            with closing(open_run(folder).transport) as transport:
                log = Log(transport)
                with_bodies_s, log_s = _in_turn(lambda: few.to_pandas(names), lambda: _read(log))
            ours, theirs = NUM_BODIES / with_bodies_s, NUM_BODIES / log_s
            yield _row("to_pandas with bodies", "rollouts/s", ours, theirs, "reading the log")


def _joined_rows() -> Iterator[dict[str, Any]]:
    for what in _joined.LOOPS:
        yield _row(f"a joined {what}", "rollouts/s", *_joined.rates(what), "our roles")
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder, brokers(Path(folder) / "kafka") as servers:
        what = next(iter(_joined.LOOPS))
        yield _row(f"a joined {what}, on Kafka", "rollouts/s", *_joined.rates(what, servers), "our roles")


def _read(log: Log) -> None:
    for _ in islice(log.in_force("rollouts"), NUM_BODIES):
        pass


def _in_turn(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of both, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for kept, do in zip(times, (ours, theirs), strict=True):
            begin = time.perf_counter()
            do()
            kept.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def _median_s(do: Callable[[], object]) -> float:
    return _in_turn(do, lambda: None)[0]


def _row(
    name: str, unit: str, ours: float, reference: float | None = None, reference_name: str | None = None
) -> dict[str, Any]:
    ratio = None if reference is None else ours / reference
    return {
        "name": f"python: {name}", "unit": unit, "ours": ours, "reference": reference,
        "reference_name": reference_name, "ratio": ratio,
    }  # fmt: skip
