"""What reaches into private parts of kafka-python's consumers; it is to them what `compat` is to the other clients.

Importing this module changes one class of kafka-python (`_create_fetch_requests`). The table of
deploy/patches/README.md has a row for each part, as for those of `compat`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kafka import KafkaConsumer
from kafka import errors as kafka_errors
from kafka.consumer.fetcher import Fetcher
from kafka.structs import TopicPartition as KafkaPartition

SILENT_BEATS = 2
"""Heartbeats that a worker may be busy before its member joins again by itself. A worker that comes back sooner joins
as it polls: less of what it has just finished is refused for an older generation."""


class BackgroundJoin:
    """Joins a consumer's group in the client's own thread; takes the place of the coordinator's `poll`.

    For 3.0.12: the client by itself joins only while somebody stays inside its `poll`. A step that ends between two
    short polls is forgotten, and begun again or, worse, taken for done."""

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._manager = consumer._manager
        self._coordinator = consumer._coordinator
        self._under_way: Any = None
        self._one_joins = threading.Lock()
        self._polled_at = time.monotonic()
        self._coordinator.poll = self.poll
        heartbeat = self._coordinator.heartbeat
        self._heartbeat, self._is_late = heartbeat, heartbeat.poll_timeout_expired
        heartbeat.poll_timeout_expired = self._is_silent
        self._works = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the member live on, and join again when it has to, though nobody polls inside of this context."""
        self._works = True
        try:
            yield
        finally:
            self._heartbeat.poll()
            self._works = False

    def _is_silent(self) -> bool:
        """Return whether the member is to leave since nobody polled for too long. The client's thread asks this before
        each heartbeat.

        For 3.0.12: by itself the client leaves the group in the middle of a step that takes long, and joins only while
        somebody polls."""
        if not self._works:
            return bool(self._is_late())
        self._heartbeat.poll()
        if time.monotonic() - self._polled_at > SILENT_BEATS * self._heartbeat.config["heartbeat_interval_ms"] / 1000:
            with self._one_joins:
                if self._under_way is not None and self._under_way.is_done and not self._under_way.failed():
                    self._under_way = None
                if self._under_way is None and self._coordinator.need_rejoin():
                    self._under_way = self._manager.call_soon(self._coordinator.ensure_active_group_async)
        return False

    def poll(self, timeout_ms: float | None = None) -> bool:
        """Return whether records can be fetched now; the consumer's `poll` asks this first."""
        self._polled_at = time.monotonic()
        with self._one_joins:
            if self._under_way is not None:
                if not self._under_way.is_done:
                    return False
                done, self._under_way = self._under_way, None
                if done.failed():
                    raise done.exception
            if self._coordinator.need_rejoin():
                self._under_way = self._manager.call_soon(self._coordinator.ensure_active_group_async)
                return False
        self._coordinator.poll_heartbeat()
        return True


def position(consumer: KafkaConsumer, partition: KafkaPartition) -> int | None:
    """Return the next offset that the consumer delivers, or None for a partition that it does not own.

    For 3.0.12: the client's own `position` asks the broker, and blocks, where a partition has none yet; and raises
    where the partition went to another member just now."""
    state = consumer._subscription.assignment.get(partition)
    return None if state is None else int(state.position.offset)


def fetches_under_way(consumer: KafkaConsumer) -> list[Any]:
    """Return the futures of the fetches that brokers have not answered yet.

    For 3.0.12: the client has no way to be woken when something arrives, other than to block inside `poll`."""
    return list(consumer._fetcher._fetch_futures)


def wake_on_answer(fetch: Any, answered: threading.Event) -> None:
    """Set the event when a fetch of `fetches_under_way` is answered or has failed."""
    fetch.add_both(lambda *_: answered.set())


def _fetches_that_can_be_sent(fetcher: Any, create: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the fetches by broker, without those that cannot be sent because nobody knows the broker just now.

    For 3.0.12: the client notes that a fetch is under way and sends it then. Where sending raises, as for a broker that
    is gone from the metadata while a partition still names it as its leader, the note stays, and the client never reads
    from that broker again, also when it is back."""
    fetches, errors = create(fetcher), {}
    for node_id in fetches:
        try:
            fetcher._manager.get_connection(node_id)  # what sending does first
        except kafka_errors.NodeNotReadyError:
            pass  # sending makes a fetch of it that has failed
        except kafka_errors.KafkaError as error:
            errors[node_id] = error
    grave = [error for error in errors.values() if not isinstance(error, kafka_errors.UnknownBrokerIdError)]
    if grave:  # nothing is sent
        errors = dict.fromkeys(fetches, grave[0])
    for node_id, why in errors.items():
        fetcher._handle_fetch_error(node_id, why)  # what was to be fetched counts as asked for otherwise
        del fetches[node_id]
        fetcher._manager.cluster.request_update()
    if grave:
        raise grave[0]
    return fetches


Fetcher._create_fetch_requests = functools.partialmethod(_fetches_that_can_be_sent, Fetcher._create_fetch_requests)


def drop_used_up_fetch(consumer: KafkaConsumer) -> None:
    """Let the client take back what it set aside for partitions that were paused.

    For 3.0.12: it does so only when it has no part of a fetch in hand, and does not see that the one in hand is used
    up."""
    fetcher = consumer._fetcher
    if fetcher._next_partition_records is not None and not fetcher._next_partition_records:
        fetcher._next_partition_records = None
