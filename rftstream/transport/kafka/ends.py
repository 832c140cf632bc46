"""The first and the last offsets of a topic's partitions. Commits in progress are waited for."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import TopicPartition
from rftstream.errors import TransportError
from rftstream.transport.kafka.admin_connection import PATIENCE_S, AdminConnection
from rftstream.transport.kafka.connection import KafkaClientFactory

UNSEEN_S = 1.0
"""Seconds to wait for commit markers in partitions whose producers this user may not list. Markers normally take
milliseconds."""

SEEN_S = 0.002
"""Seconds between two checks for a change that is about to become visible."""


class LogEnds:
    """Requests the first and the last offsets of partitions. `KafkaAdmin` makes and uses it."""

    def __init__(self, clients: KafkaClientFactory, connection: AdminConnection) -> None:
        self._clients = clients
        self._connection = connection

    def begin(self, partitions: Collection[KafkaPartition]) -> dict[TopicPartition, int]:
        """Return the first remaining offset of each partition."""
        return self._offsets(partitions, OffsetSpec.EARLIEST) if partitions else {}

    def end(self, wanted: Collection[KafkaPartition], *, settled: bool = False) -> dict[TopicPartition, int]:
        """Return the offset after the last committed record. `settled` is as for `Admin.end_offsets`.

        The broker answers a commit before it has written all markers. So this call waits for markers in progress, but
        not for transactions that are still open."""
        if not wanted:
            return {}
        written = self._offsets(wanted, OffsetSpec.LATEST, "read_uncommitted")
        ends = self._offsets(wanted, OffsetSpec.LATEST)
        began = time.monotonic()
        while behind := [
            partition for partition in wanted if ends[(place := self._clients.place(partition))] < written[place]
        ]:
            is_committing = self._is_committing(behind)
            patience_s = UNSEEN_S if is_committing is None else PATIENCE_S
            if is_committing is False or time.monotonic() - began > patience_s:
                # Ask once more: the mark may have been made between the two questions.
                ends |= self._offsets(behind, OffsetSpec.LATEST)
                break
            time.sleep(SEEN_S)
            ends |= self._offsets(behind, OffsetSpec.LATEST)
        hidden = [place for partition in wanted if ends[place := self._clients.place(partition)] < written[place]]
        if settled and hidden:
            raise TransportError(
                f"{', '.join(map(str, hidden))}: a transaction is open and hides what was committed after it began;"
                f" ask again when it is through or its time is up"
            )
        return ends

    def _is_committing(self, partitions: Collection[KafkaPartition]) -> bool | None:
        """Return whether a commit in one of the partitions is being marked. None if this user may not know: the broker
        tells only users who may read the topic."""
        try:
            producers = self._connection.ask(
                "describe producers",
                lambda client: client.describe_producers(partitions),
                but=kafka_errors.TopicAuthorizationFailedError,
            )
        except kafka_errors.TopicAuthorizationFailedError:
            return None
        ids = {
            producer.producer_id
            for state in producers.values()
            for producer in state.active_producers
            if producer.current_transaction_start_offset >= 0
        }
        if not ids:
            return False
        listed = self._connection.ask(
            "list transactions",
            lambda client: client.list_transactions(
                producer_id_filters=sorted(ids), state_filters=["PrepareCommit", "PrepareAbort"]
            ),
        )
        return any(listed.values())

    def _offsets(
        self, partitions: Collection[KafkaPartition], spec: Any, isolation: str = "read_committed"
    ) -> dict[TopicPartition, int]:
        found = self._connection.ask(
            "ends of partitions",
            lambda client: client.list_partition_offsets(dict.fromkeys(partitions, spec), isolation_level=isolation),
        )
        return {self._clients.place(partition): each.offset for partition, each in sorted(found.items())}
