"""A member of a group on an embedded log."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import TransportError
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.checks import choose_positions
from rftstream.transport.cursors import CursorMember
from rftstream.transport.embedded import groups
from rftstream.transport.embedded.clients import LogCursors, all_positions
from rftstream.transport.embedded.store import Mark, Store
from rftstream.transport.embedded.wakeup import is_dead

_BEATS_PER_SESSION = 5
_TRIES_PER_BEAT = 4
_LOOK_AT_PEERS_S = 0.5
_LONGEST_TURN_S = 0.25
"""Longest wait of a heartbeat for its turn to write, in seconds; `poll` must not block."""


class EmbeddedMember(CursorMember):
    """`Member` of a group on an embedded log. `EmbeddedTransport.member` makes it, and it joins at once.

    `poll` and `has_data` keep it alive: they write a heartbeat when one is due, put out members that have died, and
    take over the newest assignment."""

    _cursors: LogCursors

    def __init__(
        self, store: Store, group: str, topics: Collection[str], *, name: str, session_timeout_s: float
    ) -> None:
        for topic in topics:
            store.topic(topic)
        super().__init__(LogCursors(store, {}, topics=frozenset(topics)), group=group, name=name)
        self._store = store
        self._session_timeout_s = session_timeout_s
        self.topics = frozenset(topics)
        self._closed = False
        self._join()

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        self.keep_alive()
        return self._cursors.fetch(max_records, max_bytes)

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        return choose_positions(all_positions(self._store, self._group), partitions, group=self._group)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._group, dict(self._assignment), self._member)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            groups.leave(self._store, self._group, self._member)
        finally:
            if self.pipe is not None:
                self.pipe.close()

    def has_data(self) -> bool:
        """Return whether `wait` should end: the assignment has changed, or there are records."""
        before = self._assignment
        self.keep_alive()
        return self._assignment is not before or self._cursors.has_data()

    def keep_alive(self) -> None:
        """Write a heartbeat, look whether other members have died, and take over the newest assignment. Never raises
        for a fault that may pass."""
        try:
            self._beat_if_due()
            self._look_at_peers_if_due()
            self._refresh()
        except TransportError:
            # The log is full or blocked just now. Others are as stuck as this one, so nobody puts it out.
            pass

    def _join(self) -> None:
        self.pipe = self._store.wakeup_pipes.of_member(self._group)
        try:
            self._member = groups.join(
                self._store,
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
        self._next_beat_s = self._store.clock() + self._session_timeout_s / _BEATS_PER_SESSION
        self._last_beat_s = self._store.clock()
        self._next_look_s = time.monotonic() + _LOOK_AT_PEERS_S
        self._seen_mark: Mark | None = None
        self._generation = -1
        self._peers: Mapping[int, str] = {}
        self._refresh()

    def _join_again(self) -> None:
        """Join as a new member, with new assignment numbers. Called when this member was away too long and was put
        out."""
        if self.pipe is not None:
            self.pipe.close()
        self._join()

    def _beat_if_due(self) -> None:
        now_s = self._store.clock()
        if self._last_beat_s <= now_s < self._next_beat_s:
            return
        # A clock that was set back makes a beat due as well. The next one is due soon, in case this try fails.
        every_s = self._session_timeout_s / _BEATS_PER_SESSION
        self._last_beat_s = now_s
        self._next_beat_s = now_s + every_s / _TRIES_PER_BEAT
        if not groups.beat(self._store, self._group, self._member, timeout_s=min(_LONGEST_TURN_S, every_s)):
            self._join_again()
        else:
            self._next_beat_s = now_s + every_s

    def _look_at_peers_if_due(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_AT_PEERS_S
        dead = [peer for peer, pipe in self._peers.items() if peer != self._member and pipe and is_dead(pipe)]
        if dead:
            groups.put_out(self._store, self._group, dead, timeout_s=_LONGEST_TURN_S)

    def _refresh(self) -> None:
        mark = self._store.mark()
        if mark == self._seen_mark:
            return
        if groups.generation(self._store, self._group) != self._generation:
            state = groups.group_state(self._store, self._group, self._member)
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
