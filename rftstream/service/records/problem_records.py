"""Read all of `problems` in order, or read one problem again by its offset."""

from __future__ import annotations

from collections.abc import Iterator

from rftstream.contracts import codec
from rftstream.contracts.messages import Message
from rftstream.contracts.problems import NewProblem
from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import ContractError
from rftstream.service.reading import read_records
from rftstream.service.role import Log
from rftstream.transport.base import Transport

PROBLEMS = TopicPartition("problems", 0)


def problem_records(log_: Log, *, bodies: bool = True, settled: bool = False) -> Iterator[Record]:
    """Yield all records of `problems` up to its end. The arguments are those of `Log.read`. Logs of earlier releases
    lack the topic and yield nothing."""
    if PROBLEMS.topic in log_.transport.admin.topics():
        yield from log_.read(PROBLEMS.topic, bodies=bodies, settled=settled)


def read_problems(log_: Log) -> Iterator[tuple[Record, Message | None]]:
    """Yield all records of `problems` up to its end, with their messages. The message is None if the record is foreign
    or cannot be decoded: it is no problem of any taskset."""
    for record in problem_records(log_):
        message: Message | None = None
        if record.value is not None and not codec.is_foreign(record):
            try:
                message = codec.from_record(record)
            except ContractError:
                message = None
        yield record, message


class ProblemReader:
    """Reads single problems again. `get` is passed to GrowingTasksets."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, offset: int) -> NewProblem:
        """Return the problem at an offset of `problems`. ContractError if there is none at this offset."""
        record = read_records(self._transport, PROBLEMS, [offset]).get(offset)
        message = None if record is None or record.value is None else codec.from_record(record)
        if not isinstance(message, NewProblem):
            raise ContractError(
                f"problems[0]@{offset}: found no problem, expected the one that was there; nothing may be deleted there"
            )
        return message
