"""What the audit says of groups that batches have once more: how many, and that each is a use that the log tells of.

A group has one outcome and one batch of its own; what it is used for beside that is told by the records of batches
(`BatchReuse`), and counted apart from the balance. So nothing is trained twice without a word.

Array names end in their rows: U uses, N rollouts of uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rftstream.queries import ledger
from rftstream.queries.formatting import plural
from rftstream.queries.ledger import Digests, Numbers, Outcomes
from rftstream.queries.rows import KEYED, KINDS, USE, USED, TopicTable, column


@dataclass(frozen=True, slots=True)
class GroupUses:
    """The uses that records of batches tell of, those of deleted batches included."""

    group_U: Digests
    batch_U: Numbers
    number_U: Numbers
    operator_U: Numbers
    kind_U: Numbers
    """Index into KINDS."""
    rollout_N: Digests
    batch_N: Numbers
    twins: Digests
    """Keys of records that are there more than once."""
    num_records: int

    def in_batches(self, first: int) -> Digests:
        """Return digests of (rollout, batch), of batches from `first` on."""
        some = self.batch_N >= first
        return ledger.in_batch(self.rollout_N[some], self.batch_N[some])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCounts:
    """How often groups were used once more. A report has it if the run has operators that reuse groups."""

    trained: dict[str, int]
    """Kind of the use -> uses in batches that are trained."""
    batched: dict[str, int]
    """Kind of the use -> uses in batches that are not trained yet."""
    rollouts: int
    """Rollouts of all these uses."""

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        return {"trained": dict(self.trained), "batched": dict(self.batched), "rollouts": self.rollouts}

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


def reuse_of(table: TopicTable) -> GroupUses:
    """Return the uses, from the whole table of `outcomes`."""
    uses = table.rows[table.rows["kind"] == USE]
    used = table.rows[table.rows["kind"] == USED]
    keys = table.rows["key"][table.rows["kind"] == KEYED]
    return GroupUses(
        group_U=column(uses, "group"),
        batch_U=column(uses, "number"),
        number_U=column(uses, "count").astype(np.int64),
        operator_U=column(uses, "share").astype(np.int64),
        kind_U=column(uses, "code").astype(np.int64),
        rollout_N=column(used, "rollout"),
        batch_N=column(used, "number"),
        twins=ledger.repeated(keys),
        num_records=len(keys),
    )


def count_reuse(uses: GroupUses, version: int) -> ReuseCounts | None:
    """Count the uses, given the version in force; None if the run never had any to choose from."""
    if not uses.num_records:
        return None
    trained_U = uses.batch_U < version

    def counts(some_U: Any) -> dict[str, int]:
        return {str(kind): int(np.sum(some_U & (uses.kind_U == code))) for code, kind in enumerate(KINDS)}

    return ReuseCounts(trained=counts(trained_U), batched=counts(~trained_U), rollouts=len(uses.rollout_N))


def reuse_problems(uses: GroupUses, outcomes: Outcomes, through: Outcomes) -> list[str]:
    """Return a sentence for each broken promise: uses are of decided groups, later than the groups' own batches, and
    numbered without a gap."""
    sentences = []
    group_G = np.concatenate([outcomes.group_G, through.group_G])
    batch_G = np.concatenate([outcomes.batch_G, through.batch_G])
    order = np.argsort(group_G, kind="stable")
    group_G, batch_G = group_G[order], batch_G[order]
    if strangers := len(ledger.missing(uses.group_U, group_G)):
        sentences.append(f"outcomes: {plural(strangers, 'group')} used once more that have no outcome")
    known_U = ledger.isin(uses.group_U, group_G)
    if len(group_G):
        own_U = batch_G[np.minimum(np.searchsorted(group_G, uses.group_U), len(group_G) - 1)]
        if early := int(np.sum(known_U & (uses.batch_U <= own_U))):
            sentences.append(
                f"outcomes: {plural(early, 'use')} of groups in a batch that is not later than the group's own"
            )
        if unbatched := int(np.sum(known_U & (own_U < 0) & (uses.kind_U == 0))):
            sentences.append(f"outcomes: {plural(unbatched, 'use')} of groups that no batch had before")
    pairs = np.stack([uses.group_U.view(np.int64), uses.operator_U, uses.number_U, uses.batch_U], axis=1)
    pairs = pairs[np.lexsort(pairs.T[::-1])]
    is_next = np.zeros(len(pairs), np.bool_)
    is_next[1:] = (pairs[1:, :2] == pairs[:-1, :2]).all(axis=1)
    expected = np.ones(len(pairs), np.int64)
    later = np.ones(len(pairs), np.bool_)
    expected[1:] = np.where(is_next[1:], pairs[:-1, 2] + 1, 1)
    later[1:] = ~is_next[1:] | (pairs[1:, 3] > pairs[:-1, 3])
    if wrong := int(np.sum((pairs[:, 2] != expected) | ~later)):
        sentences.append(
            f"outcomes: {plural(wrong, 'use')} of groups out of order, expected each group's to count 1, 2, ... in "
            "later and later batches"
        )
    return sentences
