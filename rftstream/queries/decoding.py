"""Decodes messages for views. A record that cannot be read, or that has another kind, is skipped."""

from __future__ import annotations

from typing import TypeVar

from rftstream.contracts import codec
from rftstream.contracts.messages import Message
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError
from rftstream.service.reading import read_records
from rftstream.transport.base import Transport

M = TypeVar("M", bound=Message)


def decoded(record: Record | None, kind: type[M]) -> M | None:
    """Return the record's message, or None if it is not of this kind or cannot be read."""
    if record is None or record.value is None:
        return None
    try:
        message = codec.from_record(record)
    except ContractError:
        return None
    return message if isinstance(message, kind) else None


def message_at(transport: Transport, place: TopicPartition, offset: int | None, kind: type[M]) -> M | None:
    """Return the message at a place of the log; None as in `decoded`, or if there is no record."""
    return None if offset is None else decoded(read_records(transport, place, [offset]).get(offset), kind)
