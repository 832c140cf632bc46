"""The result of an audit: the admitted rollouts and groups and their fates, as values, JSON and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rftstream.queries.audits.group_counts import filtered_rows
from rftstream.queries.audits.operator_totals import OperatorTotals
from rftstream.queries.decisions.recomputation import Recomputation
from rftstream.queries.facts.database import Index
from rftstream.queries.facts.writer import KINDS
from rftstream.queries.formatting import listed, number, plural, table
from rftstream.queries.people.feedback import FeedbackBalance
from rftstream.queries.plain import Report
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCounts(Report):
    """How often groups were used again. A report has it if the run has operators that reuse groups."""

    trained: dict[str, int]
    """Kind of use -> uses in trained batches."""
    batched: dict[str, int]
    """Kind of use -> uses in batches that are not trained yet."""
    rollouts: int
    """Rollouts of all these uses."""

    def to_text(self) -> str:
        """Return the counts as a line for people."""
        kinds = [f"{self.trained[kind]:,} by {kind}" for kind in self.trained if self.trained[kind]]
        waiting = sum(self.batched.values())
        return (
            f"reused: {plural(sum(self.trained.values()), 'use')} of groups in trained batches"
            + (f" ({', '.join(kinds)})" if kinds else "")
            + (f", {waiting:,} in batches to come" if waiting else "")
            + f"; {plural(self.rollouts, 'rollout')} in all"
        )


def count_reuse(index: Index, version: int) -> ReuseCounts | None:
    """Count the uses, given the version in force; None if the run never had operators that reuse groups."""
    if not index.number("SELECT count(*) FROM all_outcomes WHERE grp IS NULL"):
        return None
    rows = index.rows("SELECT kind, batch < ?, count(*) FROM uses GROUP BY 1, 2", (version,))
    found = {(kind, bool(is_trained)): count for kind, is_trained, count in rows}
    trained, batched = (
        {str(kind): found.get((code, is_trained), 0) for code, kind in enumerate(KINDS)} for is_trained in (True, False)
    )
    return ReuseCounts(trained=trained, batched=batched, rollouts=index.number("SELECT count(*) FROM used"))


STAGES = ("to_be_sampled", "sampled", "verified", "batched")
"""Stages at which pending rollouts wait. A group counts at the stage of its last sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Report):
    """The number of admitted rollouts or groups, and their fates."""

    JSON = "* pending"

    admitted: int
    pending_by_stage: Mapping[str, int]
    trained: int
    expired: int
    filtered: int
    dead: int

    @property
    def pending(self) -> int:
        """Return how many have no outcome yet, or are in an untrained batch."""
        return sum(self.pending_by_stage.values())

    @property
    def decided(self) -> dict[str, int]:
        """Return the fates of those that have an outcome, and how many had each."""
        return {
            "batched": self.trained + self.pending_by_stage["batched"],
            "expired": self.expired,
            "filtered": self.filtered,
            "dead": self.dead,
        }

    @property
    def balanced(self) -> bool:
        """Return whether the law holds."""
        return self.admitted == self.pending + self.trained + self.expired + self.filtered + self.dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Report):
    """Completion tokens of the sampled rollouts. Values are None if there are no rollouts."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Report):
    """The findings of an audit. `audit` makes it; commands print it as text or JSON."""

    JSON = (
        "balanced trainer_epoch version rollouts groups filtered experts=demonstrations? reused=reuse? operators? "
        "people? decisions=recomputation? twins lengths foreign unreadable deleted.groups=deleted_groups "
        "deleted.rollouts=deleted_rollouts deleted.earliest_version=earliest_version undeleted problems"
    )

    trainer_epoch: int
    version: int
    """The version in force."""
    rollouts: Balance
    groups: Balance
    twins: Mapping[str, int]
    """Topic -> number of extra records."""
    lengths: Mapping[str, Lengths]
    """Completion lengths by outcome; pending rollouts are included."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Operator or rule -> groups that it filtered, most first."""
    foreign: Mapping[str, int] = field(default_factory=dict)
    """Topic -> records that another writer added: not in force, or copies of existing records. They are not counted."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Topic -> records without id headers, which cannot be assigned."""
    demonstrations: Balance | None = None
    """Demonstrations, counted once for each pass that used them; None if there are none."""
    deleted_groups: int = 0
    """Admitted groups whose records may be gone. They are counted by the log's numbers."""
    deleted_rollouts: int = 0
    earliest_version: int = 0
    """Batches below this version are deleted."""
    undeleted: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Topic -> offsets that the log calls deleted and that still exist. They count as deleted."""
    problems: tuple[str, ...] = ()
    """A sentence for each broken promise, twins included."""
    balanced: bool
    """Whether the law holds and nothing on the log contradicts it."""
    operators: OperatorTotals | None = None
    """Counts of the operators' actions so far; None if the run has no operators."""
    reuse: ReuseCounts | None = None
    """How often batches reuse groups; None if the run has no operator for that."""
    people: FeedbackBalance | None = None
    """Counts of votes and judgements; None if nobody was asked and nobody voted."""
    recomputation: Recomputation | None = None
    """Result of recomputing the operators' decisions; None if it was not requested."""

    @property
    def fine(self) -> bool:
        """Return whether everything balances, there are no twins, and every recomputed decision is the same."""
        again = self.recomputation
        return self.balanced and not any(self.twins.values()) and (again is None or again.fine)

    def to_text(self) -> str:
        """Return the report as text for people."""
        return "\n".join(_text(self))


def _text(report: AuditReport) -> list[str]:
    law = "admitted = pending + trained + expired + filtered + dead"
    names = ("admitted", "pending", "trained", "expired", "filtered", "dead")
    kinds = {"groups": report.groups, "rollouts": report.rollouts, "demonstrations": report.demonstrations}
    there = {label: one for label, one in kinds.items() if one is not None}
    waits = there if any(one.pending for one in there.values()) else {}
    lengths = {name: one for name, one in report.lengths.items() if one.count}
    lines = [
        f"balanced: {law}" if report.balanced else f"NOT BALANCED: expected {law}",
        f"version {report.version} in force (trainer epoch {report.trainer_epoch})",
        *table(("", *names), ((label, *(f"{getattr(one, name):,}" for name in names)) for label, one in there.items())),
        *table(
            ("pending", *(stage.replace("_", " ") for stage in STAGES)),
            ((label, *(f"{one.pending_by_stage[stage]:,}" for stage in STAGES)) for label, one in waits.items()),
        ),
        *table(
            ("completion tokens", "rollouts", "mean", "p50", "p95"),
            (
                (name, f"{one.count:,}", *(number(value, 1) for value in (one.mean, one.p50, one.p95)))
                for name, one in lengths.items()
            ),
        ),
    ]
    filtered = filtered_rows(report.groups.decided, report.filtered, of_all=True)
    if rows := [": ".join(row) for row in filtered]:
        lines += ["", *rows]
    for part in (report.reuse, report.operators, report.people):
        lines += [] if part is None else ["", *filter(None, [part.to_text()])]
    return [*lines, *_exceptions(report)]


def _exceptions(report: AuditReport) -> list[str]:
    """Return the lines about problems, which most audits do not find."""
    twins = listed({topic: count for topic, count in report.twins.items() if count}, "on")
    lines = ["", f"twins: {twins or 'none'}"]
    if report.foreign:
        found = listed(report.foreign, "on")
        lines.append(
            f"foreign: {found}; somebody else wrote them, or wrote a record again to the byte; nobody counts them"
        )
    if report.deleted_groups:
        lines.append(
            f"deleted by retention: {plural(report.deleted_groups, 'group')} with "
            f"{plural(report.deleted_rollouts, 'rollout')}, and batches below version {report.earliest_version}"
        )
    if report.undeleted:
        lines.append(
            f"said to be deleted and still there: offsets {listed(report.undeleted, 'of')}; the trainer deletes them, "
            "and `rftstream resume` if the run has ended"
        )
    for topic, count in report.unreadable.items():
        lines.append(f"{topic}: {plural(count, 'record')} without id headers, not counted")
    if report.recomputation is not None:
        lines += ["", report.recomputation.to_text()]
    if report.problems:
        lines += ["", "problems:", *(f"  {sentence}" for sentence in report.problems)]
    return lines


# -------------- demonstrations, counted from the log: each use once per pass, and whether it was trained


NEWEST_FIRST = "ORDER BY partition DESC, offset DESC"


def count_demonstrations(index: Index, log: Log, version: int, *, num_shares: int) -> tuple[Balance | None, list[str]]:
    """Return the balance of demonstrations, or None if none were loaded or used; and a sentence for each broken
    promise. Uses in batches that retention deleted are counted by the manifests that remain.

    admitted = the count of the newest manifest, plus those that went to `dead`.
    """

    def up_to(batch: int, otherwise: int = 0) -> int:
        """Return how many were used up to a batch, by its manifest."""
        found = list(index.rows(f"SELECT experts FROM manifests WHERE number = {batch} {NEWEST_FIRST}"))
        return int(found[0][0]) if found else otherwise

    num_loaded = index.number("SELECT count(DISTINCT key) FROM keyed WHERE topic = 'experts'")
    if not num_loaded and not index.number("SELECT count(*) FROM demonstrations_used"):
        return None, []
    newest = index.number(
        "SELECT coalesce(max(number), -1) FROM (SELECT number FROM manifests GROUP BY number"
        " HAVING count(DISTINCT share) = ?)",
        (num_shares,),
    )
    total = up_to(newest)
    dead = sum((record.header("id") or b"").startswith(b"buffer/experts/") for record in log.read("dead", bodies=False))
    first = index.number("SELECT min(number) FROM manifests")  # earlier ones are deleted, and were trained
    before = up_to(first) - index.number("SELECT count(*) FROM demonstrations_used WHERE batch = ?", (first,))
    found = before + index.number("SELECT count(*) FROM demonstrations_used WHERE batch <= ?", (newest,))
    trained = up_to(version - 1, before)
    sentences = []
    if found != total:
        sentences.append(
            f"batches: {plural(found, 'demonstration')} up to batch {newest}, expected {total:,} as its manifest says"
        )
    double = "SELECT 1 FROM all_batches WHERE kind = 1 GROUP BY grp, number"
    once = "SELECT 1 FROM demonstrations_used"
    if num_double := index.number(f"SELECT (SELECT count(*) FROM ({double})) - (SELECT count(*) FROM ({once}))"):
        sentences.append(f"batches: {plural(num_double, 'demonstration')} a second time in the same pass")
    strangers = "SELECT count(*) FROM demonstrations_used WHERE number < 0 OR number >= ?"
    if foreign := index.number(strangers, (num_loaded,)):
        sentences.append(f"batches: {plural(foreign, 'demonstration')} that experts does not have")
    pending = {**dict.fromkeys(STAGES, 0), "batched": found - trained}
    balance = Balance(
        admitted=total + dead, pending_by_stage=pending, trained=trained, expired=0, filtered=0, dead=dead
    )
    return balance, sentences
