"""The rule for `outcomes`: which of its records are in force, and their state. RecordsInForce asks it.

The buffer writes one outcome for each group, one record for each sibling that comes too late, and one BatchReuse for a
batch that reuses groups. A record that repeats one of these is a copy, and does not count.

The headers of an outcome name everything about it that is counted. So an outcome whose body cannot be read (a later
release wrote it, or it is damaged) counts by its headers, unless its group already has an outcome."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import msgspec

from rftstream.contracts.checks import first_violation
from rftstream.contracts.outcomes import BatchReuse, DecidedSequences, GroupOutcome, GroupResult
from rftstream.contracts.records import Record
from rftstream.contracts.summaries import MissingSiblings, OutcomesSummary

MAX_ITEMS = 4096
"""Most groups and siblings that a summary names. If more are open, no summary is written."""


class OutcomesInForce:
    """The state of `outcomes` up to the last record. RecordsInForce makes it, empty or from a summary, and calls
    `why_foreign` for each record under a claimed epoch, in order."""

    def __init__(self, summary: OutcomesSummary | None = None) -> None:
        summary = summary or OutcomesSummary(below=0)
        self._decided = DecidedSequences(summary.below, summary.above)
        self._groups = Counter(summary.groups)
        self._missing = {one.sequence: set(one.siblings) for one in summary.missing}
        """Group sequence -> siblings that had not arrived when the group was decided."""
        self._unsized: set[int] = set()
        """Groups of unknown size: their outcomes are damaged or were written by old releases."""
        self._late: set[bytes] = set()
        """Digests of the ids of late siblings in groups of unknown size."""
        self._next_batch, self._next_reuse = summary.next_batch, summary.next_reuse
        self._is_even = True
        """Whether the newest outcome belongs to a batch, so that nothing was decided for the next batch yet."""

    @property
    def num_groups(self) -> dict[str, int]:
        """Number of groups by result."""
        return {str(result): self._groups[result] for result in GroupResult}

    @property
    def newest_batch(self) -> int:
        """The newest batch that a group was decided into; -1 if there is none."""
        return self._next_batch - 1

    def why_foreign(self, message: GroupOutcome | BatchReuse) -> str | None:
        """Return why the record adds nothing new. Otherwise apply the record and return None."""
        if isinstance(message, BatchReuse):
            if message.batch_sequence < self._next_reuse:
                return f"what batch {message.batch_sequence} has once more stands there already"
            self._next_reuse = message.batch_sequence + 1
            return None
        if message.late:
            if self._is_new(message):
                return None
            return f"that rollouts of group {message.group_id} came late stands there already, or they did not"
        if message.sequence in self._decided:
            return f"group {message.group_id} (sequence {message.sequence}) has an outcome already"
        self._take(message)
        return None

    def _is_new(self, late: GroupOutcome) -> bool:
        """Apply a late record. Return False if it adds nothing new."""
        if late.sequence in self._decided and late.sequence not in self._unsized:
            missing, came = self._missing.get(late.sequence, set()), late.siblings()
            is_new = bool(came & missing)
            missing -= came
            if not missing:
                self._missing.pop(late.sequence, None)
            return is_new
        digests = {blake2b(rollout.rollout_id.encode(), digest_size=8).digest() for rollout in late.rollouts}
        is_new = not digests <= self._late
        self._late |= digests
        return is_new

    def _take(self, outcome: GroupOutcome) -> None:
        self._decided.add(outcome.sequence)
        self._groups[outcome.result] += 1
        present = outcome.siblings()
        if not outcome.group_size or not present:
            self._unsized.add(outcome.sequence)
        elif missing := set(range(outcome.group_size)) - present:
            self._missing[outcome.sequence] = missing
        self._is_even = outcome.result is GroupResult.batched
        if self._is_even:
            self._next_batch = (outcome.batch_sequence or 0) + 1

    def summary(self) -> OutcomesSummary | None:
        """Return the summary of the topic so far; None if it would be incomplete or too large."""
        if not self._is_even or self._unsized or self._late:
            return None
        above = self._decided.above()
        if len(above) + sum(map(len, self._missing.values())) > MAX_ITEMS:
            return None
        return OutcomesSummary(
            below=self._decided.below,
            above=above,
            groups={str(result): count for result in GroupResult if (count := self._groups[result])},
            missing=tuple(
                MissingSiblings(sequence=sequence, siblings=tuple(sorted(siblings)))
                for sequence, siblings in sorted(self._missing.items())
            ),
            next_batch=self._next_batch,
            next_reuse=self._next_reuse,
        )


def outcome_of_headers(record: Record) -> GroupOutcome | None:
    """Return the outcome that headers describe, without its rollouts; None if the headers are incomplete or belong to
    another kind of record."""
    if record.header("contract") != b"group_outcome" or record.header("late") is not None:
        return None
    names = ("group_id", "taskset", "sequence", "result", "reason", "batch_sequence")
    try:
        texts = {name: value.decode("ascii") for name in names if (value := record.header(name)) is not None}
        numbers = {name: int(texts.pop(name)) for name in names[2:] if name in texts and "sequence" in name}
        outcome = msgspec.convert({**texts, **numbers, "rollouts": ()}, GroupOutcome)
    except (ValueError, msgspec.ValidationError):
        return None
    return None if first_violation(outcome) is not None else outcome
