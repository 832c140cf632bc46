"""Reading on Kafka: by position, and as a member of a group.

Rebalancing is cooperative, with our own assignor: Kafka's does not keep partitions of one number together, and
remembers its old partitions after a removal. The client joins and leaves in its own thread. Its calls of the listener
are noted, and processed in the next `poll` or `wait`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kafka import KafkaConsumer
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor, RebalanceProtocol
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.structs import MemberState
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import PositionMissing
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.checks import PUT_OUT, check_owned, choose_positions
from rftstream.transport.kafka.client.compat_consumer import BackgroundJoin
from rftstream.transport.kafka.connection import KafkaClientFactory
from rftstream.transport.kafka.feed import Feed
from rftstream.transport.kafka.options import MIN_SESSION_S
from rftstream.transport.sharing import share_out

log = logging.getLogger(__name__)

HEARTBEATS = 20
"""Heartbeats in a session time-out. Members learn of a rebalance by them: at 10 s within half a second."""

Committed = Callable[[str, Collection[TopicPartition]], Mapping[TopicPartition, Position] | None]
"""Returns a group's positions of these partitions, or None while a commit of one of them is pending."""


class KafkaReader:
    """`Reader` on Kafka. `KafkaTransport.reader` makes it."""

    def __init__(
        self,
        clients: KafkaClientFactory,
        positions: Mapping[TopicPartition, int],
        *,
        bodies: bool,
        on_close: Callable[[KafkaReader], object] = lambda _: None,
    ) -> None:
        self._feed = Feed(clients, clients.consumer(), bodies=bodies)
        self._on_close = on_close
        self._places = frozenset(positions)
        self._most: int | None = None
        """Most records that are held: those of one poll. Who looks up a record in a long partition would otherwise
        unpack megabytes behind it. None for several partitions, which are served fairly out of all that arrived."""
        if positions:
            self._feed.consumer.assign([clients.partition(place) for place in positions])
        for place, offset in positions.items():
            self._feed.seek(place, offset)

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        self._most = max_records if len(self._places) == 1 else None
        self._feed.fill(due=False, most=self._most)
        return self._feed.take(max_records, max_bytes)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._feed.position(partition)  # Raises for a partition that the reader was not opened for.
        self._feed.seek(partition, offset)

    def position(self, partition: TopicPartition) -> int:
        return self._feed.position(partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._feed.pause(self._places & set(partitions))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._feed.resume(self._places & set(partitions))

    def close(self) -> None:
        self._feed.close()
        self._on_close(self)

    # ------------------------------------------------------------------------------------------ for `wait`

    @property
    def feed(self) -> Feed:
        """The fetched records."""
        return self._feed

    look_again_s = 0.25
    """Longest wait between two checks, in seconds."""

    def has_data(self) -> bool:
        """Return whether `poll` may have something. `KafkaTransport.wait` asks it."""
        self._feed.fill(most=self._most)
        return self._feed.has_data()


class KafkaMember:
    """`Member` of a group on Kafka. `KafkaTransport.member` makes it.

    The client joins in its own thread, and learns its partitions there. `poll` and `has_data` adopt them."""

    def __init__(
        self,
        clients: KafkaClientFactory,
        group: str,
        topics: Collection[str],
        *,
        name: str,
        session_timeout_s: float,
        committed: Committed,
    ) -> None:
        self._clients = clients
        self._group = group
        self.name = name
        self._committed = committed
        session_ms = max(session_timeout_s, MIN_SESSION_S) * 1000
        assignor = Together(lambda: self._consumer.assignment())
        self._consumer: KafkaConsumer = clients.consumer(
            client_id=name,
            group_id=clients.name(group),
            partition_assignment_strategy=[assignor],
            max_poll_interval_ms=int(session_timeout_s * 1000),
            session_timeout_ms=int(session_ms),
            heartbeat_interval_ms=int(session_ms / HEARTBEATS),
        )
        self._join = BackgroundJoin(self._consumer)
        self._feed = Feed(clients, self._consumer, bodies=True)
        self._notes = _Notes(self._consumer, lambda: log.warning(PUT_OUT, name, group, session_timeout_s))
        self._assignment: Mapping[TopicPartition, int] = {}
        self._num_assignments = 0
        names = [clients.name(topic) for topic in topics]
        self._consumer.subscribe(names, listener=self._notes)
        for name_ in names:
            # A leader that assigns partitions before it knows their number has to do it again.
            self._consumer.partitions_for_topic(name_)

    def assignment(self) -> Mapping[TopicPartition, int]:
        return self._assignment

    def poll(self, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        self._look(due=max_records <= 0)
        return self._feed.take(max_records, max_bytes) if max_records > 0 else []

    def seek(self, partition: TopicPartition, offset: int) -> None:
        check_owned(partition, self._assignment, group=self._group, member=self.name)
        # The owned partitions are those of the last poll. Some may be lost by now; the next poll tells.
        with contextlib.suppress(ValueError, KeyError):
            self._feed.seek(partition, offset)

    def position(self, partition: TopicPartition) -> int:
        try:
            return self._feed.position(partition)
        except PositionMissing:
            if partition not in self._assignment or not self._feed.knows(partition):
                raise
            # Lost since the last poll; the next one tells. A commit that names it is refused by its generation.
            return 0

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Position]:
        # Only these are requested, since in a large group another member's commit is nearly always pending.
        while (found := self._committed(self._group, partitions)) is None:
            # One of their commits is pending. It may last as long as a dead member's transaction.
            self._feed.fill()
            time.sleep(0.005)
        hint = ". If the run is old: the broker's offsets.retention.minutes has passed"
        return choose_positions(found, partitions, group=self._group, hint=hint)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._feed.pause(set(partitions) & set(self._assignment))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._feed.resume(set(partitions) & set(self._assignment))

    def snapshot(self) -> Snapshot:
        """Return the partitions owned now, with the client's generation.

        The generation is read first, since the broker checks it instead of the owner. If it were read after the
        assignment, it could be a newer one, and a commit for a lost partition would be accepted."""
        token = self._consumer.group_metadata()
        if token.generation_id < 0 or not token.member_id:
            # The member was removed. The broker would accept a commit without a generation from any client.
            return Snapshot(self._group, {}, token)
        alive = self._consumer.assignment()
        unsure = {
            self._clients.place(partition) for _, partitions in list(self._notes.noted) for partition in partitions
        }
        owned = {
            place: number
            for place, number in self._assignment.items()
            if self._clients.partition(place) in alive and place not in unsure
        }
        return Snapshot(self._group, owned, token)

    def working(self) -> contextlib.AbstractContextManager[None]:
        return self._join.working()

    def close(self) -> None:
        self._feed.close()

    # ------------------------------------------------------------------------------------------ for `wait`

    @property
    def feed(self) -> Feed:
        """The fetched records."""
        return self._feed

    @property
    def look_again_s(self) -> float:
        """Longest wait between two checks, in seconds. It is shorter during a join, which proceeds only with these
        checks."""
        return 0.05 if self._consumer.group_metadata().state == MemberState.STABLE else 0.01

    def has_data(self) -> bool:
        """Return whether `wait` should end: the assignment has changed, or there are records."""
        before = self._assignment
        self._look(due=True)
        return self._assignment is not before or self._feed.has_data()

    def _look(self, *, due: bool) -> None:
        self._feed.fill(due=due)
        if not self._notes.noted:
            return
        assignment = dict(self._assignment)
        # One by one, since the client's thread may add more.
        noted = [self._notes.noted.popleft() for _ in range(len(self._notes.noted))]
        for owned, partitions in noted:
            places = [self._clients.place(partition) for partition in partitions]
            self._feed.forget(places)
            for place in places:
                assignment.pop(place, None)
                if owned:
                    self._num_assignments += 1
                    assignment[place] = self._num_assignments
        self._assignment = dict(sorted(assignment.items()))


class _Notes(ConsumerRebalanceListener):  # type: ignore[misc]
    """Notes of gained and lost partitions. The client calls it in its own thread, and KafkaMember takes the notes."""

    def __init__(self, consumer: KafkaConsumer, when_lost: Callable[[], None]) -> None:
        self._consumer = consumer
        self._when_lost = when_lost
        self.noted: deque[tuple[bool, Collection[KafkaPartition]]] = deque()

    def on_partitions_assigned(self, assigned: Collection[KafkaPartition]) -> None:
        for partition in assigned:
            # With a position and paused, the client neither looks for a position itself nor fetches.
            self._consumer.pause(partition)
            self._consumer.seek(partition, 0)
        self.noted.append((True, assigned))

    def on_partitions_revoked(self, revoked: Collection[KafkaPartition]) -> None:
        self.noted.append((False, revoked))

    def on_partitions_lost(self, lost: Collection[KafkaPartition]) -> None:
        if lost:
            self._when_lost()
        self.noted.append((False, lost))


class Together(AbstractPartitionAssignor):  # type: ignore[misc]
    """Assigns partitions by `share_out` (sharing.py). KafkaMember passes it to its client, which calls it.

    Partitions are handed over in two rounds: a member that must give one up does so before another member gets it
    (KIP-429)."""

    name = "rftstream"
    version = 1

    def __init__(self, owned: Callable[[], Collection[KafkaPartition]]) -> None:
        self._owned = owned

    def supported_protocols(self) -> list[RebalanceProtocol]:
        """Return only the cooperative protocol."""
        return [RebalanceProtocol.COOPERATIVE]

    def metadata(self, topics: Collection[str]) -> Any:
        """Return this member's data for the group's leader: its topics, and the partitions that it owns."""
        by_topic: dict[str, list[int]] = defaultdict(list)
        for partition in sorted(self._owned()):
            by_topic[partition.topic].append(partition.partition)
        owned = [
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=numbers)
            for topic, numbers in by_topic.items()
        ]
        return ConsumerProtocolSubscription(
            version=self.version, topics=sorted(topics), user_data=b"", owned_partitions=owned
        )

    def assign(self, cluster: Any, members: Collection[Any]) -> dict[str, Any]:
        """Return the partitions of each member. Only the leader's client calls this."""
        ids = sorted(member.member_id for member in members)
        numbers = {member_id: number for number, member_id in enumerate(ids)}
        owners: dict[TopicPartition, int] = {}
        for member in members:
            for one in member.metadata.owned_partitions or ():
                for partition in one.partitions:
                    owners.setdefault(TopicPartition(one.topic, partition), numbers[member.member_id])
        topics = {numbers[member.member_id]: list(member.metadata.topics) for member in members}
        widths = {
            topic: len(cluster.partitions_for_topic(topic) or ())
            for subscribed in topics.values()
            for topic in subscribed
        }
        shared = share_out(topics, {topic: width for topic, width in widths.items() if width}, owners)
        given: dict[int, dict[str, list[int]]] = {number: defaultdict(list) for number in topics}
        for place, number in sorted(shared.items()):
            if owners.get(place, number) == number:
                given[number][place.topic].append(place.partition)
        return {
            member_id: ConsumerProtocolAssignment(self.version, sorted(given[number].items()), b"")
            for member_id, number in numbers.items()
        }

    def on_assignment(self, assignment: Any, generation: int) -> None:
        """Do nothing, since the listener gets the assignment."""
