"""docs/performance.md: what was measured by `make bench RECORD=1` (docs/measured/bench.json) and by `make curves`
(curves.json and trl.json there), beside the aims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.__main__ import read_recorded
from benchmarks._aims import AIMS, Aim, aim_of
from pages import measured
from pages.markdown import table
from scripts import side_by_side
from scripts.experiments import MEASURED, SEEDS, read_rows
from scripts.side_by_side import ARITHMETIC, LONG, SMOLLM2, Comparison

Entries = Sequence[Mapping[str, Any]]
STEP_AIMS = ((ARITHMETIC, 1.5), (SMOLLM2, 2.0))
"""So many times as fast as TRL a step is to be."""
THRESHOLDS, TO_THRESHOLD = (0.3, 0.4, 0.45), 3.0
"""Held-out rewards of long answers, and how many times as soon as TRL each is to be reached."""
STALE, LOST, HELD = (8, 16), 5.0, 2.0
"""Staleness at which the plain loss is to lose so many points of 100 at least, and the decoupled one at most."""
WHY_NOT = {
    "staleness": "see docs/algorithms.md for what decides it",
    "trl": "the model is so small that what a step costs beside computing counts",
    "trl-long": "one of three seeds: there TRL needs 6 steps, and we 10 to 12, in turns (`max_staleness` 0), too",
}
"""What is in the way of an aim that is missed, by comparison."""


def aims(entries: Entries | None = None) -> str:
    """Each row that has an aim; then what has one and was not measured."""
    lines, found = [], set()
    for entry, row in _rows(entries):
        if (aim := aim_of(row)) is not None:
            found.add(aim)
            lines.append((row["name"], aim.text(row), *_figures(row), _verdict(aim, row), f"`{entry['benchmark']}`"))
    lines += [(aim.rows, f"{aim.side} {aim.bound:,g}", *4 * ("-",), "not measured yet", "-")
              for aim in AIMS if aim not in found]  # fmt: skip
    return table(("what", "aim", "measured", "beside", "which is", "ratio", "", "`ONLY=`"), lines)


def others(entries: Entries | None = None) -> str:
    """Each row without an aim."""
    lines = [(row["name"], *_figures(row), f"`{entry['benchmark']}`")
             for entry, row in _rows(entries) if aim_of(row) is None]  # fmt: skip
    return table(("what", "measured", "beside", "which is", "ratio", "`ONLY=`"), lines)


def learning(curves: Entries | None = None, beside_trl: Entries | None = None) -> str:
    """What `make curves` measured and is to reach."""
    curves = read_rows(MEASURED) if curves is None else curves
    rows = side_by_side.read_rows() if beside_trl is None else beside_trl
    lines = [*_staleness(curves)]
    for comparison, aim in STEP_AIMS:
        ratios = _ratios(comparison, rows, _step_s)
        lines.append((f"{comparison.name}: a step, times as fast as TRL", f"at least {aim:g}", *_spread(ratios),
                      _told(min(ratios, default=None), aim, WHY_NOT.get(comparison.name))))  # fmt: skip
    for threshold in THRESHOLDS:
        ratios = _ratios(LONG, rows, lambda row, least=threshold: (side_by_side.reached(row, least) or (None, None))[1])
        lines.append((f"{LONG.name}: {threshold:g} in the evaluation, times as soon as TRL",
                      f"at least {TO_THRESHOLD:g}",
                      *_spread(ratios),
                      _told(min(ratios, default=None), TO_THRESHOLD, WHY_NOT[LONG.name])))  # fmt: skip
    return table(("what", "aim", "measured", "seeds", ""), lines)


def _staleness(rows: Entries) -> Iterator[tuple[str, ...]]:
    fresh = measured.runs(rows, "staleness/0/decoupled")
    for eta in STALE:
        for loss, aim in (("plain", f"at least {LOST:g}"), ("decoupled", f"at most {HELD:g}")):
            found = measured.runs(rows, f"staleness/{eta}/{loss}")
            lost = [
                100 * (fresh[seed]["held_out"][1] - row["held_out"][1]) for seed, row in found.items() if seed in fresh
            ]
            mean = sum(lost) / len(lost) if lost else None
            met = mean is not None and (mean >= LOST if loss == "plain" else mean <= HELD)
            told = measured.NOT_YET if mean is None else "reached" if met else f"**missed**: {WHY_NOT['staleness']}"
            yield (f"staleness {eta}, {loss} loss: points lost", aim, "-" if mean is None else f"{mean:.1f}",
                   ", ".join(f"{one:.1f}" for one in lost), told)  # fmt: skip


def _ratios(one: Comparison, rows: Entries, seconds: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    """TRL's seconds through ours, of each seed that both have; TRL's faster way where there are two."""
    ratios = []
    for seed in SEEDS[: one.seeds]:
        found = [side_by_side.find_row(rows, one, side, seed) for side in one.sides]
        taken = [None if row is None else seconds(row) for row in found]
        theirs = [value for value in taken[1:] if value is not None]
        if taken[0] is not None and theirs:
            ratios.append(min(theirs) / taken[0])
    return ratios


def _step_s(row: Mapping[str, Any]) -> float:
    (first, began_s, _), (last, ended_s, _) = row["curve"][0], row["curve"][-1]
    return float((ended_s - began_s) / (last - first))


def _spread(ratios: Sequence[float]) -> tuple[str, str]:
    mean = f"{sum(ratios) / len(ratios):.2f}" if ratios else "-"
    return mean, ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _told(least: float | None, aim: float, why_not: str | None) -> str:
    if least is None:
        return measured.NOT_YET
    return "reached" if least >= aim else f"**missed**{f': {why_not}' if why_not else ''}"


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
