"""Conformance: many processes at the same time, and waits."""

from __future__ import annotations

import time
from collections import Counter

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.testing.conformance_tests.bench import Bench, CarryingWorker, await_true, new, read_all, take, texts
from rftstream.testing.conformance_tests.reading import BenchFixtures
from rftstream.transport.base import Transport

_PATIENCE_S = 240.0


def write_many(transport: Transport, topic: str, writer: int, num_records: int) -> None:
    """Write `num_records` records, as one of several writers at the same time."""
    producer = transport.producer(f"{topic}-writer-{writer}")
    producer.start()
    width = transport.admin.topics()[topic].partitions
    for start in range(0, num_records, 20):
        producer.commit([new(topic, number % width, f"{writer}/{number}") for number in range(start, start + 20)])


def carry_all(transport: Transport, group: str, source: str, target: str, worker: int, total: int) -> int:
    """Carry records until all have arrived. Return how many this worker carried."""
    me = CarryingWorker(transport, group, source, target, name=f"{group}-worker-{worker}")
    carried = 0
    until = time.monotonic() + _PATIENCE_S
    while True:
        num = me.turn()
        carried += num
        if num == 0:
            # The cheap check comes first: arrivals are counted only once nothing lags any more.
            lag = sum(transport.admin.lag(group, source).values())
            if lag == 0 and len(read_all(transport, [target], bodies=False)) >= total:
                return carried
            transport.wait([me.member], 0.1)
        if time.monotonic() > until:
            raise AssertionError(f"worker {worker}: not all of {total} records arrived within {_PATIENCE_S:g} s")


def write_transactions(transport: Transport, first: str, second: str, num_transactions: int) -> None:
    """Write transactions of 10 records on `first` and 10 on `second`."""
    producer = transport.producer(f"{first}-writer")
    producer.start()
    for number in range(num_transactions):
        producer.commit(
            [NewRecord(topic, 0, b"%d" % number, b"x" * 500) for topic in (first, second) for _ in range(10)]
        )


def watch_transactions(transport: Transport, first: str, second: str, num_transactions: int) -> int:
    """Read while transactions are written, and return the number of polls. Up to each end of the log there are only
    whole transactions."""
    places = TopicPartition(first, 0), TopicPartition(second, 0)
    readers = {place: transport.reader({place: 0}) for place in places}
    seen: dict[TopicPartition, list[Record]] = {place: [] for place in places}
    looks = 0
    until = time.monotonic() + _PATIENCE_S
    while any(len(records) < 10 * num_transactions for records in seen.values()):
        for place, reader in readers.items():
            end = transport.admin.end_offsets(place.topic)[place]
            while reader.position(place) < end and time.monotonic() < until:
                seen[place] += reader.poll(max_records=37)
            # Records beyond that end may belong to a transaction that was committed meanwhile.
            counts = Counter(record.key for record in seen[place] if record.offset < end)
            assert set(counts.values()) <= {10}, f"part of a transaction was visible: {counts}"
        looks += 1
        if time.monotonic() > until:
            raise AssertionError(f"{[len(records) for records in seen.values()]} of {10 * num_transactions} seen")
        transport.wait(list(readers.values()), 0.01)
    return looks


def echo(transport: Transport, there: str, back: str, num: int) -> None:
    """Send each record of one topic back on another."""
    reader = transport.reader({TopicPartition(there, 0): 0})
    producer = transport.producer(f"{there}-echo")
    producer.start()
    for _ in range(num):
        (record,) = take(transport, reader, 1, _PATIENCE_S)
        producer.commit([NewRecord(back, 0, record.key, record.value)])


def call(transport: Transport, there: str, back: str, num: int) -> list[float]:
    """Send calls one by one, and return the seconds from each call to its echo."""
    reader = transport.reader({TopicPartition(back, 0): 0})
    producer = transport.producer(f"{there}-call")
    producer.start()
    times_s = []
    for number in range(num):
        started = time.monotonic()
        producer.commit([new(there, 0, f"{number}")])
        # One long wait, which ends in time only by a wake-up.
        found: list[str] = []
        while not found:
            transport.wait([reader], 30.0)
            found = texts(reader.poll())
        assert found == [f"{number}"]
        times_s.append(time.monotonic() - started)
    return times_s


class TogetherConformance(BenchFixtures):
    """Tests of many processes at the same time, and of waits."""

    def test_many_at_once_lose_nothing_and_double_nothing(self, bench: Bench) -> None:
        source, target = bench.topic(8), bench.topic(8)
        group = bench.group(source)
        num_writers, num_workers, num_each = 2, 3, 400
        total = num_writers * num_each
        results = bench.harness.peers(
            [(write_many, (source, writer, num_each)) for writer in range(num_writers)]
            + [(carry_all, (group, source, target, worker, total)) for worker in range(num_workers)]
        )
        expected = sorted(f"{writer}/{number}" for writer in range(num_writers) for number in range(num_each))
        assert sorted(texts(bench.all_records(source))) == expected
        assert sorted(texts(bench.all_records(target))) == expected
        assert sum(results[num_writers:]) == total

    def test_a_transaction_is_never_seen_half(self, bench: Bench) -> None:
        first, second = bench.topic(), bench.topic()
        _, looks = bench.harness.peers(
            [(write_transactions, (first, second, 60)), (watch_transactions, (first, second, 60))]
        )
        assert looks >= 1

    def test_wait_ends_soon_after_a_commit(self, bench: Bench) -> None:
        there, back = bench.topic(), bench.topic()
        _, times_s = bench.harness.peers([(echo, (there, back, 20)), (call, (there, back, 20))])
        assert min(times_s) < bench.harness.wake_up_s

    def test_wait_returns_at_once_if_there_is_something(self, bench: Bench) -> None:
        topic = bench.topic()
        reader = bench.transport.reader({TopicPartition(topic, 0): 0})
        assert reader.poll() == []
        bench.write([new(topic, 0, "a")])
        started = time.monotonic()
        found: list[str] = []
        while not found:
            bench.transport.wait([reader], 300.0)
            found = texts(reader.poll())
        assert found == ["a"]
        assert time.monotonic() - started < 120.0

    def test_wait_returns_when_its_time_is_up(self, bench: Bench) -> None:
        topic = bench.topic()
        group = bench.group(topic)
        transport, member = bench.joined(group, topic, begins=True)
        reader = transport.reader({TopicPartition(topic, 0): 0})
        started = time.monotonic()
        transport.wait([reader, member], 0.3)
        assert time.monotonic() - started < 120.0
        assert reader.poll() == member.poll() == []

    def test_wait_ends_when_the_assignment_changes(self, bench: Bench) -> None:
        topic = bench.topic(2)
        group = bench.group(topic)
        first = bench.joined(group, topic)
        second = bench.joined(group, topic, beside=[first])
        second[1].close()

        def has_all() -> bool:
            first[0].wait([first[1]], 5.0)
            return len(first[1].assignment()) == 2

        await_true("both partitions are the first one's again", has_all, bench.patience_s)
