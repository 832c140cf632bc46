"""Tasksets whose newest rollouts fail: an environment, an agent or a policy that breaks each time.

Failed rollouts are no dead letters, and a run of which all fail makes no step. So neither tells of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rftstream.contracts import codec
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.errors import ContractError
from rftstream.queries.plain import Report
from rftstream.queries.state.standstill import read_tails
from rftstream.queries.traces.lineage import header
from rftstream.service.reading import read_records
from rftstream.transport.base import Transport

NEWEST = 64
"""Rollouts of all tasksets that are looked at, at most."""
LEAST = 4
"""Rollouts of a taskset below which nothing is said of it."""
SHARE = 0.5
"""Share of failed ones from which on it is said."""
ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingTaskset(Report):
    """A taskset of which many rollouts fail. `find_failing` makes it."""

    taskset: str
    num_failed: int
    num_seen: int
    """Number of newest rollouts that the share of failures is measured over."""
    error: str
    """Error of the newest rollout that failed."""

    def to_text(self) -> str:
        """Return it as text for people."""
        return f"{self.num_failed} of the newest {self.num_seen} rollouts of {self.taskset} failed: {self.error}"


def find_failing(transport: Transport) -> tuple[FailingTaskset, ...]:
    """Return the tasksets whose newest rollouts fail. Raises TransportError if the log cannot be asked."""
    num_partitions = len(transport.admin.end_offsets("rollouts"))
    newest = sorted(
        read_tails(transport, ("rollouts",), -(-2 * NEWEST // max(1, num_partitions))),
        key=lambda record: -record.timestamp_s,
    )
    seen: dict[str, list[Record]] = defaultdict(list)
    for record in [one for one in newest if header(one, "status") != RolloutStatus.skipped][:NEWEST]:
        seen[header(record, "taskset") or ""].append(record)
    found = []
    for taskset, records in sorted(seen.items()):
        failed = [record for record in records if header(record, "status") == RolloutStatus.failed]
        if len(records) >= LEAST and len(failed) >= SHARE * len(records):
            error = _error(transport, failed[0])
            found.append(FailingTaskset(taskset=taskset, num_failed=len(failed), num_seen=len(records), error=error))
    return tuple(found)


def _error(transport: Transport, failed: Record) -> str:
    record = read_records(transport, failed.place, [failed.offset]).get(failed.offset)
    try:
        message = codec.from_record(record) if record is not None and record.value is not None else None
    except ContractError:
        message = None
    error = message.error if isinstance(message, Rollout) else None
    return (error or "without an error")[:ERROR_CHARACTERS]
