"""Which groups are through, told by their outcomes. Nobody needs again what stands below them on the flow's topics."""

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
    """Result of the group; None: only late siblings were seen."""
    batch: int = -1
    """Batch of the group; -1: none."""
    until: int = -1
    """The last batch that may use the group once more; -1: none may."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Result -> number of siblings that have it."""


class CompletedGroups:
    """Counts the groups below `sequence` and their rollouts by fate, in the words of the audit. LogRetention makes it,
    calls `add` for each outcome in log order, and `advance` in between.

    A group is through when it has its outcome, each of its siblings is named by it or by a late record, and its batch,
    if it is in one, lies below the version from which on batches are kept, with each batch that may have the group once
    more."""

    def __init__(self, sequence: int = 0, groups: Mapping[str, int] = {}, rollouts: Mapping[str, int] = {}) -> None:
        """Begin with a predecessor's counts."""
        self.sequence = sequence
        self.groups = Counter(groups)
        self.rollouts = Counter(rollouts)
        self._open: dict[int, _Group] = {}

    def add(self, outcome: GroupOutcome) -> None:
        """Take an outcome of a group, or a late record of one."""
        if outcome.sequence < self.sequence:
            return
        group = self._open.setdefault(outcome.sequence, _Group(outcome.group_size))
        if not outcome.late:
            group.result, group.batch = outcome.result, -1 if outcome.batch_sequence is None else outcome.batch_sequence
            group.until = max((offer.until for offer in outcome.offers), default=-1)
        group.rollouts.update(_fate(outcome, rollout) for rollout in outcome.rollouts)

    def advance(self, version: int) -> None:
        """Count the groups that are through, given that batches below `version` are needed no more."""
        while (group := self._open.get(self.sequence)) is not None:
            seen = group.size > 0 and group.rollouts.total() >= group.size
            if group.result is None or not seen or max(group.batch, group.until) >= version:
                return
            self.groups[TRAINED if group.result is GroupResult.batched else str(group.result)] += 1
            self.rollouts += group.rollouts
            del self._open[self.sequence]
            self.sequence += 1


def _fate(outcome: GroupOutcome, rollout: RolloutSummary) -> str:
    """Return the fate of a sibling. In a batched group a late sibling is expired, one without a reward is dead, and one
    that an operator rejected is filtered."""
    if outcome.late or outcome.result is not GroupResult.batched:
        return str(outcome.result)
    if rollout.rejected is not None:
        return str(GroupResult.filtered)
    scored = rollout.reward is not None and rollout.reason is None
    return TRAINED if scored else str(GroupResult.dead)
