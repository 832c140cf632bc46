"""Watches whether two rewards score a taskset in turns, as verifiers do whose hosts have different code."""

from __future__ import annotations

import logging

from rftstream.algorithms.reward_changes import (
    TURNS,
    Scorers,
    find_reward_changes,
    is_changed,
    turns_in,
    turns_to_text,
)

log = logging.getLogger(__name__)

KEPT = 64
"""Changes that are remembered."""


class TurnsWatch:
    """Warns once when rewards begin to take turns."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._changes: list[tuple[int, Scorers]] = []

    def look(self, version: int, scorers: Scorers) -> None:
        """Take the rewards that scored the batch of a version."""
        if self._changes and not is_changed(self._known, scorers) and scorers.keys() <= self._known.keys():
            return
        self._known |= scorers
        self._changes = [*self._changes[-KEPT:], (version, dict(self._known))]
        for turns in turns_in(find_reward_changes(self._changes)):
            if len(turns) == TURNS and turns[-1].version == version:
                log.warning("%s", turns_to_text(turns))
