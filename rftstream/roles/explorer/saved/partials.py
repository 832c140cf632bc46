"""The pieces on `partials` of the rollouts in this explorer's partitions. The view is rebuilt from the log whenever the
explorer gets a partition.

Bodies are kept in memory up to a limit. Other bodies are read from the log when the rollout's task is begun."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from rftstream.contracts import codec
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import PartialRollout
from rftstream.contracts.tasks import Task
from rftstream.errors import ContractError
from rftstream.roles.explorer.saved.pieces import CannotGoOnError, SavedRollout, join_pieces
from rftstream.service.reading import read_records
from rftstream.service.role import Publish
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

TOPIC = "partials"
MAX_HELD_BYTES = 64 << 20


class Partials:
    """The saved pieces of unfinished rollouts, by partition. `workers/explorer.py` makes it. The step calls `clear` and
    `absorb` when a partition comes, `of` and `saved` when it begins a task, and then `forget`. `holds_session` covers
    rollouts whose tasks have not come yet."""

    def __init__(self, transport: Transport, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._transport = transport
        self._max_held_bytes = max_held_bytes
        self._rollouts: dict[int, dict[str, dict[int, Record]]] = {}
        """Partition -> rollout_id -> piece -> its record, without the body if there was no room."""
        self._num_bytes = 0
        """Size of the kept bodies in bytes."""

    def clear(self, partition: int) -> None:
        """Forget all pieces of a partition."""
        for rollout_id in list(self._rollouts.get(partition, {})):
            self.forget(partition, rollout_id)

    def absorb(self, record: Record) -> None:
        """Apply the next record of a partition: a piece, or a tombstone that withdraws a piece."""
        rollout_id, piece = parse_key(record.key or b"")
        pieces = self._rollouts.setdefault(record.partition, {}).setdefault(rollout_id, {})
        self._num_bytes -= _num_bytes(pieces.pop(piece, None))
        if record.value is not None:
            room = self._max_held_bytes - self._num_bytes
            pieces[piece] = record if len(record.value) <= room else _without_body(record)
            self._num_bytes += _num_bytes(pieces[piece])
        if not pieces:
            del self._rollouts[record.partition][rollout_id]

    def of(self, partition: int, rollout_id: str) -> list[Record]:
        """Return the rollout's pieces in order. Some may lack their body."""
        pieces = self._rollouts.get(partition, {}).get(rollout_id, {})
        return [pieces[number] for number in sorted(pieces)]

    def rollout_ids(self, partition: int) -> set[str]:
        """Return the rollouts of a partition that have pieces."""
        return set(self._rollouts.get(partition, ()))

    def holds_session(self, name: str) -> bool:
        """Return whether a rollout without a task here was given to the agent whose request has this digest."""
        header = name.encode("ascii")
        return any(
            record.header("session") == header
            for rollouts in self._rollouts.values()
            for pieces in rollouts.values()
            for record in pieces.values()
        )

    def forget(self, partition: int, rollout_id: str) -> None:
        """Forget the rollout's pieces, since its owner keeps track of them from now on."""
        pieces = self._rollouts.get(partition, {}).pop(rollout_id, {})
        self._num_bytes -= sum(map(_num_bytes, pieces.values()))

    def saved(self, task: Task, records: Sequence[Record]) -> SavedRollout:
        """Return the saved rollout to be continued. CannotGoOnError if the rollout must start over."""
        return join_pieces(task, self.read(records))

    def read(self, records: Sequence[Record]) -> list[PartialRollout]:
        """Return the pieces in these records of one rollout. CannotGoOnError if a record is gone or cannot be
        decoded."""
        pieces: list[PartialRollout] = []
        known = {record.offset: record for record in records if record.value is not None}
        if rest := [record.offset for record in records if record.value is None]:
            known |= read_records(self._transport, records[0].place, rest)
        for record in records:
            whole = known.get(record.offset)
            if whole is None:
                raise CannotGoOnError(f"{record} is gone")
            try:
                message = codec.from_record(whole)
            except ContractError as error:
                raise CannotGoOnError(str(error)) from None
            assert isinstance(message, PartialRollout)
            pieces.append(message)
        return pieces


def tombstones(rollout_id: str, partition: int, pieces: Iterable[int]) -> tuple[Publish, ...]:
    """Return the records that withdraw these pieces."""
    return tuple(Publish(TOPIC, partition, None, key=f"{rollout_id}#{piece}".encode("ascii")) for piece in pieces)


def numbers_of(records: Sequence[Record]) -> list[int]:
    """Return the numbers of these pieces."""
    return [parse_key(record.key or b"")[1] for record in records]


def parse_key(key: bytes) -> tuple[str, int]:
    """Return the two parts of a key `rollout_id#piece`; ("", 0) for a key of another form."""
    rollout_id, _, piece = key.decode("ascii", "replace").rpartition("#")
    return (rollout_id, int(piece)) if piece.isascii() and piece.isdigit() and len(piece) < 10 else ("", 0)


def _num_bytes(record: Record | None) -> int:
    return 0 if record is None else len(record.value or b"")


def _without_body(record: Record) -> Record:
    return msgspec.structs.replace(record, value=None)
