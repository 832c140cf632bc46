"""docs/performance.md sets what was measured beside its aims, and says why an aim was missed."""

from __future__ import annotations

from typing import Any

from pages import performance

from benchmarks.__main__ import read_recorded
from benchmarks._aims import aim_of


def entry(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "log", "by": "x", "cores": 2, "load_before": 0.4, "seconds": 80, "rows": list(rows)}


def row(name: str, ours: float, reference: float | None) -> dict[str, Any]:
    ratio = None if reference is None else ours / reference
    which = None if reference is None else "bare"
    return {"name": name, "unit": "records/s", "ours": ours, "reference": reference, "reference_name": which,
            "ratio": ratio}  # fmt: skip


def test_a_row_is_reached_missed_or_without_an_aim() -> None:
    entries = [
        entry(row("log: 1 KB records, x", 79, 100), row("log: 64 KB records, x", 80, 100), row("log: y", 3, None))
    ]
    with_aim = performance.aims(entries).splitlines()
    assert "| 0.79 | **missed**" in with_aim[2]
    assert "| 0.8 | reached |" in with_aim[3]
    assert all("not measured yet" in line for line in with_aim[4:])
    assert "log: y" not in performance.aims(entries)
    assert performance.others(entries).splitlines()[2:] == ["| log: y | 3 records/s | - | - | - | `log` |"]


def test_what_is_missed_says_why() -> None:
    rows = [row for entry in read_recorded() for row in entry["rows"]]
    missed = [(row["name"], aim) for row in rows if (aim := aim_of(row)) is not None and not aim.reached(row)]
    assert not [name for name, aim in missed if not aim.why_not]
