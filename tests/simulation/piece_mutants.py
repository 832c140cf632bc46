"""Rules of saved pieces and of what they refer to, left out one at a time."""

from __future__ import annotations

from typing import Any

from rftstream.contracts.beside import Beside, Columns, join
from rftstream.contracts.records import TopicPartition
from rftstream.roles.explorer import open_segment as segment_module
from rftstream.roles.explorer.saved.saved_states import SavedStates
from rftstream.service.loops.owned_partitions import PartialsRestore
from rftstream.transport.memory.clients import MemoryProducer
from tests.simulation.changes import around


@around(SavedStates, "_listed")
def states_of_anybody(listed: Any, self: SavedStates, names: Any, known: Any) -> None:
    """What no piece refers to goes at once, whosever the partition is now."""
    listed(self, names, known)
    self._condemned += known.orphans


@around(MemoryProducer, "commit")
def pieces_of_anybody(
    commit: Any, self: MemoryProducer, records: Any, *, positions: Any = None, group: Any = None, snapshot: Any = None
) -> None:
    """A transaction with nothing but pieces has no positions, so nobody asks whose the partition is."""
    if records and {record.topic for record in records} == {"partials"}:
        positions = snapshot = None
    commit(self, records, positions=positions, group=group, snapshot=snapshot)


@around(PartialsRestore, "__init__")
def pieces_read_too_early(
    begin: Any, self: PartialsRestore, transport: Any, member: Any, places: Any, topic: str | None = None
) -> None:
    """Up to where they could be read when the partition came, and not after the positions were stable."""
    ends = {}
    if topic is not None:
        known = transport.__dict__.setdefault("ends_when_it_came", {})
        for place, number in places.items():
            saved = TopicPartition(topic, place.partition)
            ends[saved] = known.setdefault((saved, number), transport._log.partitions[saved].end)
    begin(self, transport, member, places)
    if topic is not None:
        self._ends = ends
        self.reader = transport.reader(dict.fromkeys(ends, 0))


@around(segment_module, "cut_columns")
def values_of_neighbours(cut: Any, columns: Columns, start: int, stop: int | None = None) -> dict[str, Beside]:
    """What stands beside the tokens of a piece moves by a token."""
    return {name: join([one.cut(len(one) - 1), one.cut(0, len(one) - 1)]) for name, one in cut(columns, start).items()}
