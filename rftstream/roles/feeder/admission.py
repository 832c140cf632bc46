"""Admission: how many groups may be in progress, computed from the log alone (docs/architecture.md).

    admitted <= trained + (max_staleness + 1) * groups_per_batch + expired + filtered + dead

`admitted` includes the group that is being admitted. If rejected groups counted as accepted, the trainer would starve.
If they did not count, staleness would grow. If they were counted in memory, a restart would admit too many. So all
counts come from records.

With stages, only those of the next `max_staleness + 1` batches count that take rollouts, from the version in force
on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rftstream.config.stages import Stages
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.summaries import OutcomesSummary, StepsSummary
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import StopRule
from rftstream.roles.feeder.cursor import FeederCursor


@dataclass(slots=True)
class VersionInForce:
    """The version in force: the last StepRecord of the newest trainer epoch.

    When a newer epoch starts from version b, records of older epochs above b are no longer in force. The newer epoch's
    first record, `resumed`, carries b. So it suffices to follow the newest epoch's records in order."""

    name: VersionName = field(default_factory=lambda: VersionName(trainer_epoch=0, version=0))
    trained_groups: int = 0
    trained_rollouts: int = 0
    last: bool = False

    def begin(self, summary: StepsSummary) -> None:
        """Begin after the records of a summary."""
        self.name, self.last = summary.name, summary.last
        self.trained_groups, self.trained_rollouts = summary.trained_groups, summary.trained_rollouts

    def absorb(self, step: StepRecord) -> bool:
        """Apply the next step. Return False if its trainer was replaced by another."""
        if step.name.trainer_epoch < self.name.trainer_epoch:
            return False
        self.name = step.name
        self.trained_groups = step.trained_groups
        self.trained_rollouts = step.trained_rollouts
        self.last = step.last
        return True


@dataclass(slots=True)
class Admission:
    """The count of groups, and how many more may be admitted. The feeder's step makes it at each recovery and calls
    `absorb` for each outcome. Before each transaction it asks `wanted`, and for each group `min_version`."""

    groups_per_batch: int
    max_staleness: int
    rejected: int = 0
    """Number of groups that expired, were filtered or died."""
    stages: Stages | None = None
    """Stages of the run; None if every batch takes rollouts."""

    def begin(self, summary: OutcomesSummary) -> None:
        """Begin after the records of a summary."""
        self.rejected = sum(summary.groups.values()) - summary.groups.get(GroupResult.batched, 0)

    def absorb(self, outcome: GroupOutcome) -> None:
        """Count a group that was rejected."""
        if not outcome.late and outcome.result is not GroupResult.batched:
            self.rejected += 1

    def allowed(self, in_force: VersionInForce, admitted: int) -> int:
        """Return how many groups may be admitted now, in addition to the `admitted` ones."""
        version, batches = in_force.name.version, self.max_staleness + 1
        if self.stages is not None:
            batches = self.stages.batches_of_rollouts(version, version + batches)
        limit = in_force.trained_groups + batches * self.groups_per_batch + self.rejected
        return max(0, limit - admitted)

    def wanted(self, in_force: VersionInForce, steps: int | None, admitted: int) -> int:
        """Return how many groups may be admitted now and are needed for `steps` batches. In a run with stages the
        stages give the number of batches."""
        allowed = self.allowed(in_force, admitted)
        if steps is None or self.stages is not None:
            return allowed
        return max(0, min(allowed, steps * self.groups_per_batch + self.rejected - admitted))

    def min_version(self, in_force: VersionInForce, admitted: int) -> int:
        """Return the oldest version that may sample the group with the number `admitted`, so that its staleness is
        still allowed when its batch is trained."""
        ahead = admitted - in_force.trained_groups - self.rejected
        version, number = in_force.name.version, ahead // self.groups_per_batch
        batch = version + number if self.stages is None else self.stages.batch_of_rollouts(version, number)
        return max(0, batch - self.max_staleness)


# ------------------------------------------------------------------------------------------
#
# The rule for operators that skip everything: the run ends with an error that names them, instead of waiting for ever.


class SkipWatch:
    """Counts the problems that operators skipped since the last admitted group, all with the same facts. The feeder's
    step makes it at each recovery, asks `may_draw` before it draws, and calls `committed` for each transaction on the
    log."""

    def __init__(self, limit: int, groups_per_batch: int) -> None:
        """`limit` is the number of problems that may be skipped in a row."""
        self._limit = limit
        self._groups_per_batch = groups_per_batch
        self._in_a_row = 0
        self._seen = 0

    def may_draw(self, cursor: FeederCursor, seen: int, undecided: int) -> bool:
        """Return whether to draw more problems. Return False if the operators have skipped all problems with the same
        facts, and an outcome may still change the facts; `seen`, the number of records in the facts, is unchanged then.
        StopRule if no outcome can come, because the `undecided` groups do not fill a batch."""
        if seen != self._seen:
            self._in_a_row, self._seen = 0, seen
        if self._in_a_row < self._limit:
            return True
        if undecided >= self._groups_per_batch:
            return False
        raise StopRule(
            "no_signal",
            f"feeder: operators skipped all of the last {self._in_a_row:,} problems, so there is nothing to admit; "
            f"skipped in all: {cursor.counts.to_text()}; let them keep more, let solve_rate explore, or change the "
            "tasksets",
        )

    def committed(self, skipped: int | None) -> None:
        """Count the skipped problems of a transaction without a group; None for a transaction with a group."""
        self._in_a_row = 0 if skipped is None else self._in_a_row + skipped
