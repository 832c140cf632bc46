"""A run's log on Apache Kafka, for any number of machines.

These modules handle the difficulties of client and broker:

    connection.py  settings, names on the broker, errors
    feed.py        the records that a consumer has fetched: fair, limited, without blocking
    member.py      readers and members of groups, and who gets which partitions
    producer.py    transactions
    admin.py       topics, positions, lag, retention
    ends.py        first and last offsets of partitions
    access.py      rights of users
    compat.py      all uses of private parts of kafka-python, with
                   compat_consumer.py
    selector.py    how the clients wait for their sockets

No connection is made before it is used, and nothing may be used across a fork."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from rftstream.contracts.records import TopicPartition
from rftstream.transport.base import Jump, Member, Reader
from rftstream.transport.checks import own_sources
from rftstream.transport.kafka.admin import KafkaAdmin
from rftstream.transport.kafka.connection import CONNECT_S, KafkaClientFactory, Section, throttled
from rftstream.transport.kafka.member import KafkaMember, KafkaReader
from rftstream.transport.kafka.producer import WATCHDOG_S, KafkaProducer

__all__ = ["KafkaTransport"]

_MARK = ".control"
"""Suffix of the name of a topic that every run has."""


class KafkaTransport:
    """`Transport` on Kafka, for one run.

    With `create=False` the run's topics must exist already. `connect_s` is the time limit for a broker's first answer,
    and `watchdog_s` that of a transaction, both in seconds."""

    def __init__(
        self,
        run_id: str,
        section: Section,
        *,
        create: bool = True,
        connect_s: float = CONNECT_S,
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        self._clients = KafkaClientFactory(run_id, section, connect_s=connect_s)
        self._watchdog_s = watchdog_s
        self.admin: KafkaAdmin = KafkaAdmin(self._clients, create=create)
        self._opened: dict[KafkaReader | KafkaMember | KafkaProducer, None] = {}
        """Whatever is open, in order. Who follows a run opens readers as long as it lives, and closes them."""
        self._answered = threading.Event()
        self._closed = False

    @staticmethod
    def check(section: Section) -> None:
        """Raise ConfigError for settings that are wrong with any broker."""
        KafkaClientFactory("", section)

    @staticmethod
    def runs(section: Section) -> list[str]:
        """Return the names of the runs that have topics on these servers."""
        admin = KafkaAdmin(KafkaClientFactory("", section))
        try:
            return sorted(name.removesuffix(_MARK) for name in admin.all_topics() if name.endswith(_MARK))
        finally:
            admin.close()

    @property
    def throttled_s(self) -> float:
        """Return for how many seconds brokers have throttled this process so far, by their quotas."""
        return throttled.total_s

    def jumps(self) -> list[Jump]:
        jumps = self._clients.jumps
        return [jumps.pop(0) for _ in range(len(jumps))]

    def reader(self, positions: Mapping[TopicPartition, int], *, bodies: bool = True) -> KafkaReader:
        for place in positions:
            self.admin.check_place(place)
        reader = KafkaReader(
            self._clients, positions, bodies=bodies, on_close=lambda reader: self._opened.pop(reader, None)
        )
        self._opened[reader] = None
        return reader

    def member(self, group: str, topics: Collection[str], *, name: str, session_timeout_s: float = 10.0) -> KafkaMember:
        for topic in topics:
            self.admin.settings(topic)
        member = KafkaMember(
            self._clients,
            group,
            topics,
            name=name,
            session_timeout_s=session_timeout_s,
            committed=self.admin.stable_positions,
        )
        self._opened[member] = None
        return member

    def producer(self, transactional_id: str, *, timeout_s: float = 10.0) -> KafkaProducer:
        producer = KafkaProducer(
            self._clients,
            transactional_id,
            timeout_s=timeout_s,
            settings=self.admin.settings,
            watchdog_s=self._watchdog_s,
        )
        self._opened[producer] = None
        return producer

    def wait(self, sources: Collection[Reader | Member], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        own: list[KafkaReader | KafkaMember] = own_sources(sources, KafkaReader, KafkaMember)
        while True:
            # Clear, then check, then sleep: an arrival after the check sets the event after it was cleared.
            self._answered.clear()
            # All sources are asked, since the call keeps a membership alive.
            if True in [source.has_data() for source in own]:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            for source in own:
                source.feed.wake_on_arrival(self._answered)
            self._answered.wait(min([left_s, 1.0, *(source.look_again_s for source in own)]))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for each in reversed(list(self._opened)):
            each.close()
        self.admin.close()
