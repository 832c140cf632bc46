"""Runs the benchmarks that are named, or all: a table for people, bench.json for scripts.

With --record, docs/measured/bench.json keeps the rows too, and docs/performance.md is made of them. What needs a GPU is
kept in docs/measured/gpu.json.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks._aims import aim_of
from rftstream.config.parts.registry import suggest

KEYS = ("name", "unit", "ours", "reference", "reference_name", "ratio")
RESULT = Path("bench.json")
RECORDED = Path(__file__).resolve().parent.parent / "docs" / "measured" / "bench.json"
"""One entry for each benchmark: its rows, and on what they were measured."""
RECORDED_GPU = RECORDED.with_name("gpu.json")
FIRST = "log"
"""What everything else stands on."""


def main(arguments: Sequence[str]) -> int:
    record = "--record" in arguments
    only = [argument for argument in arguments if argument != "--record"]
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_"))
    known = sorted(found, key=lambda name: (name != FIRST, name))
    if unknown := [name for name in only if name not in known]:
        print(f"benchmarks: unknown {unknown[0]!r}; {suggest(unknown[0], known)}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows: list[dict[str, Any]] = []
    for name in only or known:
        began, load = time.perf_counter(), os.getloadavg()[0]
        console.print(f"{name} ...", style="dim")
        measured = [_checked(row, name) for row in importlib.import_module(f"benchmarks.{name}").run()]
        took_s = time.perf_counter() - began
        rows += measured
        console.print(_table(f"{name} ({took_s:.0f} s)", measured))
        RESULT.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        if record and measured:
            place = RECORDED_GPU if name == "gpu" else RECORDED
            _record(place, {"benchmark": name, **_machine(), "load_before": round(load, 1), "seconds": round(took_s),
                            "rows": measured})  # fmt: skip
            console.print(f"recorded in {place}")
    console.print(f"written to {RESULT}")
    return 0


def read_recorded(place: Path = RECORDED) -> list[dict[str, Any]]:
    """Return what was recorded last of each benchmark, by name."""
    found: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else []
    return sorted(found, key=lambda entry: str(entry["benchmark"]))


def _record(place: Path, entry: dict[str, Any]) -> None:
    for row in entry["rows"]:
        for key, value in row.items():
            if isinstance(value, float):
                row[key] = float(f"{value:.4g}")
    kept = [other for other in read_recorded(place) if other["benchmark"] != entry["benchmark"]]
    entries = sorted([*kept, entry], key=lambda one: str(one["benchmark"]))
    place.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _machine() -> dict[str, Any]:
    by = ", ".join(f"{package} {version(package)}" for package in ("rftstream", "torch"))
    return {"by": f"{by}, Python {platform.python_version()}", "cores": os.cpu_count()}


def _checked(row: dict[str, Any], name: str) -> dict[str, Any]:
    if tuple(row) != KEYS:
        raise ValueError(f"benchmarks/{name}.py: got a row with {', '.join(row)}, expected {', '.join(KEYS)}")
    return row


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("what", "unit", "ours", "reference", "which", "ratio", "aim"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "which", "aim") else "right")
    for row in rows:
        aim = aim_of(row)
        told = "" if aim is None else f"{aim.text(row)}: {'reached' if aim.reached(row) else 'missed'}"
        table.add_row(*(_shown(row[key]) for key in KEYS), told)
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
