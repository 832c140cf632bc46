"""Formats results of evaluations as a table, one line for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rftstream.algorithms.reward_changes import comparable_results
from rftstream.contracts.versions import EvalResult
from rftstream.queries.formatting import columns, number, plural
from rftstream.queries.plain import pick

FIRST = ("mean", "std", "pass@", "best@", "worst@", "metric/", "length_mean", "truncated_share")
"""Prefixes of the columns, in order. Metrics with other prefixes are in the JSON only."""


def unscored_text(result: EvalResult) -> str:
    """Return the text beside a mean that leaves out unscored samples, `16 of 32 samples unscored`; else empty."""
    if not result.num_unscored:
        return ""
    return f"{result.num_unscored:,} of {plural(result.num_tasks * result.num_samples, 'sample')} unscored"


def mean_text(result: EvalResult) -> str:
    """Return the mean of an evaluation, with the number of unscored samples."""
    unscored = unscored_text(result)
    return number(result.metrics.get("mean")) + (f" ({unscored})" if unscored else "")


def trust_text(result: EvalResult) -> str:
    """Return how many problems a mean is of, and the standard error of the share of right answers. Where rewards are
    graded that share is named, since the spread of such rewards over problems is not known."""
    problems = plural(result.num_tasks, "problem")
    right = result.metrics.get("pass@1", math.nan)
    if not 0.0 < right < 1.0:
        return problems
    named = "" if right == result.metrics.get("mean") else f"pass@1 {number(right)}, "
    return f"{problems}: {named}standard error {number(math.sqrt(right * (1.0 - right) / result.num_tasks))}"


def result_numbers(result: EvalResult) -> dict[str, float]:
    """Return a result as numbers: its version, its metrics, and its number of samples."""
    return {**pick(result, "version=name.version num_tasks num_samples num_unscored"), **result.metrics}


def newest_and_best(results: Iterable[EvalResult]) -> dict[str, tuple[EvalResult, EvalResult]]:
    """Return evaluation -> its newest and its best result, of those by its newest scorer. `results` are in order of
    versions."""
    return {name: (some[-1], max(some, key=lambda one: one.rank)) for name, some in comparable_results(results).items()}


def without_best(results: Iterable[EvalResult]) -> dict[str, int]:
    """Return each evaluation by which no version is better than another -> how many versions it has."""
    found = {name: some for name, some in comparable_results(results).items() if len({one.rank for one in some}) == 1}
    counts = {name: len({one.name for one in some}) for name, some in found.items()}
    return {name: count for name, count in counts.items() if count > 1}


def result_to_json(result: EvalResult) -> dict[str, Any]:
    """Return a result as a dict for JSON."""
    return pick(
        result,
        "evaluation version=name.version trainer_epoch=name.trainer_epoch num_tasks num_samples num_unscored metrics "
        "generations best request_id evaluated_at scorer scorer_version",
    )


def results_to_text(results: Iterable[EvalResult]) -> str:
    """Return a table with a line for each evaluation and version."""
    ordered = sorted(results, key=lambda result: (result.evaluation, result.name.version, result.name.trainer_epoch))
    return table(("evaluation", "version"), [((one.evaluation, str(one.name.version)), one) for one in ordered])


def table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], EvalResult]]) -> str:
    """Return a table of results. Each row gives the text of its first columns, and the result. If several rewards
    scored the results of an evaluation, the last column names them."""
    metrics = shown_metrics([result.metrics for _, result in rows])
    unscored = any(result.num_unscored for _, result in rows)
    results = [result for _, result in rows]
    scored = sum(map(len, comparable_results(results).values())) < len(results)
    more = [*(["unscored"] if unscored else []), *(["reward"] if scored else [])]
    lines: list[Sequence[object]] = [(*heads, *(name.removeprefix("metric/") for name in metrics), "samples", *more)]
    for cells, result in rows:
        lines.append(
            (
                *cells,
                *(number(result.metrics.get(name)) for name in metrics),
                f"{result.num_tasks:,} x {result.num_samples:,}",
                *([f"{result.num_unscored:,}"] if unscored else []),
                *([result.scored_by] if scored else []),
            )
        )
    return "\n".join(columns(lines))


def shown_metrics(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of all metrics that are shown and that at least one result has, pass@4 before pass@16. A single
    reward without other parts is the mean, and is left out."""
    names = {name for value in values for name in value}
    names -= {
        name
        for name in names
        if name.startswith("metric/") and all(value.get(name) == value.get("mean") for value in values)
    }
    return [
        name
        for first in FIRST
        for name in sorted((name for name in names if name.startswith(first)), key=lambda name: (len(name), name))
    ]
