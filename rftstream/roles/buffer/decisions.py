"""The buffer's decisions about groups, until the records of the decisions are on the log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import StopRule
from rftstream.roles.buffer.groups import Group, late_outcome
from rftstream.roles.buffer.reuse import offers_of
from rftstream.roles.buffer.tally import Tally
from rftstream.service.role import Publish


@dataclass(frozen=True, slots=True)
class Decision:
    """The result for a group."""

    group: Group
    result: GroupResult
    reason: str
    """Reason for the result, shown to users."""


class Decisions:
    """The decisions of the buffer that are not on the log yet. The step makes it at each recovery. It calls `add` and
    `add_late` for each decision, and `take` when it builds a transaction."""

    def __init__(self, clock: Clock, *, with_operators: bool = False, imported: bool = False) -> None:
        """`with_operators` means that the run declares operators, so that outcomes must record their decisions and
        facts. `imported` means that the versions of rollouts belong to another run."""
        self._imported = imported
        self._clock = clock
        self._with_operators = with_operators
        self._new: list[Decision] = []
        self._late: list[GroupOutcome] = []

    def __bool__(self) -> bool:
        """Whether there are decisions to publish."""
        return bool(self._new or self._late)

    def add(self, group: Group, result: GroupResult, reason: str) -> None:
        """Add the decision about a group."""
        self._new.append(Decision(group, result, reason))

    def add_late(self, verified: VerifiedRollout) -> None:
        """Add a sibling that came after its group's outcome."""
        self._late.append(late_outcome(verified, self._clock.now()))

    def take(self, tally: Tally, next_batch: int) -> tuple[list[Decision], list[Publish]]:
        """Return all decisions since the last transaction, with their records, and count the groups in `tally`."""
        now = self._clock.now()
        records = []
        decided, self._new = self._new, []
        for decision in decided:
            group, result = decision.group, decision.result
            tally.group(group.taskset, result, group.summaries)
            metrics.GROUPS.labels(str(result)).inc()
            outcome = GroupOutcome(
                group_id=group.group_id,
                taskset=group.taskset,
                sequence=group.sequence,
                result=result,
                reason=decision.reason,
                rollouts=group.summaries,
                decided_at=now,
                batch_sequence=next_batch if result is GroupResult.batched else None,
                group_size=group.size,
                **(self._of_operators(group, result, next_batch) if self._with_operators else {}),
            )
            records.append(Publish("outcomes", 0, outcome))
        late, self._late = self._late, []
        return decided, records + [Publish("outcomes", 0, outcome) for outcome in late]

    def _of_operators(self, group: Group, result: GroupResult, next_batch: int) -> dict[str, Any]:
        """Return the fields of an outcome that only runs with operators have."""
        found = group.result if result in (GroupResult.batched, GroupResult.filtered) else None
        if found is None:
            return {"parts": group.part_means}
        for operator, action in {(decision.operator, str(decision.action)) for decision in found.decisions}:
            metrics.count_named(metrics.OPERATOR_GROUPS, operator, action)
        return {
            "parts": group.part_means,
            "seen": found.seen,
            "version": found.version,
            "decisions": found.decisions,
            "priority": found.priority,
            **(offers_of(group, found, None if self._imported else group.oldest_version, next_batch)),
        }


def no_batch(filtered: Counter[str], ready: str) -> StopRule:
    """Return the error that ends a run in which no batch was completed. `filtered` counts the groups since the last
    batch by reason; `ready` says what has come together of the next one."""
    shown = ", ".join(f"{reason} {count:,}" for reason, count in filtered.most_common(5))
    return StopRule(
        "no_signal",
        f"buffer: {filtered.total():,} groups were filtered, and {ready} of a batch came together (buffer.max_refill): "
        f"{shown}; make tasks easier or harder or groups larger, let the operators keep more, or raise the limit",
    )
