"""What the audit says of groups that batches have once more: how many.

A group has one outcome and one batch of its own; what it is used for beside that is told by the records of batches
(`BatchReuse`), and counted apart from the balance. So nothing is trained twice without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.facts.database import Index
from rftstream.queries.facts.writer import KINDS
from rftstream.queries.formatting import plural
from rftstream.queries.plain import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCounts(Report):
    """How often groups were used once more. A report has it if the run has operators that reuse groups."""

    trained: dict[str, int]
    """Kind of the use -> uses in batches that are trained."""
    batched: dict[str, int]
    """Kind of the use -> uses in batches that are not trained yet."""
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
    """Count the uses, given the version in force; None if the run never had any to choose from."""
    if not index.number("SELECT count(*) FROM all_outcomes WHERE grp IS NULL"):
        return None
    rows = index.rows("SELECT kind, batch < ?, count(*) FROM uses GROUP BY 1, 2", (version,))
    found = {(kind, bool(is_trained)): count for kind, is_trained, count in rows}
    trained, batched = (
        {str(kind): found.get((code, is_trained), 0) for code, kind in enumerate(KINDS)} for is_trained in (True, False)
    )
    return ReuseCounts(trained=trained, batched=batched, rollouts=index.number("SELECT count(*) FROM used"))
