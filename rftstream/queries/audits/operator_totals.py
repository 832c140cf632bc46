"""The totals of a run's operators so far, counted from the log: skipped and changed problems, and actions on groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.control import Drawn
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.queries.audits.rows import RESULTS
from rftstream.queries.facts.database import Index
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import pick
from rftstream.runs.manifest import declares_operators
from rftstream.service.control_view import ControlView
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.role import Log

NUM_SHOWN = 12
"""Most lines in a text for people. The most frequent ones are shown."""


NUM_IN_STATUS = 6
LOOKED_AT = (GroupResult.batched, GroupResult.filtered)
"""Results of the groups that operators look at."""


@dataclass(slots=True)
class OperatorTotals:
    """The counts of the operators' actions so far. An OperatorReader makes it."""

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


class OperatorReader:
    """Counts the operators' actions of a run again and again, and reads only new outcomes. Its owner calls `read`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._begin()

    def _begin(self) -> None:
        self._rule = RecordsInForce(self._log.transport)
        self._positions: dict[TopicPartition, int] = {}
        self._groups = Counter[tuple[str, str, str]]()
        self._has_any = self._has_none = False
        """Whether operators have looked at a group, and whether they look at none."""

    def read(self, control: ControlView) -> OperatorTotals | None:
        """Return the counts; None if the log has none. It reads `outcomes` with their bodies if the run declares
        operators."""
        if control.manifest is not None and declares_operators(control.manifest):
            self._read_outcomes()
        if not self._has_any and control.drawn is None:
            return None
        return OperatorTotals(drawn=control.drawn, groups=self._groups.copy())

    def _read_outcomes(self) -> None:
        ends = self._log.ends("outcomes")
        if any(ends.get(place, 0) < offset for place, offset in self._positions.items()):
            self._begin()  # the run was made anew
        for _, message in () if self._has_none else self._rule.messages(self._new()):
            if isinstance(message, GroupOutcome) and message.result in LOOKED_AT:
                if message.seen is None and not message.late:
                    self._has_none = True  # operators see every such group, or none
                    return
                self._has_any = True
                for decision in message.decisions:
                    self._groups[decision.operator, str(decision.action), decision.reason] += 1

    def _new(self) -> Iterator[Record]:
        for record in self._log.read("outcomes", start=self._positions):
            self._positions[record.place] = record.offset + 1
            yield record


def count_totals(index: Index, control: ControlView) -> OperatorTotals | None:
    """Return what an OperatorReader returns, from the facts of an audit."""
    totals = OperatorTotals(drawn=control.drawn)
    has_any = totals.drawn is not None
    if control.manifest is not None and declares_operators(control.manifest):
        kept = ", ".join(str(RESULTS.index(result)) for result in LOOKED_AT)
        seen = f"SELECT offset FROM decided WHERE result IN ({kept}) AND seen"
        has_any |= index.number(f"SELECT EXISTS ({seen})") > 0
        for operator, action, reason, count in index.rows(
            "SELECT operator, action, reason, count(*) FROM on_decisions JOIN decisions ON ident = decision"
            f" WHERE offset IN ({seen}) GROUP BY 1, 2, 3"
        ):
            totals.groups[operator, action, reason] = count
    return totals if has_any else None
