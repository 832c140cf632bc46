"""Topics, ends, positions, lag and retention on Kafka. Names of a run are `<run>.<topic>` and `<run>.<group>`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, LogRefused, PositionMissing, TransportError
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.checks import check_same_settings
from rftstream.transport.kafka.access import KafkaAccess
from rftstream.transport.kafka.admin_connection import PATIENCE_S, AdminConnection
from rftstream.transport.kafka.cluster_check import KafkaLook
from rftstream.transport.kafka.connection import KafkaClientFactory
from rftstream.transport.kafka.ends import SEEN_S, LogEnds
from rftstream.transport.kafka.member import KafkaReader

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 1 << 20
"""Difference between a topic's limit for batches and its largest record, in bytes. The largest record is derived from
the limit."""

UNSTABLE_S = 70.0
"""Seconds to wait for positions that are being committed: the longest time that a transaction may be open."""

TELL_S = 3.0
"""Seconds of waiting after which a log line says so. A commit normally takes milliseconds."""


class KafkaAdmin:
    """`Admin` on Kafka. `KafkaTransport` makes it and closes it; one thread uses it."""

    def __init__(self, clients: KafkaClientFactory, *, create: bool = True) -> None:
        self._clients = clients
        self._create = create
        self._known: dict[str, TopicSettings] = {}
        self._seen = _SeenTopics(clients)
        self.connection = AdminConnection(clients)
        self._ends = LogEnds(clients, self.connection)
        self.access = KafkaAccess(clients, self.connection.ask)
        self.look = KafkaLook(clients, self.connection.ask, self.topics, self._topic_options, self._seen.texts)

    # ------------------------------------------------------------------------------------------ topics

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        existing = self.topics()
        check_same_settings(existing, topics, prefix=self._clients.name(""), otherwise="run name")
        missing = {name: settings for name, settings in topics.items() if name not in existing}
        if not missing:
            return
        with self.connection.patient(MAKING_S):
            self._create_topics(missing)
            self.ensure_topics(topics)  # another process may have made one of them meanwhile, with other settings
            # A busy broker may be named as a leader before it knows of it.
            self._ends.begin([one for name in missing for one in self._partitions(name)])

    def _create_topics(self, missing: Mapping[str, TopicSettings]) -> None:
        wanted = {self._clients.name(name): settings for name, settings in missing.items()}
        options = {name: self._topic_options(settings) for name, settings in wanted.items()}
        are_others = False
        try:
            self.connection.ask("create topics", lambda client: client.create_topics(options))
        except TransportError as error:
            if "TopicAlreadyExists" not in str(error):
                raise
            are_others = True

        def look() -> int:
            if are_others:  # whoever made them may have wanted fewer partitions, which need no wait
                check_same_settings(self.topics(), missing, prefix=self._clients.name(""), otherwise="run name")
            return num_led(self.connection, list(wanted))

        num_partitions = sum(settings.partitions for settings in missing.values())
        wait_for_leaders(look, num_partitions, what=f"topics of {self._clients.run_id}")

    def _topic_options(self, settings: TopicSettings) -> dict[str, Any]:
        configs = {
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "cleanup.policy": "compact" if settings.compacted else "delete",
            "max.message.bytes": str(settings.max_record_bytes + OVERHEAD_BYTES),
        }
        if settings.compacted:
            # The active segment is never compacted: a new one every ten minutes, so that readers find little to skip.
            configs |= {"segment.ms": "600000", "min.cleanable.dirty.ratio": "0.1"}
        replicas = self._clients.replication_factor
        if replicas > 1:
            configs["min.insync.replicas"] = str(replicas - 1)
        return {"num_partitions": settings.partitions, "replication_factor": replicas, "configs": configs}

    def all_topics(self) -> list[str]:
        """Return all topic names on the broker, also those of other runs."""
        return list(self.connection.ask("list topics", lambda client: client.list_topics()))

    def topics(self) -> dict[str, TopicSettings]:
        names = [name for name in self.all_topics() if self._clients.is_ours(name)]
        if not names:
            self._known = {}
            return {}
        described = self.connection.ask("describe topics", lambda client: client.describe_topics(names))
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        answers = self.connection.ask("describe topics", lambda client: client.describe_configs(resources))
        configs = answers.get("topic", {})
        found = {}
        for topic in described:
            config = {key: entry["value"] for key, entry in configs.get(topic["name"], {}).items()}
            name = self._clients.bare(topic["name"])
            if topic["partitions"] and "max.message.bytes" in config:
                self._seen.note(name, topic)
                found[self._clients.bare(topic["name"])] = TopicSettings(
                    partitions=len(topic["partitions"]),
                    compacted="compact" in config.get("cleanup.policy", ""),
                    max_record_bytes=int(config["max.message.bytes"]) - OVERHEAD_BYTES,
                )
        self._known = found
        return dict(found)

    def settings(self, topic: str) -> TopicSettings:
        """Return a topic's settings as last seen; they never change. ConfigError if the topic does not exist."""
        if topic not in self._known:
            self.topics()
        if topic not in self._known:
            if not self._known and not self._create:
                raise ConfigError(
                    f"{self._clients.run_id}: no topics of this run at {self._clients.servers}; look at"
                    f" transport.servers, or start the run first"
                )
            raise ConfigError(
                f"topic {topic}: not on the log ({self._clients.name(topic)} at {self._clients.servers}), which has"
                f" {', '.join(sorted(self._known)) or 'none'}; if it was deleted, what it held is lost: begin a new run"
                f" under another name, with model.init_from = '{self._clients.run_id}'"
            )
        return self._known[topic]

    def check_place(self, place: TopicPartition) -> None:
        """Raise ConfigError if there is no such partition."""
        settings = self.settings(place.topic)
        if not 0 <= place.partition < settings.partitions:
            raise ConfigError(f"{place}: no such partition, the topic has {settings.partitions}")

    def delete_topics(self, topics: Collection[str]) -> None:
        for topic in topics:
            self.settings(topic)
        self.connection.ask(
            "delete topics", lambda client: client.delete_topics([self._clients.name(each) for each in topics])
        )
        for topic in topics:
            self._known.pop(topic, None)
            self._seen.forget(topic)

    # ------------------------------------------------------------------------------------------ ends

    def begin_offsets(self, *topics: str) -> dict[TopicPartition, int]:
        return self._ends.begin([partition for topic in topics for partition in self._partitions(topic)])

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        wanted = [place for place in self._partitions(topic) if partitions is None or place.partition in partitions]
        return self._ends.end(wanted, settled=settled)

    def _partitions(self, topic: str) -> list[KafkaPartition]:
        name = self._clients.name(topic)
        return [KafkaPartition(name, number) for number in range(self.settings(topic).partitions)]

    # ------------------------------------------------------------------------------------------ positions

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        began, is_told = time.monotonic(), False
        while (found := self.stable_positions(group)) is None:
            waited_s = time.monotonic() - began
            if waited_s > UNSTABLE_S:
                raise TransportError(f"group {group}: a commit of its positions has been pending for {UNSTABLE_S:g} s")
            if waited_s > TELL_S and not is_told:
                is_told = True
                log.warning(
                    "group %s: a commit of its positions is pending, as after a kill in the middle of one; waiting "
                    "until the broker ends it, for at most %.0f s more",
                    group,
                    UNSTABLE_S - waited_s,
                )
            time.sleep(SEEN_S if waited_s < TELL_S else 0.1)
        return found

    def stable_positions(
        self, group: str, partitions: Collection[TopicPartition] | None = None
    ) -> dict[TopicPartition, Position] | None:
        """Return a group's positions of these partitions (by default of all); None while a commit of one of them is
        pending."""
        if partitions is not None and not partitions:
            return {}
        name = self._clients.name(group)
        wanted = None if partitions is None else [self._clients.partition(place) for place in partitions]
        try:
            found = self.connection.ask(
                "positions",
                lambda client: client.list_group_offsets({name: wanted})[name],
                but=kafka_errors.UnstableOffsetCommitError,
            )
        except kafka_errors.UnstableOffsetCommitError:
            return None
        return {
            self._clients.place(partition): Position(each.offset, each.metadata or "")
            for partition, each in sorted(found.items())
            if each.offset >= 0 and self._clients.is_ours(partition.topic)
        }

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        with self.connection.patient(MAKING_S):
            there = self.committed(group)
            missing = {
                partition: OffsetAndMetadata(0, "", -1)
                for topic in topics
                for partition in self._partitions(topic)
                if self._clients.place(partition) not in there
            }
            if missing:
                said = self.connection.ask(
                    "commit positions", lambda client: client.alter_group_offsets(self._clients.name(group), missing)
                )
                for error in said.values():
                    if issubclass(error, kafka_errors.AuthorizationError):  # the client raises nothing for a partition
                        raise self._clients.reworded(error(), f"commit positions of {group}")

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Count records as described for `Admin`. Transaction markers use offsets, so the records must be read to be
        counted."""
        positions = self.committed(group)
        ends, begins = self.end_offsets(topic), self.begin_offsets(topic)
        starts = {place: max(positions.get(place, Position(0)).offset, begins[place]) for place in ends}
        lag = dict.fromkeys(ends, 0)
        open_ = {place: start for place, start in starts.items() if start < ends[place]}
        if not open_:
            return lag
        reader = KafkaReader(self._clients, open_, bodies=False)
        until = time.monotonic() + PATIENCE_S
        try:
            while open_:
                records = reader.poll(100_000, 64 << 20)
                for record in records:
                    lag[record.place] += record.offset < ends[record.place]
                for place in [place for place in open_ if reader.position(place) >= ends[place]]:
                    del open_[place]
                    reader.pause([place])
                if records:
                    until = time.monotonic() + PATIENCE_S
                elif open_:
                    if time.monotonic() > until:
                        raise TransportError(f"lag of {group} on {topic}: the end was not reached; try again")
                    time.sleep(SEEN_S)
        finally:
            reader.close()
        return lag

    # ------------------------------------------------------------------------------------------ retention

    def delete_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        for place in offsets:
            self.check_place(place)
        for topic in {place.topic for place in offsets}:
            ends = self.end_offsets(topic)
            for place, offset in offsets.items():
                if place.topic == topic and offset > ends[place]:
                    raise PositionMissing(
                        f"{place}@{offset}: beyond the end of the log ({ends[place]}); delete up to there"
                    )
        wanted = {self._clients.partition(place): offset for place, offset in offsets.items()}
        if wanted:
            self.connection.ask("delete records", lambda client: client.delete_records(wanted))

    def compact(self, topic: str) -> None:
        """Check that the topic is compacted. Kafka compacts by itself."""
        if not self.settings(topic).compacted:
            raise ConfigError(f"topic {topic}: not a compacted one, compacting would lose records; see topics.py")

    def make_durable(self) -> None:
        """Do nothing, since a commit is on all in-sync replicas before it returns."""

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class _SeenTopics:
    """The history of topics since they were first seen. `KafkaAdmin` makes it, and calls `note` with each
    description."""

    def __init__(self, clients: KafkaClientFactory) -> None:
        self._clients = clients
        self._ids: dict[str, tuple[object, object]] = {}
        """Topic -> its id when first and when last seen. A topic that is deleted and made anew gets another id."""
        self._replicas: dict[str, int] = {}
        """Topic -> smallest number of replicas of its partitions when last seen."""

    def note(self, topic: str, described: Mapping[str, Any]) -> None:
        """Add the brokers' description of a topic."""
        seen = described.get("topic_id")
        self._ids[topic] = (self._ids.get(topic, (seen,))[0], seen)
        self._replicas[topic] = min(len(one.get("replica_nodes", ())) for one in described["partitions"])

    def forget(self, topic: str) -> None:
        """Forget a topic that the run itself deletes."""
        self._ids.pop(topic, None)

    def texts(self, topic: str, min_in_sync: int) -> list[str]:
        """Return the faults of a topic, a sentence each. With fewer than `min_in_sync` replicas a topic accepts no
        records."""
        first, last = self._ids.get(topic, (None, None))
        texts = ["was deleted and made anew"] if first != last else []
        wanted, replicas = self._clients.replication_factor, self._replicas.get(topic, 0)
        if 0 < replicas < wanted:
            count = "1 replica" if replicas == 1 else f"{replicas} replicas"
            texts.append(f"has {count}, expected {wanted} (transport.options.replication_factor)")
        if min_in_sync > replicas > 0:
            texts.append(
                f"min.insync.replicas is {min_in_sync}, expected at most {replicas}, the number of its replicas"
            )
        return texts


# ------------------------------------------------------------------------------------------
#
# The wait for topics that were just made. A broker opens a log for each partition, which takes minutes for
# thousands.


MAKING_S = 60.0
"""Seconds without progress after which the wait for a new run's partitions ends."""

LOOK_S, SAY_S = 0.2, 10.0
"""Seconds between two checks of topics that are being made, and between two progress lines."""


def wait_for_leaders(
    num_led: Callable[[], int],
    wanted: int,
    *,
    what: str,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until this number of partitions have leaders, as long as the number grows. TransportError if none got a
    leader for MAKING_S. The topics may then be made again, which continues from there."""
    best, since = -1, now()
    said_at = since
    while (led := num_led()) < wanted:
        if led > best:
            best, since = led, now()
        elif now() - since > MAKING_S:
            raise TransportError(
                f"{what}: {max(0, best):,} of {wanted:,} partitions have a leader, and for {MAKING_S:g} s no more;"
                " expected all. The brokers may still be opening logs: start again, which goes on from there, or look"
                " at what they log"
            )
        if now() - said_at > SAY_S:
            said_at = now()
            log.info("%s: waiting for the brokers to open logs; %d of %d partitions have a leader", what, best, wanted)
        sleep(LOOK_S)


def num_led(connection: AdminConnection, names: Collection[str]) -> int:
    """Return how many partitions of these topics have a leader; 0 while the brokers do not answer."""
    try:
        described = connection.ask("wait for topics", lambda client: client.describe_topics(list(names)))
    except LogRefused:
        raise
    except TransportError as error:
        log.debug("waiting for topics: %s", error)
        return 0
    partitions = [one for topic in described if not topic.get("error_code") for one in topic["partitions"]]
    return sum(not partition.get("error_code") and partition.get("leader_id", -1) >= 0 for partition in partitions)
