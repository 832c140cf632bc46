"""The completed groups, according to their outcomes. Their records on the topics of the flow are no longer needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary

TRAINED = "trained"


@dataclass(slots=True)
class _Group:
    size: int
    result: GroupResult | None = None
    """Result of the group; None if only late siblings were seen."""
    batch: int = -1
    """Batch of the group; -1: none."""
    until: int = -1
    """The last batch that may reuse the group; -1 for none."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Result -> number of siblings with it."""


class CompletedGroups:
    """Counts the groups below `sequence` and their rollouts by result, in the words of the audit. LogRetention makes
    it, calls `add` for each outcome in log order, and `advance` in between.

    A group is completed when three things hold: it has its outcome, each sibling is named by the outcome or by a late
    record, and all batches that have or may reuse the group are below the version from which batches are kept."""

    def __init__(self, sequence: int = 0, groups: Mapping[str, int] = {}, rollouts: Mapping[str, int] = {}) -> None:
        """Begin with a predecessor's counts."""
        self.sequence = sequence
        self.groups = Counter(groups)
        self.rollouts = Counter(rollouts)
        self._open: dict[int, _Group] = {}

    def add(self, outcome: GroupOutcome) -> None:
        """Add an outcome of a group, or a late record."""
        if outcome.sequence < self.sequence:
            return
        group = self._open.setdefault(outcome.sequence, _Group(outcome.group_size))
        if not outcome.late:
            group.result, group.batch = outcome.result, -1 if outcome.batch_sequence is None else outcome.batch_sequence
            group.until = max((offer.until for offer in outcome.offers), default=-1)
        group.rollouts.update(_fate(outcome, rollout) for rollout in outcome.rollouts)

    def advance(self, version: int) -> None:
        """Count the completed groups, if batches below `version` are no longer needed."""
        while (group := self._open.get(self.sequence)) is not None:
            seen = group.size > 0 and group.rollouts.total() >= group.size
            if group.result is None or not seen or max(group.batch, group.until) >= version:
                return
            self.groups[TRAINED if group.result is GroupResult.batched else str(group.result)] += 1
            self.rollouts += group.rollouts
            del self._open[self.sequence]
            self.sequence += 1


def _fate(outcome: GroupOutcome, rollout: RolloutSummary) -> str:
    """Return the result of a sibling. In a batched group a late sibling is expired, one without a reward is dead, and
    one that an operator rejected is filtered."""
    if outcome.late or outcome.result is not GroupResult.batched:
        return str(outcome.result)
    if rollout.rejected is not None:
        return str(GroupResult.filtered)
    scored = rollout.reward is not None and rollout.reason is None
    return TRAINED if scored else str(GroupResult.dead)
