"""A member of a group on an embedded log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import RftError, TransportError
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.checks import PUT_OUT, choose_positions
from rftstream.transport.cursors import CursorMember
from rftstream.transport.embedded import groups
from rftstream.transport.embedded.clients import LogCursors, all_positions
from rftstream.transport.embedded.store import Mark, Store
from rftstream.transport.embedded.wakeup import is_dead

log = logging.getLogger(__name__)

_BEATS_PER_SESSION = 5
_TRIES_PER_BEAT = 4
_LOOK_AT_PEERS_S = 0.5
_LONGEST_TURN_S = 0.25
"""Longest wait of a heartbeat for the write lock, in seconds, since `poll` must not block."""


class Heart:
    """Writes the heartbeats of a member while its worker is busy, in a thread with its own connection.

    The member makes it and closes it. The thread starts when it is first needed."""

    def __init__(self, member: EmbeddedMember) -> None:
        self._member = member
        self._works = False
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep the membership alive inside of this context."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
            self._thread.start()
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def _beat(self) -> None:
        store: Store | None = None
        own, every_s = self._member.store, self._member.beat_every_s
        while not self._ends.wait(every_s):
            if self._works:
                with suppress(RftError):  # the next heartbeat may succeed
                    store = store or Store(own.folder, clock=own.clock, create=False, busy_timeout_s=every_s)
                    self._member.beat_by(store)
        if store is not None:
            store.close()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()


class EmbeddedMember(CursorMember):
    """`Member` of a group on an embedded log. `EmbeddedTransport.member` makes it, and it joins at once.

    `poll` and `has_data` keep the membership alive: they write a heartbeat when one is due, remove dead members, and
    read the newest assignment."""

    _cursors: LogCursors

    def __init__(
        self, store: Store, group: str, topics: Collection[str], *, name: str, session_timeout_s: float
    ) -> None:
        for topic in topics:
            store.topic(topic)
        super().__init__(LogCursors(store, {}, topics=frozenset(topics)), group=group, name=name)
        self.store = store
        self._session_timeout_s = session_timeout_s
        self.topics = frozenset(topics)
        self._closed = False
        self._heart = Heart(self)
        self._join()

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        self.keep_alive()
        return self._cursors.fetch(max_records, max_bytes)

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        return choose_positions(all_positions(self.store, self._group), partitions, group=self._group)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._group, dict(self._assignment), self._member)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._heart.close()
        try:
            groups.leave(self.store, self._group, self._member)
        finally:
            if self.pipe is not None:
                self.pipe.close()

    def working(self) -> AbstractContextManager[None]:
        return self._heart.working()

    @property
    def beat_every_s(self) -> float:
        """Seconds between two heartbeats."""
        return self._session_timeout_s / _BEATS_PER_SESSION

    def beat_by(self, store: Store) -> None:
        """Write a heartbeat if one is due, with another connection than the member's own. Called in another thread,
        while the member's own thread is busy."""
        if store.clock() - self._last_beat_s >= self.beat_every_s:
            groups.beat(store, self._group, self._member, timeout_s=self.beat_every_s)

    def has_data(self) -> bool:
        """Return whether `wait` should end: the assignment has changed, or there are records."""
        before = self._assignment
        self.keep_alive()
        return self._assignment is not before or self._cursors.has_data()

    def keep_alive(self) -> None:
        """Write a heartbeat, remove dead members, and read the newest assignment. It never raises for a temporary
        fault."""
        try:
            self._beat_if_due()
            self._look_at_peers_if_due()
            self._refresh()
        except TransportError:
            # The log is full or blocked just now. This holds for all members, so none of them removes this one.
            pass

    def _join(self) -> None:
        self.pipe = self.store.wakeup_pipes.of_member(self._group)
        try:
            self._member = groups.join(
                self.store,
                group=self._group,
                name=self.name,
                topics=self.topics,
                session_timeout_s=self._session_timeout_s,
                pipe=self.pipe.path if self.pipe is not None else "",
            )
        except BaseException:
            if self.pipe is not None:
                self.pipe.close()
                self.pipe = None
            raise
        self._next_beat_s = self.store.clock() + self.beat_every_s
        self._last_beat_s = self.store.clock()
        self._next_look_s = time.monotonic() + _LOOK_AT_PEERS_S
        self._seen_mark: Mark | None = None
        self._generation = -1
        self._peers: Mapping[int, str] = {}
        self._refresh()

    def _join_again(self) -> None:
        """Join as a new member, with new assignment numbers. Called when this member was away too long and was
        removed."""
        log.warning(PUT_OUT, self.name, self._group, self._session_timeout_s)
        if self.pipe is not None:
            self.pipe.close()
        self._join()

    def _beat_if_due(self) -> None:
        now_s = self.store.clock()
        if self._last_beat_s <= now_s < self._next_beat_s:
            return
        # A clock that was set back also makes a heartbeat due. The next one is due soon, in case this one fails.
        every_s = self.beat_every_s
        self._last_beat_s = now_s
        self._next_beat_s = now_s + every_s / _TRIES_PER_BEAT
        if not groups.beat(self.store, self._group, self._member, timeout_s=min(_LONGEST_TURN_S, every_s)):
            self._join_again()
        else:
            self._next_beat_s = now_s + every_s

    def _look_at_peers_if_due(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_AT_PEERS_S
        dead = [peer for peer, pipe in self._peers.items() if peer != self._member and pipe and is_dead(pipe)]
        if dead:
            groups.put_out(self.store, self._group, dead, timeout_s=_LONGEST_TURN_S)

    def _refresh(self) -> None:
        mark = self.store.mark()
        if mark == self._seen_mark:
            return
        if groups.generation(self.store, self._group) != self._generation:
            state = groups.group_state(self.store, self._group, self._member)
            self._generation = state.generation
            self._peers = state.peer_pipes
            if self._member not in state.peer_pipes:
                self._join_again()
                return
            if state.assignment != self._assignment:
                changed = [place for place, number in self._assignment.items() if state.assignment.get(place) != number]
                self._cursors.forget(changed)
                self._cursors.wake()
                self._assignment = state.assignment
        self._seen_mark = mark
