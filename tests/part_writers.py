"""Writers of versions in parts, as the ranks of a training job are, in one process."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.errors import WeightsError
from rftstream.weights.snapshot import Line, RawTensor
from rftstream.weights.stores.store import ObjectStore, StoredObject
from rftstream.weights.writer import PartWriter


class PartWriters:
    """A VersionWriter. Tensors go to its parts in turns. The parts in `broken` fail when they write."""

    def __init__(self, store: ObjectStore, num: int = 2, model: str = "m") -> None:
        self.parts = [PartWriter(store, model, threads=1, part=part) for part in range(num)]
        self.broken: set[int] = set()

    def take(self, tensors: Mapping[str, RawTensor], name: VersionName, *, parent: VersionName | None) -> None:
        for part, writer in enumerate(self.parts):
            mine = sorted(tensors)[part :: len(self.parts)]
            writer.take({one: tensors[one] for one in mine}, name, parent=parent)

    def write(self, kind: WeightsKind) -> list[StoredObject] | None:
        written: list[StoredObject] = []
        for part, writer in enumerate(self.parts):
            if part in self.broken:
                raise WeightsError("a rank was killed")
            if (found := writer.write(kind)) is None:
                return None
            written += found
        return written

    def lines(self) -> list[Line]:
        return sorted(line for writer in self.parts for line in writer.lines())
