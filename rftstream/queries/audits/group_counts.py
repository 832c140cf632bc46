"""Counts admitted groups and their fates from summaries and committed positions: a cheap overview of a run of any
length. The audit counts them from the records."""

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
    """Return the totals of a run's outcomes, read from their newest summary on."""
    start = begin_with_summary(log, "outcomes")
    for _ in log.rule.messages(log.read("outcomes", start=start.positions)):
        pass  # they only have to be checked for being in force
    return log.rule.outcomes


def feeder_cursor(log: Log) -> dict[str, Any]:
    """Return the feeder's cursor, which is stored beside its position; empty if there is none."""
    position = log.committed(FEEDER.name).get(TopicPartition("steps", 0))
    with contextlib.suppress(ValueError):
        cursor = json.loads(position.metadata) if position is not None and position.metadata else {}
        return cursor if isinstance(cursor, dict) else {}
    return {}
