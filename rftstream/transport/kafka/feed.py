"""The records that a Kafka consumer has fetched, kept until they are requested.

The client delivers one partition after the other, without a limit in bytes. Here the partitions are served fairly, and
the bytes are limited. Nothing here blocks: the client fetches in its own thread, and `wake_on_arrival` sets an event
when an answer comes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from kafka import KafkaConsumer
from kafka import errors as kafka_errors
from kafka.structs import TopicPartition as KafkaPartition

from rftstream.contracts.records import Record, TopicPartition
from rftstream.errors import LogTruncated, PositionMissing, RftError
from rftstream.transport.base import Jump
from rftstream.transport.kafka.client import compat_consumer
from rftstream.transport.kafka.connection import KafkaClientFactory, is_passing

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 16 << 20
"""Held bytes from which nothing more is fetched."""

_RECORD_BYTES = 200
"""Bytes that a small record takes in memory in addition to key, value and headers."""

_HEADER_BYTES = 160
"""Bytes that a header takes in memory, for which its name and value are made anew."""

_FIRST_STEP = 16
"""Number of records in the first poll of each `fill`."""

_LOOK_S = 0.02
"""Seconds between two polls of the client while records are held."""


class Feed:
    """The records that a consumer has fetched and that were not requested yet.

    KafkaReader and KafkaMember make one each. They call `seek` for each partition, `fill` to take arrived records from
    the client, and `take` to get records. `close` comes last and closes the consumer."""

    def __init__(self, clients: KafkaClientFactory, consumer: KafkaConsumer, *, bodies: bool) -> None:
        self._clients = clients
        self.consumer = consumer
        self._bodies = bodies
        # The order of the keys is the order of serving: a served partition goes to the end.
        self._held: dict[TopicPartition, deque[Record]] = {}
        self._num_bytes = 0
        self._paused: set[TopicPartition] = set()
        self._positioned: set[TopicPartition] = set()
        self._full = False
        self._failure: RftError | None = None
        self._filled_at = 0.0
        self._rung: list[Any] = []
        self._complained_at = 0.0

    # ------------------------------------------------------------------------------------------ positions

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Make `offset` the next one to take. Held records of the partition are dropped."""
        self._drop(place)
        self._failure = None
        partition = self._clients.partition(place)
        self.consumer.seek(partition, offset)
        self._positioned.add(place)
        self._gate(place)

    def position(self, place: TopicPartition) -> int:
        """Return the next offset to take. PositionMissing if the partition has no position or moved to another
        member."""
        if place not in self._positioned:
            raise PositionMissing(
                f"{place}: it has no position here, one was expected; seek it first, while it is owned"
            )
        held = self._held.get(place)
        if held:
            return held[0].offset
        position = compat_consumer.position(self.consumer, self._clients.partition(place))
        if position is None:
            raise PositionMissing(f"{place}: went to another member, a position of an owned one was expected")
        return position

    def knows(self, place: TopicPartition) -> bool:
        """Return whether the partition has a position."""
        return place in self._positioned

    def forget(self, places: Collection[TopicPartition]) -> None:
        """Forget the positions, records and pauses of partitions that are lost or new."""
        for place in places:
            self._drop(place)
            self._positioned.discard(place)
            self._paused.discard(place)

    def pause(self, places: Collection[TopicPartition]) -> None:
        """Give no records of these partitions until `resume`."""
        self._paused.update(places)
        for place in places:
            self._gate(place)

    def resume(self, places: Collection[TopicPartition]) -> None:
        """Give records of these partitions again."""
        self._paused.difference_update(places)
        for place in places:
            self._gate(place)

    def _drop(self, place: TopicPartition) -> None:
        for record in self._held.pop(place, ()):
            self._num_bytes -= _size(record)

    def _gate(self, place: TopicPartition) -> None:
        """Let the client fetch a partition if it has a position, is not paused, and there is room."""
        partition = self._clients.partition(place)
        fetched = place in self._positioned and place not in self._paused and not self._full
        with suppress(KeyError):  # it has just moved to another member
            (self.consumer.resume if fetched else self.consumer.pause)(partition)

    # ------------------------------------------------------------------------------------------ records

    def has_data(self) -> bool:
        """Return whether `take` would return something or raise."""
        return self._failure is not None or any(place not in self._paused for place in self._held)

    def fill(self, *, due: bool = True, most: int | None = None) -> None:
        """Take arrived records from the client, and keep its membership alive. Unless it is `due`, this does nothing
        while records are held and the last call is less than _LOOK_S ago. `most` is the number of held records from
        which nothing more is unpacked; None for no limit."""
        now = time.monotonic()
        if not due and self.has_data() and now - self._filled_at < _LOOK_S:
            return
        self._filled_at = now
        self._mind_room()
        try:
            # The first step is small, since fetched data may unpack to much more.
            step = _FIRST_STEP
            compat_consumer.drop_used_up_fetch(self.consumer)
            while (room := self._room(most, step)) and (arrived := self.consumer.poll(timeout_ms=0, max_records=room)):
                before = self._num_bytes
                num = self._hold(arrived)
                self._mind_room()
                if self._full:
                    break
                mean_bytes = max(_RECORD_BYTES, (self._num_bytes - before) // max(1, num))
                step = max(1, min(2000, 4 * step, MAX_HELD_BYTES // (2 * mean_bytes)))
        except kafka_errors.OffsetOutOfRangeError as error:
            self._mend_positions(error)
        except kafka_errors.LogTruncationError as error:
            self._note_truncation(error)
        except kafka_errors.NoOffsetForPartitionError:
            pass  # the partition was lost before it was positioned
        except Exception as error:
            if not isinstance(error, kafka_errors.KafkaError | OSError):
                raise
            self._bear(error)

    def take(self, max_records: int, max_bytes: int) -> list[Record]:
        """Return held records, with a fair share for each partition that is not paused. Stored errors of reading are
        raised here."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        waiting = [place for place in self._held if place not in self._paused]
        found: list[Record] = []
        left_bytes = max_bytes
        for index, place in enumerate(waiting):
            left_records = max_records - len(found)
            if left_records <= 0 or (left_bytes <= 0 and found):
                break
            num_left = len(waiting) - index
            room: float = left_bytes if found else float("inf")
            held, taken, share = self._held[place], 0, -(-left_records // num_left)
            while held and taken < share:
                size = _body_size(held[0])
                if size > room:
                    break
                room = (left_bytes // num_left if taken == 0 else room) - size
                left_bytes -= size
                record = held.popleft()
                self._num_bytes -= _size(record)
                found.append(record)
                taken += 1
            if not held:
                del self._held[place]
            elif taken:
                self._held[place] = self._held.pop(place)
        return found

    def wake_on_arrival(self, answered: threading.Event) -> None:
        """Set the event when one of the pending fetches is answered."""
        under_way = compat_consumer.fetches_under_way(self.consumer)
        for fetch in under_way:
            if not any(fetch is other for other in self._rung):
                compat_consumer.wake_on_answer(fetch, answered)
        self._rung = under_way

    def close(self) -> None:
        """Close the consumer."""
        try:
            self.consumer.close(autocommit=False, timeout_ms=3000)
        except Exception as error:  # its session will expire instead
            log.info("closing a consumer: %s", error)

    def _hold(self, arrived: dict[KafkaPartition, list[Any]]) -> int:
        num = 0
        for partition, records in arrived.items():
            place = self._clients.place(partition)
            if place not in self._positioned:
                continue
            held = self._held.setdefault(place, deque())
            for one in records:
                record = Record(
                    place.topic,
                    place.partition,
                    one.offset,
                    one.timestamp / 1000,
                    one.key,
                    one.value if self._bodies else None,
                    tuple(one.headers),
                )
                held.append(record)
                self._num_bytes += _size(record)
            num += len(records)
        return num

    def _room(self, most: int | None, step: int) -> int:
        """Return how many records may be unpacked next, at most `step`."""
        return step if most is None else max(0, min(step, most - sum(map(len, self._held.values()))))

    def _mind_room(self) -> None:
        """Stop fetching when enough is held, and start again at half of that. Bytes of paused partitions do not count,
        so that they do not block the others."""
        paused = sum(_size(record) for place in self._paused for record in self._held.get(place, ()))
        active = self._num_bytes - paused
        full = active >= MAX_HELD_BYTES if not self._full else active >= MAX_HELD_BYTES // 2
        if full != self._full:
            self._full = full
            for place in self._positioned:
                self._gate(place)

    def _mend_positions(self, error: kafka_errors.OffsetOutOfRangeError) -> None:
        """Handle positions outside of the log. A position before the first remaining record jumps to that record. A
        position beyond the end is an error, since the log is not the same any more."""
        for partition, offset in dict(error.args[0]).items():
            place = self._clients.place(partition)
            try:
                begin = self.consumer.beginning_offsets([partition])[partition]
                end = self.consumer.end_offsets([partition])[partition]
            except kafka_errors.KafkaError as other:
                self._bear(other)
                return
            if offset < begin:
                self._clients.jumps.append(Jump(place, offset, begin))
                self.consumer.seek(partition, begin)
            elif offset > end:
                self._failure = LogTruncated(*place, offset, end)

    def _note_truncation(self, error: kafka_errors.LogTruncationError) -> None:
        """Store an error for partitions whose leader lacks records that the consumer has already read."""
        for partition, kept in error.divergent_offsets.items():
            place = self._clients.place(partition)
            position = compat_consumer.position(self.consumer, partition)
            if position is not None:
                end = kept.offset if kept is not None else self.consumer.beginning_offsets([partition])[partition]
                self._failure = LogTruncated(*place, position, end)

    def _bear(self, error: BaseException) -> None:
        """Log an error that may pass. Store any other for `take` to raise."""
        if not is_passing(error):
            self._failure = self._clients.reworded(error, "reading")
        elif time.monotonic() - self._complained_at > 5.0:
            self._complained_at = time.monotonic()
            log.warning("reading from %s: %s; going on trying", self._clients.servers, error or type(error).__name__)


def _body_size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"")


def _size(record: Record) -> int:
    return _body_size(record) + _RECORD_BYTES + _HEADER_BYTES * len(record.headers)
