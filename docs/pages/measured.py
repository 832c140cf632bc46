"""What was measured by `make curves`: docs/algorithms.md from docs/measured/curves.json, docs/coming-from-trl.md from
docs/measured/trl.json. What was not is said so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pages.markdown import table
from scripts import side_by_side
from scripts.experiments import (
    ALGORITHMS,
    CHANCE,
    EXPERIMENTS,
    LEARNED,
    LOSSES,
    MEASURED,
    SEEDS,
    STALENESS,
    find_row,
    read_rows,
)
from scripts.side_by_side import ARITHMETIC, LONG, SMOLLM2, Comparison

NOT_YET = "not measured yet"
Rows = Sequence[Mapping[str, Any]]
Runs = dict[int, Mapping[str, Any]]
"""Seed -> what its run came to."""


def algorithms(rows: Rows | None = None) -> str:
    rows = read_rows(MEASURED) if rows is None else rows
    lines = []
    for name, options in ALGORITHMS.items():
        found = runs(rows, f"algorithms/{name}")
        learned = [one["held_out"][0] < CHANCE and one["held_out"][1] > LEARNED for one in found.values()]
        lines.append(
            (
                f"`{name}`",
                ", ".join(f"`{key} = {_toml(value)}`" for key, value in options.items()) or "-",
                *(_from_to(found.get(seed)) for seed in SEEDS),
                f"{sum(learned)} of {len(learned)}" if found else "-",
            )
        )
    return table(("algorithm", "own settings", *(f"seed {seed}" for seed in SEEDS), "runs that learned"), lines)


def staleness(rows: Rows | None = None) -> str:
    rows = read_rows(MEASURED) if rows is None else rows
    fresh = runs(rows, "staleness/0/decoupled")
    lines = []
    for eta in STALENESS:
        found = {loss: runs(rows, f"staleness/{eta}/{loss}") for loss in LOSSES}
        lines.append(
            (
                str(eta),
                *(_ends(found[loss]) for loss in LOSSES),
                *(_points(found[loss], fresh) for loss in LOSSES),
                ", ".join(_reached(found[loss]) for loss in LOSSES),
            )
        )
    points = (f"{loss}, points from decoupled at 0" for loss in LOSSES)
    head = ("`feeder.max_staleness`", *LOSSES, *points, f"staleness reached: {', '.join(LOSSES)}")
    return table(head, lines)


REUSES = {
    "none": "each group once",
    "updates": "each batch twice at once (`trainer.updates_per_batch = 2`)",
    "replay": "`replay`: 16 groups of earlier batches beside 16 new ones",
    "steps": "the same, in two optimizer steps (`trainer.minibatches = 2`)",
    "priority": "`replay` as before, with `priority` by `spread`",
}


def reuse(rows: Rows | None = None) -> str:
    """New rollouts until evaluations are above LEARNED, of each seed, and their mean beside that without reuse."""
    rows = read_rows(MEASURED) if rows is None else rows
    plain = runs(rows, "reuse/none")
    lines = []
    for name, text in REUSES.items():
        found = runs(rows, f"reuse/{name}")
        shares = [
            row["learned"][1] / plain[seed]["learned"][1]
            for seed, row in found.items()
            if row["learned"] and seed in plain and plain[seed]["learned"]
        ]
        lines.append(
            (
                text,
                *(_learned(found.get(seed)) for seed in SEEDS),
                f"{sum(shares) / len(shares):.2f}" if shares else "-",
            )
        )
    return table(("", *(f"seed {seed}" for seed in SEEDS), "share, mean"), lines)


def _learned(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return NOT_YET
    return "never" if row["learned"] is None else f"{row['learned'][1]:,} (version {row['learned'][0]})"


def beside_trl(one: Comparison = ARITHMETIC, rows: Rows | None = None) -> str:
    """A line for each seed and side, and the picture once a seed has all of them."""
    rows = side_by_side.read_rows() if rows is None else rows
    lines, drawn = [], False
    for seed in SEEDS[: one.seeds]:
        found = {side: side_by_side.find_row(rows, one, side, seed) for side in one.sides}
        drawn |= None not in found.values()
        lines += [(str(seed), side, *_times(row, one.target)) for side, row in found.items()]
    head = ("seed", "", "ready, s", f"{one.target:g} reached, s", "at step", "all steps, s", "last")
    picture = f"![Reward of evaluations over seconds and over steps](pictures/{one.picture.name})"
    return table(head, lines) + (f"\n\n{picture}" if drawn else "")


def beside_trl_smollm2(rows: Rows | None = None) -> str:
    return beside_trl(SMOLLM2, rows)


def beside_trl_long(rows: Rows | None = None) -> str:
    return beside_trl(LONG, rows)


def _times(row: Mapping[str, Any] | None, target: float) -> tuple[str, ...]:
    if row is None:
        return (NOT_YET, *4 * ("-",))
    version, seconds = side_by_side.reached(row, target) or ("-", None)
    (_, ready_s, _), (_, ended_s, last) = row["curve"][0], row["curve"][-1]
    return (
        f"{ready_s:.0f}",
        "never" if seconds is None else f"{seconds:.0f}",
        str(version),
        f"{ended_s:.0f}",
        f"{last:.2f}",
    )


def runs(rows: Rows, name: str) -> Runs:
    """Of the experiment as it is now."""
    experiment = next(one for one in EXPERIMENTS if one.name == name)
    found = {seed: find_row(rows, experiment, seed) for seed in SEEDS}
    return {seed: row for seed, row in found.items() if row is not None}


def _from_to(row: Mapping[str, Any] | None) -> str:
    return NOT_YET if row is None else " → ".join(f"{value:.2f}" for value in row["held_out"])


def _ends(found: Runs) -> str:
    if not found:
        return NOT_YET
    ends = [row["held_out"][1] for row in found.values()]
    seeds = ", ".join(f"{value:.2f}" for value in ends)
    return seeds if len(ends) == 1 else f"{sum(ends) / len(ends):.3f} ({seeds})"


def _points(found: Runs, fresh: Runs) -> str:
    """Of the seeds that both have."""
    gaps = [100 * (found[seed]["held_out"][1] - fresh[seed]["held_out"][1]) for seed in found if seed in fresh]
    return f"{sum(gaps) / len(gaps):+.1f}" if gaps else "-"


def _reached(found: Runs) -> str:
    """Mean over all groups that were trained on."""
    means = [row["staleness"][0] for row in found.values()]
    return f"{sum(means) / len(means):.1f}" if means else "-"


def _toml(value: object) -> str:
    return json.dumps(value)
