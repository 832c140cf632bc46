"""Runs the benchmarks that are named, or all: a table for people, bench.json for scripts."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import benchmarks
from rftstream.config.registry import suggest

KEYS = ("name", "unit", "ours", "reference", "reference_name", "ratio")
RESULT = Path("bench.json")
FIRST = "log"
"""What everything else stands on."""


def main(only: Sequence[str]) -> int:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_"))
    known = sorted(found, key=lambda name: (name != FIRST, name))
    if unknown := [name for name in only if name not in known]:
        print(f"benchmarks: unknown {unknown[0]!r}; {suggest(unknown[0], known)}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows: list[dict[str, Any]] = []
    for name in only or known:
        began = time.perf_counter()
        console.print(f"{name} ...", style="dim")
        measured = [_checked(row, name) for row in importlib.import_module(f"benchmarks.{name}").run()]
        rows += measured
        console.print(_table(f"{name} ({time.perf_counter() - began:.0f} s)", measured))
        RESULT.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {RESULT}")
    return 0


def _checked(row: dict[str, Any], name: str) -> dict[str, Any]:
    if tuple(row) != KEYS:
        raise ValueError(f"benchmarks/{name}.py: got a row with {', '.join(row)}, expected {', '.join(KEYS)}")
    return row


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("what", "unit", "ours", "reference", "which", "ratio"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "which") else "right")
    for row in rows:
        table.add_row(*(_shown(row[key]) for key in KEYS))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
