"""Conformance: the records that readers get."""

from __future__ import annotations

import gc
import weakref

import pytest

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import PositionMissing, RecordTooLarge
from rftstream.service.reading import PlaceReader, read_records
from rftstream.testing.conformance_tests.bench import (
    Bench,
    ConformanceHarness,
    by_place,
    new,
    places_of,
    take,
    texts,
)


class BenchFixtures:
    """The fixtures that all conformance tests use."""

    @pytest.fixture
    def harness(self) -> ConformanceHarness:
        """Return the harness of the transport. A subclass of the suite overrides it."""
        raise NotImplementedError("a subclass of TransportConformance gives the `harness` fixture")

    @pytest.fixture
    def bench(self, harness: ConformanceHarness):  # type: ignore[no-untyped-def]
        """Yield a bench on the harness, and close it at the end."""
        bench = Bench(harness)
        yield bench
        bench.close()


class ReadingConformance(BenchFixtures):
    """Tests of records, headers, positions, fairness and size limits, as readers and producers see them."""

    def test_records_of_a_partition_keep_their_order(self, bench: Bench) -> None:
        """Records of a partition come in the order in which they were committed, at growing offsets."""
        topic = bench.topic(3)
        producer = bench.producer()
        for start in range(0, 300, 30):
            producer.commit([new(topic, number % 3, f"{number:04d}") for number in range(start, start + 30)])
        found = by_place(bench.all_records(topic))
        for place in places_of(bench.transport, topic):
            assert texts(found[place]) == [f"{number:04d}" for number in range(place.partition, 300, 3)]
            offsets = [record.offset for record in found[place]]
            assert offsets == sorted(set(offsets))

    def test_a_record_comes_back_as_it_was(self, bench: Bench) -> None:
        """Topic, partition, key, value and headers of a record come back unchanged, with a time."""
        topic = bench.topic(2)
        bench.write([NewRecord(topic, 1, b"key", b"\x00value\xff", (("h", b"1"),))])
        (record,) = bench.all_records(topic)
        assert (record.topic, record.partition, record.key, record.value) == (topic, 1, b"key", b"\x00value\xff")
        assert record.headers == (("h", b"1"),)
        assert record.header("h") == b"1"
        assert record.timestamp_s > 0

    def test_headers_keep_order_repeats_and_bytes(self, bench: Bench) -> None:
        """Headers come back in order, with repeated names and any bytes as values."""
        topic = bench.topic()
        headers = (("b", b"\x00\xff\x80"), ("a", b"1"), ("b", b""), ("a", b"2"), ("größe", "日本".encode()))
        bench.write([NewRecord(topic, 0, b"k", b"v", headers), NewRecord(topic, 0, b"k", b"v")])
        first, second = bench.all_records(topic)
        assert first.headers == headers
        assert second.headers == ()

    def test_an_empty_value_is_not_a_tombstone(self, bench: Bench) -> None:
        """An empty value, no value and no key stay three different things."""
        topic = bench.topic()
        bench.write([NewRecord(topic, 0, b"a", b""), NewRecord(topic, 0, b"b", None), NewRecord(topic, 0, None, b"x")])
        empty, tombstone, keyless = bench.all_records(topic)
        assert empty.value == b""
        assert tombstone.value is None
        assert keyless.key is None

    def test_keys_are_any_bytes(self, bench: Bench) -> None:
        """Keys may have any bytes, zero bytes and long texts too."""
        topic = bench.topic(2)
        keys = ["日本語", "naïve/ключ", "🙂" * 50, " spaced key ", "a\x00b"]
        bench.write([NewRecord(topic, number % 2, key.encode(), b"") for number, key in enumerate(keys)])
        assert sorted(texts(bench.all_records(topic))) == sorted(keys)

    def test_without_bodies_the_rest_is_there(self, bench: Bench) -> None:
        """Without bodies, a record has its key and headers but no value."""
        topic = bench.topic()
        bench.write([NewRecord(topic, 0, b"k", b"v" * 200_000, (("h", b"1"),)), NewRecord(topic, 0, b"t", None)])
        found = bench.all_records(topic, bodies=False)
        assert [(record.key, record.value, record.headers) for record in found] == [
            (b"k", None, (("h", b"1"),)),
            (b"t", None, ()),
        ]

    def test_reading_begins_where_it_is_told(self, bench: Bench) -> None:
        """A reader begins at the given position, and continues at the position of a `seek`."""
        topic = bench.topic()
        bench.write([new(topic, 0, f"{number}") for number in range(10)])
        place = TopicPartition(topic, 0)
        offsets = {record.key: record.offset for record in bench.all_records(topic)}
        reader = bench.transport.reader({place: offsets[b"4"]})
        assert texts(take(bench.transport, reader, 6)) == ["4", "5", "6", "7", "8", "9"]
        at_the_end = reader.position(place)
        assert at_the_end > offsets[b"9"]
        reader.seek(place, offsets[b"8"])
        assert texts(take(bench.transport, reader, 2)) == ["8", "9"]
        bench.write([new(topic, 0, "later")])
        later = bench.transport.reader({place: at_the_end})
        assert texts(take(bench.transport, later, 1)) == ["later"]

    def test_a_position_beyond_the_end_is_missing(self, bench: Bench) -> None:
        """Reading beyond the end is a PositionMissing that names the topic. After `seek` the reader continues."""
        topic = bench.topic()
        bench.write([new(topic, 0, "a")])
        place = TopicPartition(topic, 0)
        reader = bench.transport.reader({place: bench.transport.admin.end_offsets(topic)[place] + 100})

        with pytest.raises(PositionMissing, match=topic):
            take(bench.transport, reader, 1, bench.patience_s)
        reader.seek(place, 0)
        assert texts(take(bench.transport, reader, 1)) == ["a"]

    def test_followers_all_see_everything(self, bench: Bench) -> None:
        """Each of three readers gets every record."""
        topic = bench.topic(3)
        readers = []
        for _ in range(3):
            transport = bench.connect()
            readers.append((transport, transport.reader(transport.admin.begin_offsets(topic))))
        bench.write([new(topic, number % 3, f"{number}") for number in range(30)])
        for transport, reader in readers:
            assert sorted(texts(take(transport, reader, 30)), key=int) == [f"{number}" for number in range(30)]

    def test_a_closed_reader_is_kept_by_nobody(self, bench: Bench) -> None:
        """A follower opens readers as long as it lives, so none may be kept."""
        topic = bench.topic()
        bench.write([NewRecord(topic, 0, b"%d" % number, b"x" * 10_000) for number in range(20)])
        reader = bench.transport.reader(bench.transport.admin.begin_offsets(topic))
        assert len(take(bench.transport, reader, 20)) == 20
        reader.close()
        kept = weakref.ref(reader)
        del reader
        gc.collect()
        assert kept() is None

    def test_poll_is_bounded_but_gives_at_least_one(self, bench: Bench) -> None:
        topic = bench.topic(2)
        bench.write([NewRecord(topic, number % 2, b"%d" % number, b"x" * 10_000) for number in range(40)])
        reader = bench.transport.reader(bench.transport.admin.begin_offsets(topic))
        found: list[Record] = []

        def read_on() -> bool:
            assert reader.poll(max_records=0) == []  # as a worker without room asks
            batch = reader.poll(max_records=7)
            assert len(batch) <= 7
            found.extend(batch)
            batch = reader.poll(max_bytes=35_000)
            assert sum(len(record.value or b"") for record in batch) <= 35_000
            found.extend(batch)
            batch = reader.poll(max_bytes=1)
            assert len(batch) <= 1
            found.extend(batch)
            return len(found) == 40

        bench.await_true("all read, in small steps", read_on)
        assert sorted(texts(found), key=int) == [f"{number}" for number in range(40)]

    def test_poll_is_fair(self, bench: Bench) -> None:
        topic = bench.topic(4)
        bench.write([new(topic, number % 4, f"{number}") for number in range(4000)])
        reader = bench.transport.reader(bench.transport.admin.begin_offsets(topic))
        found: list[Record] = []

        def read_on() -> bool:
            found.extend(reader.poll(max_records=10))
            return len(found) >= 400

        bench.await_true("400 records", read_on)
        shares = [len(records) for records in by_place(found).values()]
        assert len(shares) == 4
        assert min(shares) >= 40
        found.clear()

        def read_one_by_one() -> bool:
            found.extend(reader.poll(max_records=1))
            return len(found) >= 40

        bench.await_true("40 records, one by one", read_one_by_one)
        assert len(by_place(found)) == 4

    def test_a_paused_reader_leaves_records_on_the_log(self, bench: Bench) -> None:
        topic = bench.topic(2)
        left, _ = places_of(bench.transport, topic)
        bench.write([new(topic, number % 2, f"{number}") for number in range(6)])
        reader = bench.transport.reader(bench.transport.admin.begin_offsets(topic))
        reader.pause([left])
        assert texts(take(bench.transport, reader, 3)) == ["1", "3", "5"]
        bench.write([new(topic, 0, "6"), new(topic, 1, "7")])
        assert texts(take(bench.transport, reader, 1)) == ["7"]
        assert reader.poll() == []
        reader.resume([left])
        assert texts(take(bench.transport, reader, 4)) == ["0", "2", "4", "6"]
        reader.close()

    def test_large_batches(self, bench: Bench) -> None:
        topic = bench.topic(8)
        bench.write([NewRecord(topic, number % 8, b"%d" % number, b"v") for number in range(20_000)])
        found = bench.all_records(topic)
        assert sorted(int(record.key or b"") for record in found) == list(range(20_000))

    def test_records_at_offsets_that_are_known(self, bench: Bench) -> None:
        """A fresh reader finds each record at its offset, the newest included. It leaves out offsets without a record:
        a mark of a transaction, a deleted record, and offsets beyond the end."""
        topic = bench.topic(2)
        producer = bench.producer()
        for number in range(10):
            producer.commit([new(topic, 1, f"{number}"), new(topic, 0, "other")])
        records = by_place(bench.all_records(topic))[place := TopicPartition(topic, 1)]
        for record in records[::-3]:
            assert read_records(bench.transport, place, [record.offset]) == {record.offset: record}
        everywhere = range(records[-1].offset + 100)
        assert list(read_records(bench.transport, place, everywhere).values()) == records
        bench.transport.admin.delete_before({place: records[4].offset})
        assert list(read_records(bench.transport, place, everywhere).values()) == records[4:]

    def test_a_kept_reader_finds_records_of_several_partitions(self, bench: Bench) -> None:
        """It finds the same, in order, however often it is asked, forwards and backwards, and leaves out the same."""
        topic = bench.topic(3)
        producer = bench.producer()
        for number in range(40):
            producer.commit([new(topic, number % 2, f"{number}"), new(topic, 2, "other")])
        there = {(record.place, record.offset): record for record in bench.all_records(topic)}
        reader = PlaceReader(bench.transport, topic)
        for wanted in (list(there)[::-9], list(there)[2::30], list(there), list(there)[:3], []):
            found = list(reader.read([*wanted, (TopicPartition(topic, 0), 10_000)]))
            assert {(record.place, record.offset): record for record in found} == {one: there[one] for one in wanted}
            for place in {record.place for record in found}:
                offsets = [record.offset for record in found if record.place == place]
                assert offsets == sorted(offsets)
        some = next(reader.read(there))  # whoever stops early may begin again
        bench.transport.admin.delete_before({some.place: some.offset + 1})
        assert some not in reader.read(there)
        reader.close()

    def test_a_large_record(self, bench: Bench) -> None:
        topic = bench.topic()
        value = bytes(range(256)) * (7 * 4096)
        bench.write([NewRecord(topic, 0, b"large", value), new(topic, 0, "small")])
        large, small = bench.all_records(topic)
        assert large.value == value
        assert small.value == b"small"

    def test_the_size_limit_of_a_topic(self, bench: Bench) -> None:
        topic = bench.topic(max_record_bytes=1000)
        other = bench.topic()
        producer = bench.producer()
        headers = (("name", b"12345"),)
        producer.commit([NewRecord(topic, 0, b"k", b"v" * 990, headers)])
        with pytest.raises(RecordTooLarge) as error:
            producer.commit([new(other, 0, "no"), NewRecord(topic, 0, b"k", b"v" * 991, headers)])
        assert topic in str(error.value)
        assert "1001" in str(error.value)
        assert "1000" in str(error.value)
        producer.commit([new(topic, 0, "again")])
        assert len(bench.all_records(topic, other)) == 2
