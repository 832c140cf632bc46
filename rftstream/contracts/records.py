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
"""The partitions that were requested. A run has few, and one is requested with every record."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record on the log. `msgspec.structs.replace` makes a modified copy.

    There are many records, and none of them can be part of a reference cycle. A struct is made in a fifth of a
    dataclass's time, and the garbage collector skips it."""

    topic: str
    partition: int
    offset: int
    timestamp_s: float
    key: bytes | None
    value: bytes | None
    """The body; None for a tombstone, and if the reader leaves bodies out."""
    headers: Headers

    @property
    def place(self) -> TopicPartition:
        """Partition of the record."""
        return _place(self.topic, self.partition)

    def header(self, name: str) -> bytes | None:
        """Return the value of the first header of this name, or None if the record has none."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def number(self, name: str) -> int | None:
        """Return the number in a header, or None if it is missing or not a number. Anybody may write a record, so a
        header may have any value."""
        text = self.header(name) or b""
        return int(text) if text.isdigit() and len(text) < 20 else None

    def text(self, name: str) -> str:
        """Return the text of a header, "" if it is missing. Bytes that are not text are written as escapes."""
        return (self.header(name) or b"").decode("utf-8", "backslashreplace")

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A record to be published. It is a class of the same kind as `Record`."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    """The body; None for a tombstone, which withdraws the record of the key on a compacted topic."""
    headers: Headers = ()

    @property
    def num_bytes(self) -> int:
        """Size of key, value and headers together, which MAX_RECORD_BYTES limits."""
        size = sum(map(len, chain.from_iterable(self.headers)))
        if self.key is not None:
            size += len(self.key)
        return size if self.value is None else size + len(self.value)
