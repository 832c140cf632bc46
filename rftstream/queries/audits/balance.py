"""What an audit says: how many were admitted and what became of them, as values, JSON and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rftstream.queries.audits.operator_totals import OperatorTotals
from rftstream.queries.audits.reuse_counts import ReuseCounts
from rftstream.queries.decisions.recomputation import Recomputation
from rftstream.queries.formatting import columns, number, plural
from rftstream.queries.people.feedback import FeedbackBalance
from rftstream.queries.plain import Report

STAGES = ("to_be_sampled", "sampled", "verified", "batched")
"""Where pending rollouts stand. A group stands where its last sibling does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Report):
    """Rollouts or groups: how many were admitted, and what became of them."""

    JSON = "* pending"

    admitted: int
    pending_by_stage: Mapping[str, int]
    trained: int
    expired: int
    filtered: int
    dead: int

    @property
    def pending(self) -> int:
        """Return how many have no outcome yet, or are in a batch that is not trained."""
        return sum(self.pending_by_stage.values())

    @property
    def balanced(self) -> bool:
        """Return whether the law holds."""
        return self.admitted == self.pending + self.trained + self.expired + self.filtered + self.dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Report):
    """Completion tokens of the rollouts that were sampled. Values are None if there are no rollouts."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Report):
    """The findings of an audit. `audit` makes it; commands print it as text or JSON."""

    JSON = (
        "balanced trainer_epoch version rollouts groups experts=demonstrations? reused=reuse? operators? people? "
        "decisions=recomputation? twins lengths foreign unreadable deleted.groups=deleted_groups "
        "deleted.rollouts=deleted_rollouts deleted.earliest_version=earliest_version undeleted problems"
    )

    trainer_epoch: int
    version: int
    """The version in force."""
    rollouts: Balance
    groups: Balance
    twins: Mapping[str, int]
    """Topic -> number of records too many."""
    lengths: Mapping[str, Lengths]
    """Completion lengths by outcome, pending included."""
    foreign: Mapping[str, int] = field(default_factory=dict)
    """Topic -> records that somebody else wrote: not in force, or a copy of what stands there already. They count for
    nothing."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Topic -> records without id headers, which belong to nobody."""
    demonstrations: Balance | None = None
    """Demonstrations, counted once for each pass that took them; None where there are none."""
    deleted_groups: int = 0
    """Admitted groups whose records may be gone. They count as the log says."""
    deleted_rollouts: int = 0
    earliest_version: int = 0
    """Batches below this version are deleted."""
    undeleted: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Topic -> offsets that are said to be deleted and are still there. They count as deleted."""
    problems: tuple[str, ...] = ()
    """Each broken promise in a sentence, twins included."""
    balanced: bool
    """Whether the law holds and nothing on the log contradicts it."""
    operators: OperatorTotals | None = None
    """Counts of the operators' actions so far; None where the run has no operators."""
    reuse: ReuseCounts | None = None
    """How often batches have groups once more; None where the run has no operator for that."""
    people: FeedbackBalance | None = None
    """Counts of votes and judgements; None where nobody was asked and nobody voted."""
    recomputation: Recomputation | None = None
    """Result of computing the operators' decisions again; None where it was not asked for."""

    @property
    def fine(self) -> bool:
        """Return whether all is balanced, there are no twins, and no decision of operators came out otherwise."""
        again = self.recomputation
        return self.balanced and not any(self.twins.values()) and (again is None or again.fine)

    def to_text(self) -> str:
        """Return the report as text for people."""
        return "\n".join(_text(self))


def _text(report: AuditReport) -> list[str]:
    law = "admitted = pending + trained + expired + filtered + dead"
    names = ("admitted", "pending", "trained", "expired", "filtered", "dead")
    both: tuple[tuple[str, Balance], ...] = (("groups", report.groups), ("rollouts", report.rollouts))
    if report.demonstrations is not None:
        both += (("demonstrations", report.demonstrations),)
    lines = [
        f"balanced: {law}" if report.balanced else f"NOT BALANCED: expected {law}",
        f"version {report.version} in force (trainer epoch {report.trainer_epoch})",
        "",
        *columns([("", *names), *((label, *(f"{getattr(one, name):,}" for name in names)) for label, one in both)]),
    ]
    if any(one.pending for _, one in both):
        lines += [
            "",
            *columns(
                [
                    ("pending", *(stage.replace("_", " ") for stage in STAGES)),
                    *((label, *(f"{one.pending_by_stage[stage]:,}" for stage in STAGES)) for label, one in both),
                ]
            ),
        ]
    if any(length.count for length in report.lengths.values()):
        lines += [
            "",
            *columns(
                [
                    ("completion tokens", "rollouts", "mean", "p50", "p95"),
                    *(
                        (name, f"{one.count:,}", *(number(x, 1) for x in (one.mean, one.p50, one.p95)))
                        for name, one in report.lengths.items()
                        if one.count
                    ),
                ]
            ),
        ]
    if report.reuse is not None:
        lines += ["", report.reuse.to_text()]
    if report.operators is not None:
        lines += ["", *report.operators.lines()]
    if report.people is not None:
        lines += ["", report.people.to_text()]
    twins = ", ".join(f"{count:,} on {topic}" for topic, count in report.twins.items() if count)
    lines += ["", f"twins: {twins or 'none'}"]
    if report.foreign:
        found = ", ".join(f"{count:,} on {topic}" for topic, count in report.foreign.items())
        lines.append(
            f"foreign: {found}; somebody else wrote them, or wrote a record again to the byte; nobody counts them"
        )
    if report.deleted_groups:
        lines.append(
            f"deleted by retention: {plural(report.deleted_groups, 'group')} with "
            f"{plural(report.deleted_rollouts, 'rollout')}, and batches below version {report.earliest_version}"
        )
    if report.undeleted:
        found = ", ".join(f"{count:,} of {topic}" for topic, count in report.undeleted.items())
        lines.append(
            f"said to be deleted and still there: offsets {found}; the trainer deletes them, and `rftstream resume` if "
            "the run has ended"
        )
    for topic, count in report.unreadable.items():
        lines.append(f"{topic}: {plural(count, 'record')} without id headers, not counted")
    if report.recomputation is not None:
        lines += ["", report.recomputation.to_text()]
    if report.problems:
        lines += ["", "problems:", *(f"  {sentence}" for sentence in report.problems)]
    return lines
