"""Compares two runs: the settings that differ, and what became of their groups beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.decisions.side_by_side import SideBySide, compare_runs
from rftstream.queries.plain import Report
from rftstream.runs.folder import OpenRun
from rftstream.runs.manifest import changed_settings
from rftstream.runs.modules import other_code


@dataclass(frozen=True, slots=True)
class RunDifference(Report):
    """The difference between two runs. `compare` makes it."""

    settings: tuple[str, ...]
    """Settings that differ, and code of the user's own such as a reward, as `key before -> after`."""
    sides: SideBySide

    def to_text(self) -> str:
        """Return the difference as text for people."""
        settings = [f"  {line}" for line in self.settings] or ["  none"]
        return "\n".join(["settings that differ:", *settings, "", self.sides.to_text()])


def compare(before: OpenRun, after: OpenRun) -> RunDifference:
    """Compare two runs, which need not have anything in common."""
    sides = compare_runs((before.run_id, before.transport), (after.run_id, after.transport))
    settings = [*changed_settings(before.config, after.config), *other_code(before.folder, after.folder)]
    return RunDifference(tuple(settings), sides)
