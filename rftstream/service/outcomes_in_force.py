"""The rule for `outcomes`: which of its records are in force. RecordsInForce asks it.

The buffer writes one outcome for each group, one record for each sibling that comes too late, and one BatchReuse for a
batch that has groups once more. A record that says one of these again is a copy, and counts for nothing.

The headers of an outcome name all that is counted of it. So an outcome whose body cannot be read here, since a later
release wrote it or it is damaged, counts by its headers, as long as its group has none yet.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from rftstream.contracts.checks import first_violation
from rftstream.contracts.outcomes import BatchReuse, DecidedSequences, GroupOutcome
from rftstream.contracts.records import Record


class OutcomesInForce:
    """What stands on `outcomes` so far. RecordsInForce makes it, and calls `why_foreign` for each record under a
    claimed epoch, in order."""

    def __init__(self) -> None:
        self._decided = DecidedSequences()
        self._late: set[bytes] = set()
        """Digests of the ids of late records: 8 bytes for each rollout that came too late."""
        self._newest_reuse = -1
        """The batch of the last BatchReuse."""

    def why_foreign(self, message: GroupOutcome | BatchReuse) -> str | None:
        """Return why the record says nothing new, or None; then it is taken."""
        if isinstance(message, BatchReuse):
            if message.batch_sequence <= self._newest_reuse:
                return f"what batch {message.batch_sequence} has once more stands there already"
            self._newest_reuse = message.batch_sequence
            return None
        if message.late:
            digests = {blake2b(one.rollout_id.encode(), digest_size=8).digest() for one in message.rollouts}
            if digests and digests <= self._late:
                return f"that rollouts of group {message.group_id} came late stands there already"
            self._late |= digests
            return None
        if message.sequence in self._decided:
            return f"group {message.group_id} (sequence {message.sequence}) has an outcome already"
        self._decided.add(message.sequence)
        return None


def outcome_of_headers(record: Record) -> GroupOutcome | None:
    """Return what the headers of a group's outcome say; None if they say too little, or are of another record. It names
    no rollouts."""
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
