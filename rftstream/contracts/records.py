"""Records: what the log holds. A message is encoded into one (`codec`); a transport carries it."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import msgspec

Headers = tuple[tuple[str, bytes], ...]


class TopicPartition(NamedTuple):
    """A partition of a topic; its text is `topic[partition]`."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


_place = lru_cache(maxsize=65_536)(TopicPartition)
"""The partitions that were asked for. A run has few, and asks for one with every record."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as it stands on the log. `msgspec.structs.replace` makes another one of it.

    There are many of them, and they hold nothing that could hold them: this kind of class is made in a fifth of a
    dataclass's time, and the garbage collector passes it over."""

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
        return _place(self.topic, self.partition)

    def header(self, name: str) -> bytes | None:
        """Return the value of the first header of this name, or None if the record has none."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def number(self, name: str) -> int | None:
        """Return the number that a header says, or None if it is missing or says none. Anybody may write a record, so a
        header may be anything."""
        text = self.header(name) or b""
        return int(text) if text.isdigit() and len(text) < 20 else None

    def text(self, name: str) -> str:
        """Return the text of a header, "" if it is missing. Bytes that are no text are written as escapes."""
        return (self.header(name) or b"").decode("utf-8", "backslashreplace")

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A record to be published. It is a class of the same kind as `Record`."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    """The body; None for a tombstone, which takes back what the key had on a compacted topic."""
    headers: Headers = ()

    @property
    def num_bytes(self) -> int:
        """The size of key, value and headers together, as MAX_RECORD_BYTES limits it."""
        size = sum(map(len, chain.from_iterable(self.headers)))
        if self.key is not None:
            size += len(self.key)
        return size if self.value is None else size + len(self.value)
