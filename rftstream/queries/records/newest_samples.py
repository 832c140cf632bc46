"""Some of the newest scored rollouts, as rows of a table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rftstream.contracts import codec
from rftstream.contracts.records import Record
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ContractError
from rftstream.models.rendering import Renderer, joined, pieces_of_turns
from rftstream.service.reading import read_records
from rftstream.trackers.tracked import SampledRow, SampleTable
from rftstream.transport.base import Transport

EVERY_S = 60.0
"""Seconds between two tables."""
MOST_ROWS, MOST_CHARACTERS = 16, 4_000
"""Rows of a table, and characters of a prompt or completion in it."""


class SampleTables:
    """Makes a table of samples now and then. The session makes it, and calls `take` with each news."""

    def __init__(self, transport: Transport, renderer: Renderer | None) -> None:
        self._transport, self._renderer = transport, renderer
        self._made_at = -math.inf

    def take(self, news: Sequence[StepRecord | EvalResult]) -> list[SampleTable]:
        """Return a table for the newest step, unless there is none, or the last table is younger than EVERY_S."""
        step = next((one for one in reversed(news) if isinstance(one, StepRecord)), None)
        if step is None or time.monotonic() - self._made_at < EVERY_S:
            return []
        self._made_at = time.monotonic()
        rows = newest_samples(self._transport, self._renderer)
        return [SampleTable(name=step.name, rows=rows)] if rows else []


def newest_samples(transport: Transport, renderer: Renderer | None, *, most: int = MOST_ROWS) -> tuple[SampledRow, ...]:
    """Return rollouts from the ends of at most as many partitions of `verified`, the newest first."""
    ends = {place: end for place, end in transport.admin.end_offsets("verified").items() if end}
    found: list[tuple[float, SampledRow]] = []
    for place in sorted(ends, key=lambda one: (-ends[one], one))[:most]:
        newest = range(max(0, ends[place] - most), ends[place])
        try:
            found += [
                row for record in read_records(transport, place, newest).values() for row in _rows(record, renderer)
            ]
        except ContractError:
            continue
    return tuple(row for _, row in sorted(found, key=lambda pair: -pair[0])[:most])


def _rows(record: Record, renderer: Renderer | None) -> list[tuple[float, SampledRow]]:
    """Return the record's time and row; nothing for a record without a completion."""
    message = codec.from_record(record) if record.value is not None else None
    if not isinstance(message, VerifiedRollout) or (rollout := message.rollout) is None or rollout.problem is None:
        return []
    shown = pieces_of_turns(renderer, rollout.turns, rollout.segments, rollout.calls)
    said = [joined(pieces) for pieces, turn in zip(shown, rollout.turns, strict=True) if turn.role == "assistant"]
    versions = [span.version for segment in rollout.segments for span in segment.versions]
    row = SampledRow(
        version=min(versions, default=0),
        reward=None if message.verdict is None else message.verdict.reward,
        prompt=rollout.problem.messages[-1].content[:MOST_CHARACTERS],
        completion="\n".join(said)[:MOST_CHARACTERS],
    )
    return [(message.verified_at, row)]
