"""Rules of saved pieces and of what they refer to, left out one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rftstream.contracts.beside import Beside, Columns, join
from rftstream.contracts.records import TopicPartition
from rftstream.roles.explorer import open_segment as segment_module
from rftstream.roles.explorer import step as explorer_module
from rftstream.roles.explorer.saved.saved_states import SavedStates
from rftstream.service.loops.owned_partitions import PartialsRestore
from rftstream.service.loops.results import SavedRecords
from rftstream.transport.memory.clients import MemoryProducer
from tests.simulation.changes import changed


def states_of_anybody() -> Iterator[None]:
    """What no piece refers to goes at once, whosever the partition is now."""
    listed = SavedStates._listed

    def mutated(self: SavedStates, names: Any, known: Any) -> None:
        listed(self, names, known)
        self._condemned += known.orphans

    with changed(SavedStates, "_listed", mutated):
        yield


def pieces_left() -> Iterator[None]:
    with changed(explorer_module, "tombstones", lambda rollout_id, partition, pieces: ()):
        yield


def pieces_of_anybody() -> Iterator[None]:
    """A transaction with nothing but pieces has no positions, so nobody asks whose the partition is."""
    commit = MemoryProducer.commit

    def mutated(self: MemoryProducer, records: Any, *, positions: Any = None, group: Any = None, snapshot: Any = None):  # type: ignore[no-untyped-def]
        if records and {record.topic for record in records} == {"partials"}:
            positions = snapshot = None
        commit(self, records, positions=positions, group=group, snapshot=snapshot)

    with changed(MemoryProducer, "commit", mutated):
        yield


def pieces_read_too_early() -> Iterator[None]:
    """Up to where they could be read when the partition came, and not after the positions were stable."""
    begin = PartialsRestore.__init__

    def mutated(self: PartialsRestore, transport: Any, member: Any, places: Any, topic: str | None = None) -> None:
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

    with changed(PartialsRestore, "__init__", mutated):
        yield


def values_of_neighbours() -> Iterator[None]:
    """What stands beside the tokens of a piece moves by a token."""
    cut = segment_module.cut_columns

    def mutated(columns: Columns, start: int, stop: int | None = None) -> dict[str, Beside]:
        return {
            name: join([one.cut(len(one) - 1), one.cut(0, len(one) - 1)]) for name, one in cut(columns, start).items()
        }

    with changed(segment_module, "cut_columns", mutated):
        yield


def pieces_saved_again() -> Iterator[None]:
    """After a commit with an unknown result."""
    with changed(SavedRecords, "there", lambda self, results: set()):
        yield
