"""Reading `control` and the topics that a role follows. All workers see all of it, from the first record on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rftstream.contracts.records import Record
from rftstream.service.reading import begin_positions
from rftstream.transport.base import Transport


class FollowedTopics:
    """The reader of the topics that a concurrent role or a source follows. The loop makes it together with itself,
    calls `hand_on` in each slice, and `close` last."""

    def __init__(self, transport: Transport, topics: Sequence[str], take: Callable[[Record], None]) -> None:
        """Open the reader of `control` and of `topics`; TransportError if the log does not answer. `take` is given each
        record once; a record for which it raised is given to it again."""
        self.reader = transport.reader(begin_positions(transport, ("control", *topics)))
        self._take = take
        self._unseen: list[Record] = []
        """Records that were polled and not taken: the reader does not deliver them again."""

    def hand_on(self) -> bool:
        """Hand on what is new, and return whether there was anything."""
        self._unseen += self.reader.poll()
        num_unseen = len(self._unseen)
        while self._unseen:
            self._take(self._unseen[0])
            del self._unseen[0]
        return bool(num_unseen)

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
