"""The feeder's progress in each taskset, and the decisions of operators so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rftstream.contracts.control import Drawn
from rftstream.roles.feeder.growth import GrowthWalk

MAX_REASONS = 64
"""Most reasons of one operator that are counted separately, for each taskset. Further reasons are counted as OTHER."""

OTHER = "other reasons"

MOST = 10**12
"""A number larger than the size of any taskset."""


@dataclass(slots=True)
class OperatorCounts:
    """Counts of the actions of task-side operators so far. The newest Drawn on the log holds them."""

    skipped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Taskset, operator and reason -> number of problems."""
    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Taskset and operator -> number of problems."""
    put_back: int = 0
    """Groups that were admitted again without being drawn."""

    @classmethod
    def of(cls, drawn: Drawn) -> OperatorCounts:
        """Return the counts that a record holds."""
        counts = cls(put_back=drawn.put_back)
        for taskset, operators in drawn.skipped.items():
            for operator, reasons in operators.items():
                counts.skipped.update({(taskset, operator, reason): count for reason, count in reasons.items()})
        for taskset, changed in drawn.changed.items():
            counts.changed.update({(taskset, operator): count for operator, count in changed.items()})
        return counts

    def copy(self) -> OperatorCounts:
        """Return an independent copy. It is made for each group."""
        return OperatorCounts(self.skipped.copy(), self.changed.copy(), self.put_back)

    def skip(self, taskset: str, operator: str, reason: str) -> None:
        """Count a problem that was skipped."""
        if (taskset, operator, reason) not in self.skipped:
            known = sum(key[:2] == (taskset, operator) for key in self.skipped)
            reason = reason if known < MAX_REASONS else OTHER
        self.skipped[taskset, operator, reason] += 1

    def change(self, taskset: str, operators: tuple[str, ...]) -> None:
        """Count a problem that was changed."""
        self.changed.update((taskset, operator) for operator in operators)

    def to_text(self) -> str:
        """Return a list for users of the operators that skipped problems, the reasons and the counts, most first."""
        totals: Counter[str] = Counter()
        for (_, operator, reason), count in self.skipped.items():
            totals[f"{operator} ({reason})"] += count
        ordered = sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
        return ", ".join(f"{text} {count:,}" for text, count in ordered[:5])

    def by_operator(self) -> dict[tuple[str, str], int]:
        """Return the number of problems by operator and action (`skip` or `change`), over all tasksets."""
        found: Counter[tuple[str, str]] = Counter()
        for (_, operator, _), count in self.skipped.items():
            found[operator, "skip"] += count
        for (_, operator), count in self.changed.items():
            found[operator, "change"] += count
        return dict(found)

    @property
    def num_skipped(self) -> int:
        """Number of problems that were skipped."""
        return self.skipped.total()


@dataclass(slots=True)
class FeederCursor:
    """The place of the next draw. The step makes a copy for each transaction, and keeps the copy once the transaction
    is on the log."""

    admitted: int
    """Number of admitted groups."""
    drawn: dict[str, int]
    """Taskset -> problems taken, with those that were left out or skipped."""
    left_out: dict[str, int]
    """Taskset -> problems with a prompt that was too long."""
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    walks: dict[str, GrowthWalk] = field(default_factory=dict)
    """Growing taskset -> the feeder's progress in it."""

    @classmethod
    def of_json(cls, text: str, newest: Drawn | None) -> FeederCursor:
        """Return the cursor of a committed position. If there is a Drawn, the newest one supplies its numbers."""
        values = json.loads(text)
        walks = {name: GrowthWalk(**walk) for name, walk in values.get("walks", {}).items()}
        counts = OperatorCounts() if newest is None else OperatorCounts.of(newest)
        drawn, left_out = ({}, {}) if newest is None else (newest.drawn, newest.left_out)
        return cls(
            values["admitted"],
            values.get("drawn", dict(drawn)),
            values.get("left_out", dict(left_out)),
            counts=counts,
            walks=walks,
        )

    def copy(self) -> FeederCursor:
        """Return an independent copy."""
        walks = {name: replace(walk) for name, walk in self.walks.items()}
        return FeederCursor(self.admitted, dict(self.drawn), dict(self.left_out), self.counts.copy(), walks)

    @property
    def num_drawn(self) -> int:
        """Number of problems taken from all tasksets."""
        return sum(self.drawn.values())

    def outgrows(self, num_bytes: int) -> bool:
        """Return whether the numbers of so many tasksets may be too large for a position's metadata. They are then kept
        in a Drawn."""
        names, walks = dict.fromkeys(self.drawn, MOST), dict.fromkeys(self.walks, GrowthWalk(MOST, MOST, MOST, MOST))
        return len(FeederCursor(MOST, names, names, walks=walks).to_json(whole=True)) > num_bytes

    def to_json(self, *, whole: bool) -> str:
        """Return the position's metadata. It leaves out the counts, which are too large. Unless `whole`, it leaves out
        the numbers of the tasksets, too, which are then in a Drawn."""
        values: dict[str, object] = {"admitted": self.admitted}
        if whole:
            values |= {"drawn": self.drawn, "left_out": self.left_out}
        if self.walks:
            values["walks"] = {name: walk.to_json() for name, walk in self.walks.items()}
        return json.dumps(values, separators=(",", ":"))

    def to_record(self, seen: int, *, alone: bool, problems_end: int | None = None) -> Drawn:
        """Return the record of the feeder's progress. `seen` is the number of records in the facts that were used.
        `problems_end` is the offset of `problems` up to which growing tasksets were known."""
        skipped: dict[str, dict[str, dict[str, int]]] = {}
        for (taskset, operator, reason), count in self.counts.skipped.items():
            skipped.setdefault(taskset, {}).setdefault(operator, {})[reason] = count
        changed: dict[str, dict[str, int]] = {}
        for (taskset, operator), count in self.counts.changed.items():
            changed.setdefault(taskset, {})[operator] = count
        return Drawn(
            seen=seen,
            admitted=self.admitted,
            drawn=dict(self.drawn),
            left_out=_nonzero(self.left_out),
            skipped=skipped,
            changed=changed,
            put_back=self.counts.put_back,
            alone=alone,
            problems_end=problems_end,
        )


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
