"""Where `resume` changed settings of a run: each trainer writes the settings that it works by when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from rftstream.config.secrets import hidden
from rftstream.contracts.versions import StepRecord
from rftstream.runs.manifest import changed_in_text

LEARNED = ("trainer.", "algorithms.", "sampling.", "tasksets.")
"""Beginnings of settings that change what is learned."""
LABEL_WIDTH = 60
"""Most characters of a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """Settings that were changed by one resume. `find_setting_changes` makes it."""

    start: StepRecord
    """The start of the trainer that is the first to work by them."""
    lines: tuple[str, ...]
    """Each as `key before -> after`, those first that change what is learned."""

    @property
    def version(self) -> int:
        """Return the version from which the run went on."""
        return self.start.name.version

    @property
    def label(self) -> str:
        """Return the first change, cut, and how many others there are."""
        first, more = self.lines[0], len(self.lines) - 1
        cut = first if len(first) <= LABEL_WIDTH else f"{first[: LABEL_WIDTH - 3]}..."
        return f"{cut} and {more} more" if more else cut

    def to_text(self) -> str:
        """Return all changes, and since when."""
        return f"since version {self.version:,}: {'; '.join(self.lines)}"


def find_setting_changes(starts: Iterable[StepRecord]) -> tuple[SettingChange, ...]:
    """Return the changes between each two starts of trainers, in their order, of which all are in force. Starts that do
    not say their settings are left out."""
    known = [start for start in starts if start.config]
    return tuple(
        SettingChange(start=after, lines=tuple(sorted(map(hidden, lines), key=lambda one: not one.startswith(LEARNED))))
        for before, after in pairwise(known)
        if (lines := changed_in_text(before.config, after.config))
    )
