"""Finds the newest summaries of a topic, near the end of `summaries`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.errors import ContractError
from rftstream.service.reading import read_between, search_by_halves
from rftstream.transport.base import Transport

SUMMARIES = TopicPartition("summaries", 0)

FIRST_LOOK = 64
"""Number of offsets at the end of `summaries` that a reader searches first. Each further search covers eight times as
many. If all that a search finds are too new, the next one begins where older ones end."""


def newest_summaries(
    transport: Transport,
    topic: str,
    decode: Callable[[Record], Message | None],
    *,
    below: int,
    within: int | None = None,
) -> list[tuple[Record, Summary]]:
    """Return the two newest summaries of a topic, newest first, that cover only records below this offset; fewer if
    there are no two, or not in the last `within` offsets. `decode` returns the message of a record, or raises
    ContractError for a record that does not count."""
    admin = transport.admin
    if SUMMARIES.topic not in admin.topics():  # a run of an older release has no such topic
        return []
    begin, start = admin.begin_offsets(SUMMARIES.topic)[SUMMARIES], admin.end_offsets(SUMMARIES.topic)[SUMMARIES]
    begin = begin if within is None else max(begin, start - within)
    found: dict[int, tuple[Record, Summary]] = {}
    width = FIRST_LOOK
    while start > begin and len(found) < 2:
        start, stop, width = max(begin, start - width), start, width * 8
        there: dict[int, tuple[Record, Summary]] = {}
        is_too_new = False
        for record in read_between(transport, {SUMMARIES: start}, {SUMMARIES: stop}):
            if (is_old := _is_old(record, topic, below)) is None:
                continue
            if not is_old:
                is_too_new = True
                continue
            try:
                message = decode(record)
            except ContractError:
                continue
            if isinstance(message, Summary) and message.topic == topic and message.through <= below:
                there.setdefault(message.through, (record, message))
        found |= there
        if is_too_new and not found:
            is_old_one = partial(_is_old, topic=topic, below=below)
            _, start = search_by_halves(transport, SUMMARIES, (begin, start), is_old_one, within=FIRST_LOOK)
            width = FIRST_LOOK
    return [found[through] for through in sorted(found, reverse=True)[:2]]


def _is_old(record: Record, topic: str, below: int) -> bool | None:
    """Return whether a summary covers only records below this offset; None for summaries of other topics."""
    through = record.header("through") or b""
    return int(through) <= below if record.header("topic") == topic.encode() and through.isdigit() else None
