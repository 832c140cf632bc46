"""The totals of a run's operators so far, counted from the log: skipped and changed problems, and actions on groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.control import Drawn
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import pick
from rftstream.runs.manifest import declares_operators
from rftstream.service.control_view import ControlView
from rftstream.service.role import Log

NUM_SHOWN = 12
"""Most lines in a text for people. The most frequent ones are shown."""


NUM_IN_STATUS = 6


@dataclass(slots=True)
class OperatorTotals:
    """The counts of the operators' actions so far. `read_totals` makes it."""

    drawn: Drawn | None = None
    """The feeder's newest counts. None: there are no operators on the task side."""
    groups: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Operator, action and reason -> groups."""

    @property
    def num_drawn(self) -> int:
        """Problems that were drawn."""
        return sum(self.drawn.drawn.values()) if self.drawn is not None else 0

    @property
    def num_skipped(self) -> int:
        """Problems that operators skipped."""
        return sum(count for *_, count in self.skips())

    @property
    def num_left_out(self) -> int:
        """Problems that were too long."""
        return sum(self.drawn.left_out.values()) if self.drawn is not None else 0

    def problems(self, num_groups: int) -> list[str]:
        """Return a sentence for each contradiction. `num_groups`: groups on `tasks`, which were read after these
        counts."""
        drawn, sentences = self.drawn, []
        if drawn is None:
            return []
        admitted = drawn.admitted - drawn.put_back
        if self.num_drawn != admitted + self.num_left_out + self.num_skipped:
            sentences.append(
                f"control: {plural(self.num_drawn, 'problem')} drawn, expected {admitted:,} admitted + "
                f"{self.num_left_out:,} left out + {self.num_skipped:,} skipped"
            )
        if num_groups < drawn.admitted:
            sentences.append(f"tasks: {plural(num_groups, 'group')}, expected {drawn.admitted:,} as `drawn` says")
        return sentences

    def skips(self) -> list[tuple[str, str, str, int]]:
        """Return taskset, operator, reason and number of problems, most first."""
        skipped = self.drawn.skipped if self.drawn is not None else {}
        found = [
            (taskset, operator, reason, count)
            for taskset, operators in skipped.items()
            for operator, reasons in operators.items()
            for reason, count in reasons.items()
        ]
        return sorted(found, key=lambda one: (-one[3], one))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        words = "problems=drawn admitted put_back left_out skipped changed"
        return {
            "drawn": None if self.drawn is None else pick(self.drawn, words),
            "groups": [
                {"operator": operator, "action": action, "reason": reason, "groups": count}
                for (operator, action, reason), count in self._ordered()
            ],
        }

    def sentence(self) -> str:
        """Return the counts of the task side in one line."""
        drawn = self.drawn
        if drawn is None:
            return ""
        parts = [f"{plural(drawn.admitted - drawn.put_back, 'group')} admitted", f"{self.num_skipped:,} skipped"]
        if self.num_left_out:
            parts.append(f"{self.num_left_out:,} too long")
        return f"{plural(self.num_drawn, 'problem')}: {', '.join(parts)}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the actions of each operator with their numbers, most frequent first."""
        found = [
            (f"{operator} ({reason}), {taskset}", f"skipped {count:,}")
            for taskset, operator, reason, count in self.skips()
        ]
        changed = self.drawn.changed if self.drawn is not None else {}
        found += [
            (f"{operator}, {taskset}", f"changed {count:,}")
            for taskset, operators in sorted(changed.items())
            for operator, count in sorted(operators.items())
        ]
        for (operator, action, reason), count in self._ordered():
            what = f"{operator} ({reason})" if reason else operator
            found.append((what, f"{action} in {plural(count, 'group')}"))
        return found

    def to_text(self) -> str:
        """Return the counts as lines for people."""
        rows, sentence = self.rows(), self.sentence()
        lines = [f"drawn: {sentence}"] if sentence else []
        lines += columns([("operator", "did"), *rows[:NUM_SHOWN]], left=2) if rows else []
        return "\n".join(lines + ([f"and {len(rows) - NUM_SHOWN:,} more (--json)"] if len(rows) > NUM_SHOWN else []))

    def status_rows(self) -> list[tuple[str, str]]:
        """Return rows for a status: the drawn problems, and the actions of the busiest operators."""
        sentence = self.sentence()
        rows = [("drawn", sentence)] if sentence else []
        shown = self.rows()[:NUM_IN_STATUS]
        return rows + [("" if number else "operators", f"{what}: {did}") for number, (what, did) in enumerate(shown)]

    def _ordered(self) -> list[tuple[tuple[str, str, str], int]]:
        return sorted(self.groups.items(), key=lambda pair: (-pair[1], pair[0]))


def read_totals(log: Log, control: ControlView) -> OperatorTotals | None:
    """Count the operators' actions; None if the log has none. It reads `outcomes` with their bodies if the run declares
    operators."""
    declared = control.manifest is not None and declares_operators(control.manifest)
    return totals_of([control.drawn], (message for _, message in log.in_force("outcomes")) if declared else ())


def totals_of(control: Iterable[Message | None], outcomes: Iterable[Message | None]) -> OperatorTotals | None:
    """Count the operators' actions in these messages, in log order; None if there are none."""
    totals, has_any = OperatorTotals(), False
    for message in control:
        if isinstance(message, Drawn):
            totals.drawn, has_any = message, True
    for message in outcomes:
        if isinstance(message, GroupOutcome) and message.result in (GroupResult.batched, GroupResult.filtered):
            if message.seen is None and not message.late:
                break  # operators see every such group, or none
            has_any = True
            for decision in message.decisions:
                totals.groups[decision.operator, str(decision.action), decision.reason] += 1
    return totals if has_any else None
