"""Reading `control` and the topics that a role follows. All workers see all of it: from the first record on, or from
the newest summary on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rftstream.contracts.records import Record, TopicPartition
from rftstream.service.reading import begin_positions
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log, Received
from rftstream.transport.base import Transport


class FollowedTopics:
    """The reader of the topics that a concurrent role follows. The loop makes it together with itself,
    calls `hand_on` in each slice, asks `caught_up` before the step has to know what stands there, and calls `close`
    last."""

    def __init__(
        self,
        transport: Transport,
        topics: Sequence[str],
        take: Callable[[Record], None],
        *,
        rule: RecordsInForce,
        summarised: Collection[str],
        see: Callable[[Received], None],
    ) -> None:
        """Open the reader of `control` and of `topics`; TransportError if the log does not answer. `take` is given each
        record once; a record for which it raised is given to it again. `see` is given the summaries of the topics in
        `summarised`, before anything else; `rule` judges what comes after them."""
        self._transport, self._topics = transport, topics
        positions = begin_positions(transport, ("control", *topics))
        log = Log(transport, rule)
        for topic in summarised:
            beginning = begin_with_summary(log, topic)
            positions |= beginning.positions
            for summary in beginning.received():
                see(summary)
        self.reader = transport.reader(positions)
        self._take = take
        self._unseen: list[Record] = []
        """Records that were polled and not taken: the reader does not deliver them again."""
        self._ends: dict[TopicPartition, int] | None = None
        """The ends up to which has to be read before the step knows what stood there; None: not asked for yet."""
        self._caught_up = False

    def hand_on(self) -> bool:
        """Hand on what is new, and return whether there was anything."""
        self._unseen += self.reader.poll()
        num_unseen = len(self._unseen)
        while self._unseen:
            self._take(self._unseen[0])
            del self._unseen[0]
        return bool(num_unseen)

    def caught_up(self) -> bool:
        """Return whether all was handed on that stood there when this was first asked."""
        if not self._caught_up:
            if self._ends is None:
                self._ends = {}
                for topic in ("control", *self._topics):
                    self._ends |= self._transport.admin.end_offsets(topic)
            self._caught_up = not self._unseen and all(
                self.reader.position(place) >= end for place, end in self._ends.items()
            )
        return self._caught_up

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
