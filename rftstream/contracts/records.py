"""Records: what the log holds. A message is encoded into one (`codec`); a transport carries it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

Headers = tuple[tuple[str, bytes], ...]


class TopicPartition(NamedTuple):
    """A partition of a topic; its text is `topic[partition]`."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it stands on the log."""

    topic: str
    partition: int
    offset: int
    timestamp_s: float
    key: bytes | None
    value: bytes | None
    """The body; None for a tombstone, and where a reader was told to leave bodies out."""
    headers: Headers

    @property
    def place(self) -> TopicPartition:
        """The partition that the record stands in."""
        return TopicPartition(self.topic, self.partition)

    def header(self, name: str) -> bytes | None:
        """Return the value of the first header of this name, or None if the record has none."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be published."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    """The body; None for a tombstone, which takes back what the key had on a compacted topic."""
    headers: Headers = ()

    @property
    def num_bytes(self) -> int:
        """The size of key, value and headers together, as MAX_RECORD_BYTES limits it."""
        return len(self.key or b"") + len(self.value or b"") + sum(map(len, chain.from_iterable(self.headers)))
