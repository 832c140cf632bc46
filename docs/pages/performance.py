"""What was measured by `make bench RECORD=1`, beside the aims: docs/performance.md from docs/measured/bench.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.__main__ import read_recorded
from benchmarks._aims import AIMS, Aim, aim_of
from pages.markdown import table

Entries = Sequence[Mapping[str, Any]]


def aims(entries: Entries | None = None) -> str:
    """Each row that has an aim; then what has one and was not measured."""
    lines, measured = [], set()
    for entry, row in _rows(entries):
        if (aim := aim_of(row)) is not None:
            measured.add(aim)
            lines.append((row["name"], aim.text(row), *_figures(row), _verdict(aim, row), f"`{entry['benchmark']}`"))
    lines += [(aim.rows, f"{aim.side} {aim.bound:,g}", *4 * ("-",), "not measured yet", "-")
              for aim in AIMS if aim not in measured]  # fmt: skip
    return table(("what", "aim", "measured", "beside", "which is", "ratio", "", "`ONLY=`"), lines)


def others(entries: Entries | None = None) -> str:
    """Each row without an aim."""
    lines = [(row["name"], *_figures(row), f"`{entry['benchmark']}`")
             for entry, row in _rows(entries) if aim_of(row) is None]  # fmt: skip
    return table(("what", "measured", "beside", "which is", "ratio", "`ONLY=`"), lines)


def machines(entries: Entries | None = None) -> str:
    """On what each benchmark was measured, and beside how much else."""
    entries = read_recorded() if entries is None else entries
    lines = [
        (
            f"`{entry['benchmark']}`",
            str(entry["cores"]),
            f"{entry['load_before']:g}",
            f"{entry['seconds']} s",
            entry["by"],
        )
        for entry in entries
    ]
    return table(("`ONLY=`", "cores", "load before", "took", "by"), lines)


def _rows(entries: Entries | None) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for entry in read_recorded() if entries is None else entries:
        for row in entry["rows"]:
            yield entry, row


def _figures(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    def with_unit(value: float | None) -> str:
        return "-" if value is None else f"{_number(value)} {row['unit']}".rstrip()

    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3g}"
    return with_unit(row["ours"]), with_unit(row["reference"]), row["reference_name"] or "-", ratio


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _verdict(aim: Aim, row: Mapping[str, Any]) -> str:
    if aim.reached(row):
        return "reached"
    return f"**missed**: {aim.why_not}" if aim.why_not else "**missed**"
