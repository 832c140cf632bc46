"""Code that uses private parts of kafka-python's consumers; `compat` does so for the other clients.

Importing this module changes one class of kafka-python (`_create_fetch_requests`, `fetch_records`). The table of
deploy/patches/README.md has a row for each part, as for those of `compat`."""

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
"""Heartbeats for which a worker may be busy before its member rejoins by itself. A worker that returns sooner rejoins
when it polls, so that less of its finished work is refused for an older generation."""


class BackgroundJoin:
    """Joins a consumer's group in the client's own thread. It replaces the coordinator's `poll`.

    For 3.0.12: the client itself joins only while a caller stays inside its `poll`. A step that ends between two short
    polls is forgotten, and begun again or, worse, taken for done."""

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
        """Keep the membership alive without polls inside of this context, and rejoin if necessary."""
        self._works = True
        try:
            yield
        finally:
            self._heartbeat.poll()
            self._works = False

    def _is_silent(self) -> bool:
        """Return whether the member must leave because nobody polled for too long. The client's thread calls this
        before each heartbeat.

        For 3.0.12: the client itself leaves the group in the middle of a long step, and joins only while a caller
        polls."""
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
        """Return whether records can be fetched now. The consumer's `poll` calls this first."""
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

    For 3.0.12: the client's own `position` asks the broker and blocks if a partition has no position yet. It raises if
    the partition has just moved to another member."""
    state = consumer._subscription.assignment.get(partition)
    return None if state is None else int(state.position.offset)


def fetches_under_way(consumer: KafkaConsumer) -> list[Any]:
    """Return the futures of the unanswered fetches.

    For 3.0.12: the client gives no notice of arriving records, except to a caller that blocks inside `poll`."""
    return list(consumer._fetcher._fetch_futures)


def wake_on_answer(fetch: Any, answered: threading.Event) -> None:
    """Set the event when a fetch of `fetches_under_way` is answered or has failed."""
    fetch.add_both(lambda *_: answered.set())


def _has_records_left(fetcher: Any) -> bool:
    """Return whether records have arrived that were not returned yet. Then nothing is fetched.

    For 3.0.12: the client fetches the other partitions alone. If these are idle, the broker answers after
    `fetch_max_wait_ms`, and until then the client fetches nothing else from it: 2 MB in 200 ms."""
    return bool(fetcher._completed_fetches or fetcher._next_partition_records)


def _fetches_that_can_be_sent(fetcher: Any, create: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the fetches by broker, without those that cannot be sent because their broker is unknown just now.

    For 3.0.12: the client marks a fetch as pending and then sends it. Sending raises, for example, if the broker is
    gone from the metadata while a partition still names it as its leader. The mark then stays, and the client never
    reads from that broker again, even when it is back."""
    fetches, errors = {} if _has_records_left(fetcher) else create(fetcher), {}
    for node_id in fetches:
        try:
            fetcher._manager.get_connection(node_id)  # the first action of sending
        except kafka_errors.NodeNotReadyError:
            pass  # sending turns it into a failed fetch
        except kafka_errors.KafkaError as error:
            errors[node_id] = error
    grave = [error for error in errors.values() if not isinstance(error, kafka_errors.UnknownBrokerIdError)]
    if grave:  # nothing is sent
        errors = dict.fromkeys(fetches, grave[0])
    for node_id, why in errors.items():
        fetcher._handle_fetch_error(node_id, why)  # otherwise the partitions would count as requested
        del fetches[node_id]
        fetcher._manager.cluster.request_update()
    if grave:
        raise grave[0]
    return fetches


Fetcher._create_fetch_requests = functools.partialmethod(_fetches_that_can_be_sent, Fetcher._create_fetch_requests)


def _fetch_without_waiting(
    fetcher: Any,
    fetch: Callable[..., tuple[dict[Any, Any], bool]],
    max_records: int | None = None,
    update_offsets: bool = True,
    timeout_ms: float | None = None,
) -> tuple[dict[Any, Any], bool]:
    """Return the records that have arrived, and whether there is nothing to wait for. Without a time-out it does not
    wait.

    For 3.0.12: the client waits for 0 ms, too, and catches the KafkaTimeoutError of each empty poll. A cycle keeps this
    error, with the frames of all callers and so with the records and results in their variables, until Python searches
    for cycles: hundreds of megabytes with long rollouts."""
    if timeout_ms is None or timeout_ms > 0:
        return fetch(fetcher, max_records, update_offsets=update_offsets, timeout_ms=timeout_ms)
    records, is_partial = fetcher.fetched_records(max_records, update_offsets=update_offsets)
    if not is_partial:
        fetcher.send_fetches()
    if not records:
        records, _ = fetcher.fetched_records(max_records, update_offsets=update_offsets)
    return records, False


Fetcher.fetch_records = functools.partialmethod(_fetch_without_waiting, Fetcher.fetch_records)


def drop_used_up_fetch(consumer: KafkaConsumer) -> None:
    """Let the client return to the records that it set aside for paused partitions.

    For 3.0.12: it does so only when it has no partial fetch, and does not see that its partial fetch is used up."""
    fetcher = consumer._fetcher
    if fetcher._next_partition_records is not None and not fetcher._next_partition_records:
        fetcher._next_partition_records = None
