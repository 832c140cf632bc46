"""How many groups were admitted, and what became of them, by summaries and committed positions: for a look at a run
that costs little, however long it is. The audit counts them from the records."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rftstream.contracts.records import TopicPartition
from rftstream.roles.feeder import FEEDER
from rftstream.service.records.outcomes_in_force import OutcomesInForce
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log


def count_outcomes(log: Log) -> OutcomesInForce:
    """Return what the outcomes of a run amount to, from their newest summary on."""
    start = begin_with_summary(log, "outcomes")
    for _ in log.rule.messages(log.read("outcomes", start=start.positions)):
        pass  # they only have to be judged
    return log.rule.outcomes


def feeder_cursor(log: Log) -> dict[str, Any]:
    """Return the feeder's cursor, which stands beside its position; empty where there is none."""
    position = log.committed(FEEDER.name).get(TopicPartition("steps", 0))
    with contextlib.suppress(ValueError):
        cursor = json.loads(position.metadata) if position is not None and position.metadata else {}
        return cursor if isinstance(cursor, dict) else {}
    return {}
