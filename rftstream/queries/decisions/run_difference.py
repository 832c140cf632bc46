"""Compares two runs: the settings that differ, and what became of their groups beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rftstream.contracts.versions import EvalResult
from rftstream.queries.curves.evaluations import mean_text, newest_and_best, result_numbers, without_best
from rftstream.queries.curves.history import read_glance
from rftstream.queries.decisions.side_by_side import SideBySide, compare_runs
from rftstream.queries.formatting import columns, duration, number
from rftstream.queries.plain import Report
from rftstream.runs.folder import OpenRun
from rftstream.runs.manifest import changed_settings
from rftstream.runs.modules import other_code
from rftstream.service.role import Log

Judged = dict[str, tuple[EvalResult, EvalResult]]
"""Evaluation -> its newest and its best result."""


@dataclass(frozen=True, slots=True)
class RunDifference(Report):
    """The difference between two runs. `compare` makes it."""

    JSON = "settings evaluations=evaluations_to_json sides"

    settings: tuple[str, ...]
    """Settings that differ, and code of the user's own such as a reward, as `key before -> after`."""
    sides: SideBySide
    evaluations: tuple[Judged, Judged]
    """Evaluations of the first run, and of the second."""
    equal: tuple[dict[str, int], dict[str, int]]
    """Evaluation in which no version is better than another -> how many it has; of the first run, and of the second."""

    def evaluations_to_json(self) -> dict[str, list[dict[str, Any] | None]]:
        """Return evaluation -> the newest and the best result in the first run, and in the second."""
        sides = [
            {
                name: {"newest": result_numbers(newest), "best": result_numbers(best)}
                for name, (newest, best) in one.items()
            }
            for one in self.evaluations
        ]
        return {name: [one.get(name) for one in sides] for name in sorted({name for one in sides for name in one})}

    def to_text(self) -> str:
        """Return the difference as text for people."""
        settings = [f"  {line}" for line in self.settings] or ["  none"]
        sides = (self.sides.before, self.sides.after)
        rows: list[tuple[object, ...]] = [
            ("", *(side.run for side in sides)),
            ("time of the batches trained", *(duration(side.trained_s) if side.trained_s else "-" for side in sides)),
            ("trained tokens/s", *(number(side.tokens_per_s, 1) for side in sides)),
        ]
        rows += [
            (
                f"eval {name} {which}",
                *(
                    "-"
                    if name not in one
                    else f"the same for all {equal[name]:,} versions"
                    if place and name in equal
                    else _result_text(one[name][place])
                    for one, equal in zip(self.evaluations, self.equal, strict=True)
                ),
            )
            for name in sorted({name for one in self.evaluations for name in one})
            for place, which in enumerate(("newest", "best"))
        ]
        return "\n".join(["settings that differ:", *settings, "", self.sides.to_text(), "", *columns(rows)])


def _result_text(result: EvalResult) -> str:
    return f"{mean_text(result)} at version {result.name.version:,}"


def compare(before: OpenRun, after: OpenRun) -> RunDifference:
    """Compare two runs, which need not have anything in common."""
    sides = compare_runs((before.run_id, before.transport), (after.run_id, after.transport))
    settings = [*changed_settings(before.config, after.config), *other_code(before.folder, after.folder)]
    first, second = (read_glance(Log(one.transport)).evaluations for one in (before, after))
    judged, equal = (newest_and_best(first), newest_and_best(second)), (without_best(first), without_best(second))
    return RunDifference(tuple(settings), sides, judged, equal)
