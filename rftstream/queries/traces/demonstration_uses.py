"""From a demonstration to the batches that it was in, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ConfigError
from rftstream.queries.traces.lineage import Headers, Node, header, last_line, number

DEMONSTRATION_IDS = "experts/"
"""Prefix of ids that come from demonstrations: `experts/pass/number/0`."""

Uses = Callable[[int, int | None], list[Node]]
"""A function from a demonstration's number and a pass (None: all passes) to the batches that it was in."""


def trace_demonstration(headers: Headers, text: str, uses: Uses, wanted: int | str, taken: int | None = None) -> Node:
    """By its number or its id; `taken`: in this pass alone. ConfigError if there is none."""
    places = headers.places("experts")
    if isinstance(wanted, int):
        places = [TopicPartition("experts", wanted % len(places))]
    numbered = ((number(record, "number"), record) for record in headers.scan(places))
    found = next(
        (
            (count, record)
            for count, record in numbered
            if count is not None and wanted in (count, header(record, "id"))
        ),
        None,
    )
    if found is None:
        raise ConfigError(
            f"trace: {text}: no such demonstration on experts; `rftstream inspect RUN experts` lists them"
        )
    count, record = found
    node = Node(kind="demonstration", name=header(record, "id") or "", record=record, facts=_facts(headers, record))
    node.children += _letters(headers, record)
    node.children += uses(count, taken) or [Node(kind="batch", name="", facts={"is": "not yet"})]
    return node


def _facts(headers: Headers, record: Record) -> dict[str, Any]:
    message = headers.message_of(record)
    if not isinstance(message, Demonstration):
        return {"why": message}
    pair = message.preference
    answer = (pair.chosen if pair is not None else message.messages)[-1].content
    return {
        "number": message.number,
        "from": message.source,
        "is": "a chat" if pair is None else "a pair",
        "weight": message.weight,
        "ends with": repr(answer if len(answer) <= 60 else f"{answer[:57]}..."),
    }


def _letters(headers: Headers, record: Record) -> Iterator[Node]:
    wanted = f"buffer/experts/{record.partition}/{record.offset}"
    for letter in headers.all_of("dead"):
        if header(letter, "id") == wanted:
            message = headers.message_of(letter)
            why = last_line(message.detail) if isinstance(message, DeadLetter) else str(message)
            yield Node(kind="dead", name="", record=letter, facts={"reason": header(letter, "reason"), "why": why})
