"""Counts admitted groups and their fates from summaries and committed positions: a cheap overview of a run of any
length. The audit counts them from the records."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.queries.formatting import listed, plural
from rftstream.roles.feeder import FEEDER
from rftstream.service.records.outcomes_in_force import OutcomesInForce, outcome_of_headers
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log

NUM_NEWEST = 1_000
"""Newest outcomes of a partition that are asked why they filtered."""
MUCH_FILTERED = 0.5
"""Share of filtered groups above which a status says what to look at."""
FLAT = "zero_variance"
"""The reason of groups whose rewards are all equal, by setting or by operator."""


def count_outcomes(log: Log) -> OutcomesInForce:
    """Return the totals of a run's outcomes, read from their newest summary on."""
    start = begin_with_summary(log, "outcomes")
    for _ in log.rule.messages(log.read("outcomes", start=start.positions)):
        pass  # they only have to be checked for being in force
    return log.rule.outcomes


def why_filtered(log: Log) -> dict[str, int]:
    """Return why groups were filtered, operator or rule, and how many for each, most first: of the newest
    NUM_NEWEST outcomes of each partition."""
    newest = {place: max(0, end - NUM_NEWEST) for place, end in log.ends("outcomes").items()}
    found: Counter[str] = Counter()
    for record in log.read("outcomes", start=newest, bodies=False):
        outcome = outcome_of_headers(record)
        if outcome is not None and outcome.result is GroupResult.filtered:
            found[outcome.reason] += 1
    return dict(found.most_common())


def filtered_rows(
    groups: Mapping[str, int], filtered: Mapping[str, int], *, of_all: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield rows for people: the share of `groups` that was filtered, why, and what to look at if it is large.
    `of_all`: the reasons are those of all filtered groups, not of the newest."""
    if not filtered:
        return
    share = groups.get("filtered", 0) / max(1, sum(groups.get(str(result), 0) for result in GroupResult))
    parts = ", ".join(f"{count / sum(filtered.values()):.0%} {reason}" for reason, count in filtered.items())
    reasons = f": {listed(filtered)}" if of_all else f"; of the newest of these {parts}"
    yield "filtered", f"{share:.0%} of the decided groups{reasons}"
    if share > MUCH_FILTERED:
        flat = (
            "all rewards of a group were equal: tasks too easy or too hard (Problems in the studio, by mean reward, "
            "shows which), or a reward that tells nothing apart"
        )
        first = next(iter(filtered))
        yield "look at", f"{first}: {flat if first == FLAT else 'most of what is sampled trains nothing'}"


def undecided(groups: Mapping[str, int]) -> str:
    """Return in words how many groups have no outcome: a reader's position counts all records behind the oldest of
    them, decided or not."""
    pending = groups.get("admitted", 0) - sum(groups.get(str(result), 0) for result in GroupResult)
    counted = f"{plural(pending, 'group')} without an outcome, and " if pending > 0 else ""
    return f"{counted}`rftstream audit` says what is pending"


def feeder_cursor(log: Log) -> dict[str, Any]:
    """Return the feeder's cursor, which is stored beside its position; empty if there is none."""
    position = log.committed(FEEDER.name).get(TopicPartition("steps", 0))
    with contextlib.suppress(ValueError):
        cursor = json.loads(position.metadata) if position is not None and position.metadata else {}
        return cursor if isinstance(cursor, dict) else {}
    return {}
