"""A log for one machine: one SQLite file in a folder, for any number of processes, without a server.

    folder/log.sqlite   the records, positions and members (store.py); log.sqlite-wal, -shm are SQLite's
    folder/log.writer   the write lock and a note about its holder (lock.py)
    folder/bells/       named pipes of waiting processes (wakeup.py)

A killed writer leaves no partial transaction: SQLite rolls it back. After a loss of power the newest transactions may
be missing (each as a whole), except those before the last `admin.make_durable`.

A transport must not be used across a fork. Make it after the fork."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from rftstream.contracts.records import TopicPartition
from rftstream.errors import TransportError
from rftstream.transport.base import Admin, Jump, Member, Reader
from rftstream.transport.checks import own_sources
from rftstream.transport.embedded.admin import EmbeddedAdmin
from rftstream.transport.embedded.clients import EmbeddedProducer, EmbeddedReader
from rftstream.transport.embedded.lock import LockHolder
from rftstream.transport.embedded.member import EmbeddedMember
from rftstream.transport.embedded.store import Store
from rftstream.transport.embedded.wakeup import WakeupPipe

__all__ = ["EmbeddedTransport", "LockHolder"]

_LOOK_AGAIN_S = 0.5
"""Seconds after which a waiting process reads the log even if its pipe is empty.

A writer may die between its commit and its write to the pipe."""


class EmbeddedTransport:
    """`Transport` over an embedded log in `folder`.

    `clock` gives the timestamps of records and the time for sessions. With `create=False` the log must exist already.
    `busy_timeout_s` is how long a transaction waits for the write lock before it is refused."""

    def __init__(
        self,
        folder: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        create: bool = True,
        busy_timeout_s: float = 10.0,
    ) -> None:
        self._store = Store(Path(folder), clock=clock, create=create, busy_timeout_s=busy_timeout_s)
        self.admin: Admin = EmbeddedAdmin(self._store)
        self._members: list[EmbeddedMember] = []
        self._closed = False

    def jumps(self) -> list[Jump]:
        jumps, self._store.jumps[:] = list(self._store.jumps), []
        return jumps

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> EmbeddedReader:
        return EmbeddedReader(self._store, positions, bodies=bodies)

    def member(
        self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0
    ) -> EmbeddedMember:
        member = EmbeddedMember(self._store, group, topics, name=name, session_timeout_s=session_timeout_s)
        self._members.append(member)
        return member

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> EmbeddedProducer:
        """Make a producer. `timeout_s` has no effect here: a transaction is one call, which is never left open."""
        return EmbeddedProducer(self._store, transactional_id)

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        own: list[EmbeddedReader | EmbeddedMember] = own_sources(sources, EmbeddedReader, EmbeddedMember)
        while True:
            # Drain, then check, then sleep: a commit after the check writes to the pipe after the drain.
            pipes = self._pipes(own)
            for pipe in pipes.values():
                pipe.drain()
            # All sources are asked, since the call keeps a membership alive.
            if True in [source.has_data() for source in own]:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            poll = select.poll()
            for fd in self._pipes(own):
                poll.register(fd, select.POLLIN)
            poll.poll(max(1.0, min(left_s, _LOOK_AGAIN_S) * 1000))

    def lock_holder(self) -> LockHolder | None:
        """Return the process that has the write lock now, and since when. A supervisor calls it, and kills a holder
        that is stopped."""
        return self._store.lock_holder()

    def close(self) -> None:
        """Let the members leave, and close the log. If a process dies without this call, the others remove its
        members."""
        if self._closed:
            return
        self._closed = True
        for member in self._members:
            with suppress(TransportError):  # its session will expire instead
                member.close()
        self._store.close()

    def _pipes(self, sources: Collection[EmbeddedReader | EmbeddedMember]) -> dict[int, WakeupPipe]:
        """Return the pipes to wait on for these sources, by file descriptor."""
        pipes: list[WakeupPipe | None] = [
            self._store.wakeup_pipes.of_topic(topic)
            for topic in {topic for source in sources for topic in source.topics}
        ]
        pipes += [source.pipe for source in sources if isinstance(source, EmbeddedMember)]
        return {pipe.fd: pipe for pipe in pipes if pipe is not None}
