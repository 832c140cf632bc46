"""How many groups were admitted, and what became of them, by headers and committed positions alone: for a look at a run
that costs little. The audit counts them from the records."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

from rftstream.contracts.outcomes import DecidedSequences, GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.roles.feeder import FEEDER
from rftstream.service.role import Log


def count_groups(log: Log) -> tuple[dict[str, int], int]:
    """Return how many groups have each result, and the newest batch sequence (-1: none)."""
    counts: Counter[str] = Counter()
    newest, decided = -1, DecidedSequences()
    for record in log.read("outcomes", bodies=False):
        sequence = record.header("sequence") or b""
        if record.header("late") is None and sequence.isdigit() and int(sequence) not in decided:
            decided.add(int(sequence))
            counts[(record.header("result") or b"?").decode(errors="replace")] += 1
            batch = record.number("batch_sequence")
            newest = max(newest, -1 if batch is None else batch)
    return {str(result): counts[result] for result in GroupResult}, newest


def feeder_cursor(log: Log) -> dict[str, Any]:
    """Return the feeder's cursor, which stands beside its position; empty where there is none."""
    position = log.committed(FEEDER.name).get(TopicPartition("steps", 0))
    with contextlib.suppress(ValueError):
        cursor = json.loads(position.metadata) if position is not None and position.metadata else {}
        return cursor if isinstance(cursor, dict) else {}
    return {}
