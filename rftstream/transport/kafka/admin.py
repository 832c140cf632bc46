"""Topics, ends, positions, lag and retention on Kafka. Names of a run are `<run>.<topic>` and `<run>.<group>`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, PositionMissing, TransportError
from rftstream.transport.base import Position, TopicSettings
from rftstream.transport.checks import check_same_settings
from rftstream.transport.kafka.cluster_check import KafkaLook
from rftstream.transport.kafka.compat import StableAdminClient
from rftstream.transport.kafka.connection import KafkaClientFactory, is_passing
from rftstream.transport.kafka.member import KafkaReader

OVERHEAD_BYTES = 1 << 20
"""A topic takes batches of its largest record and this; so its limit tells the largest record."""

PATIENCE_S = 8.0
"""A question is asked again for so long while brokers come and go."""

UNSTABLE_S = 70.0
"""Positions that are being committed are waited for as long as the longest transaction may be open."""

_SEEN_S = 0.002

T = TypeVar("T")


class KafkaAdmin:
    def __init__(self, links: KafkaClientFactory, *, create: bool = True) -> None:
        self._links = links
        self._create = create
        self._made: StableAdminClient | None = None
        self._known: dict[str, TopicSettings] = {}
        self.look = KafkaLook(self._links, self._ask, self.topics, self._topic_options)

    # ------------------------------------------------------------------------------------------ topics

    def ensure_topics(self, topics: Mapping[str, TopicSettings]) -> None:
        existing = self.topics()
        check_same_settings(existing, topics, prefix=self._links.name(""), otherwise="run name")
        missing = {name: settings for name, settings in topics.items() if name not in existing}
        if not missing:
            return
        try:
            self._ask(
                "create topics",
                lambda client: client.create_topics(
                    {self._links.name(name): self._topic_options(settings) for name, settings in missing.items()}
                ),
            )
        except TransportError as error:
            if "TopicAlreadyExists" not in str(error):
                raise
        names = [self._links.name(name) for name in missing]
        self._ask("wait for topics", lambda client: client.wait_for_topics(names))
        self.ensure_topics(topics)  # Somebody may have made one of them meanwhile, with other settings.

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
        replicas = self._links.replication_factor
        if replicas > 1:
            configs["min.insync.replicas"] = str(replicas - 1)
        return {"num_partitions": settings.partitions, "replication_factor": replicas, "configs": configs}

    def all_topics(self) -> list[str]:
        """Names on the broker, of other runs, too."""
        return list(self._ask("list topics", lambda client: client.list_topics()))

    def topics(self) -> dict[str, TopicSettings]:
        names = [name for name in self.all_topics() if self._links.is_ours(name)]
        if not names:
            self._known = {}
            return {}
        described = self._ask("describe topics", lambda client: client.describe_topics(names))
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        configs = self._ask("describe topics", lambda client: client.describe_configs(resources)).get("topic", {})
        found = {}
        for topic in described:
            config = {key: entry["value"] for key, entry in configs.get(topic["name"], {}).items()}
            if topic["partitions"] and "max.message.bytes" in config:
                found[self._links.bare(topic["name"])] = TopicSettings(
                    partitions=len(topic["partitions"]),
                    compacted="compact" in config.get("cleanup.policy", ""),
                    max_record_bytes=int(config["max.message.bytes"]) - OVERHEAD_BYTES,
                )
        self._known = found
        return dict(found)

    def settings(self, topic: str) -> TopicSettings:
        """As it was seen last: they never change."""
        if topic not in self._known:
            self.topics()
        if topic not in self._known:
            if not self._known and not self._create:
                raise ConfigError(
                    f"{self._links.run_id}: no topics of this run at {self._links.servers}; look at transport.servers,"
                    f" or start the run first"
                )
            raise ConfigError(
                f"topic {topic}: not on the log ({self._links.name(topic)} at {self._links.servers}); known:"
                f" {', '.join(sorted(self._known)) or 'none'}"
            )
        return self._known[topic]

    def check_place(self, place: TopicPartition) -> None:
        settings = self.settings(place.topic)
        if not 0 <= place.partition < settings.partitions:
            raise ConfigError(f"{place}: no such partition, the topic has {settings.partitions}")

    def delete_topics(self, topics: Collection[str]) -> None:
        for topic in topics:
            self.settings(topic)
        self._ask("delete topics", lambda client: client.delete_topics([self._links.name(each) for each in topics]))
        for topic in topics:
            self._known.pop(topic, None)

    # ------------------------------------------------------------------------------------------ ends

    def begin_offsets(self, topic: str) -> dict[TopicPartition, int]:
        return self._offsets(self._partitions(topic), OffsetSpec.EARLIEST)

    def end_offsets(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Of what is committed. The broker answers a commit before it has marked it everywhere: marks that are on
        their way are waited for; transactions that are still open are not."""
        wanted = [one for one in self._partitions(topic) if partitions is None or one.partition in partitions]
        if not wanted:
            return {}
        written = self._offsets(wanted, OffsetSpec.LATEST, "read_uncommitted")
        ends = self._offsets(wanted, OffsetSpec.LATEST)
        until = time.monotonic() + PATIENCE_S
        while behind := [
            partition for partition in wanted if ends[(place := self._links.place(partition))] < written[place]
        ]:
            if not self._is_committing(behind) or time.monotonic() > until:
                # Once more: the mark may have been made between the two questions.
                ends |= self._offsets(behind, OffsetSpec.LATEST)
                break
            time.sleep(_SEEN_S)
            ends |= self._offsets(behind, OffsetSpec.LATEST)
        hidden = [place for partition in wanted if ends[place := self._links.place(partition)] < written[place]]
        if settled and hidden:
            raise TransportError(
                f"{', '.join(map(str, hidden))}: a transaction is open and hides what was committed after it began;"
                f" ask again when it is through or its time is up"
            )
        return ends

    def _is_committing(self, partitions: Collection[KafkaPartition]) -> bool:
        producers = self._ask("describe producers", lambda client: client.describe_producers(partitions))
        ids = {
            producer.producer_id
            for state in producers.values()
            for producer in state.active_producers
            if producer.current_transaction_start_offset >= 0
        }
        if not ids:
            return False
        listed = self._ask(
            "list transactions",
            lambda client: client.list_transactions(
                producer_id_filters=sorted(ids), state_filters=["PrepareCommit", "PrepareAbort"]
            ),
        )
        return any(listed.values())

    def _partitions(self, topic: str) -> list[KafkaPartition]:
        name = self._links.name(topic)
        return [KafkaPartition(name, number) for number in range(self.settings(topic).partitions)]

    def _offsets(
        self, partitions: Collection[KafkaPartition], spec: Any, isolation: str = "read_committed"
    ) -> dict[TopicPartition, int]:
        found = self._ask(
            "ends of partitions",
            lambda client: client.list_partition_offsets(dict.fromkeys(partitions, spec), isolation_level=isolation),
        )
        return {self._links.place(partition): each.offset for partition, each in sorted(found.items())}

    # ------------------------------------------------------------------------------------------ positions

    def committed(self, group: str) -> dict[TopicPartition, Position]:
        until = time.monotonic() + UNSTABLE_S
        while (found := self.stable_positions(group)) is None:
            if time.monotonic() > until:
                raise TransportError(f"group {group}: a commit of its positions has been pending for {UNSTABLE_S:g} s")
            time.sleep(_SEEN_S)
        return found

    def stable_positions(self, group: str) -> dict[TopicPartition, Position] | None:
        """None while a commit of one of them is pending."""
        name = self._links.name(group)
        try:
            found = self._ask(
                "positions",
                lambda client: client.list_group_offsets({name: None})[name],
                but=kafka_errors.UnstableOffsetCommitError,
            )
        except kafka_errors.UnstableOffsetCommitError:
            return None
        return {
            self._links.place(partition): Position(each.offset, each.metadata or "")
            for partition, each in sorted(found.items())
            if each.offset >= 0 and self._links.is_ours(partition.topic)
        }

    def commit_initial(self, group: str, topics: Collection[str]) -> None:
        there = self.committed(group)
        missing = {
            partition: OffsetAndMetadata(0, "", -1)
            for topic in topics
            for partition in self._partitions(topic)
            if self._links.place(partition) not in there
        }
        if missing:
            self._ask("commit positions", lambda client: client.alter_group_offsets(self._links.name(group), missing))

    def lag(self, group: str, topic: str) -> dict[TopicPartition, int]:
        """Markers of transactions take offsets, so that what is behind has to be looked at."""
        positions = self.committed(group)
        ends, begins = self.end_offsets(topic), self.begin_offsets(topic)
        starts = {place: max(positions.get(place, Position(0)).offset, begins[place]) for place in ends}
        lag = dict.fromkeys(ends, 0)
        open_ = {place: start for place, start in starts.items() if start < ends[place]}
        if not open_:
            return lag
        reader = KafkaReader(self._links, open_, bodies=False)
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
                    time.sleep(_SEEN_S)
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
        wanted = {self._links.partition(place): offset for place, offset in offsets.items()}
        if wanted:
            self._ask("delete records", lambda client: client.delete_records(wanted))

    def compact(self, topic: str) -> None:
        """Kafka compacts by itself."""
        if not self.settings(topic).compacted:
            raise ConfigError(f"topic {topic}: not a compacted one, compacting would lose records; see topics.py")

    def make_durable(self) -> None:
        """A commit was on all in-sync replicas before it returned."""

    # ------------------------------------------------------------------------------------------ asking

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def _ask(self, what: str, question: Callable[[KafkaAdminClient], T], *, but: type[Exception] | None = None) -> T:
        """Asks again while brokers come and go. A client that got no answer in all that time is given up: what it
        knows of the cluster may be from while a broker was away, and it does not look again (3.0.12, measured)."""
        until = time.monotonic() + PATIENCE_S
        while True:
            if self._made is None:
                self._made = self._links.admin(StableAdminClient)
            try:
                return question(self._made)
            except (kafka_errors.KafkaError, OSError) as error:
                if but is not None and isinstance(error, but):
                    raise
                is_outdated = isinstance(error, kafka_errors.UnknownBrokerIdError)
                if is_outdated or time.monotonic() > until:
                    # Closing waits for the client's own thread, without a limit.
                    threading.Thread(target=self._made.close, name="end of an admin client", daemon=True).start()
                    self._made = None
                if not (is_outdated or is_passing(error)) or time.monotonic() > until:
                    raise self._links.reworded(error, what) from None
            if self._made is not None:
                self._made.forget_coordinators()
            time.sleep(0.05)
