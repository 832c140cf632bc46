"""Conformance: what a reader sees, and what admin does to it."""

from __future__ import annotations

import pytest

from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.errors import ConfigError, PositionMissing, RecordTooLarge
from rftstream.testing.conformance_bench import (
    Bench,
    ConformanceHarness,
    by_place,
    new,
    places_of,
    position_new,
    take,
    texts,
)
from rftstream.transport.base import Position, TopicSettings


class BenchFixtures:
    @pytest.fixture
    def harness(self) -> ConformanceHarness:
        raise NotImplementedError("a subclass of TransportConformance gives the `harness` fixture")

    @pytest.fixture
    def bench(self, harness: ConformanceHarness):  # type: ignore[no-untyped-def]
        bench = Bench(harness)
        yield bench
        bench.close()


class ReadingConformance(BenchFixtures):
    def test_records_of_a_partition_keep_their_order(self, bench: Bench) -> None:
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
        topic = bench.topic(2)
        bench.write([NewRecord(topic, 1, b"key", b"\x00value\xff", (("h", b"1"),))])
        (record,) = bench.all_records(topic)
        assert (record.topic, record.partition, record.key, record.value) == (topic, 1, b"key", b"\x00value\xff")
        assert record.headers == (("h", b"1"),)
        assert record.header("h") == b"1"
        assert record.timestamp_s > 0

    def test_headers_keep_order_repeats_and_bytes(self, bench: Bench) -> None:
        topic = bench.topic()
        headers = (("b", b"\x00\xff\x80"), ("a", b"1"), ("b", b""), ("a", b"2"), ("größe", "日本".encode()))
        bench.write([NewRecord(topic, 0, b"k", b"v", headers), NewRecord(topic, 0, b"k", b"v")])
        first, second = bench.all_records(topic)
        assert first.headers == headers
        assert second.headers == ()

    def test_an_empty_value_is_not_a_tombstone(self, bench: Bench) -> None:
        topic = bench.topic()
        bench.write([NewRecord(topic, 0, b"a", b""), NewRecord(topic, 0, b"b", None), NewRecord(topic, 0, None, b"x")])
        empty, tombstone, keyless = bench.all_records(topic)
        assert empty.value == b""
        assert tombstone.value is None
        assert keyless.key is None

    def test_keys_are_any_bytes(self, bench: Bench) -> None:
        topic = bench.topic(2)
        keys = ["日本語", "naïve/ключ", "🙂" * 50, " spaced key ", "a\x00b"]
        bench.write([NewRecord(topic, number % 2, key.encode(), b"") for number, key in enumerate(keys)])
        assert sorted(texts(bench.all_records(topic))) == sorted(keys)

    def test_without_bodies_the_rest_is_there(self, bench: Bench) -> None:
        topic = bench.topic()
        bench.write([NewRecord(topic, 0, b"k", b"v" * 200_000, (("h", b"1"),)), NewRecord(topic, 0, b"t", None)])
        found = bench.all_records(topic, bodies=False)
        assert [(record.key, record.value, record.headers) for record in found] == [
            (b"k", None, (("h", b"1"),)),
            (b"t", None, ()),
        ]

    def test_reading_begins_where_it_is_told(self, bench: Bench) -> None:
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
        topic = bench.topic()
        bench.write([new(topic, 0, "a")])
        place = TopicPartition(topic, 0)
        reader = bench.transport.reader({place: bench.transport.admin.end_offsets(topic)[place] + 100})

        with pytest.raises(PositionMissing, match=topic):
            take(bench.transport, reader, 1, bench.patience_s)
        reader.seek(place, 0)
        assert texts(take(bench.transport, reader, 1)) == ["a"]

    def test_followers_all_see_everything(self, bench: Bench) -> None:
        topic = bench.topic(3)
        readers = []
        for _ in range(3):
            transport = bench.connect()
            readers.append((transport, transport.reader(transport.admin.begin_offsets(topic))))
        bench.write([new(topic, number % 3, f"{number}") for number in range(30)])
        for transport, reader in readers:
            assert sorted(texts(take(transport, reader, 30)), key=int) == [f"{number}" for number in range(30)]

    def test_poll_is_bounded_but_gives_at_least_one(self, bench: Bench) -> None:
        topic = bench.topic(2)
        bench.write([NewRecord(topic, number % 2, b"%d" % number, b"x" * 10_000) for number in range(40)])
        reader = bench.transport.reader(bench.transport.admin.begin_offsets(topic))
        found: list[Record] = []

        def read_on() -> bool:
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

    def test_a_topic_keeps_its_settings(self, bench: Bench) -> None:
        topic = bench.topic(2)
        admin = bench.connect().admin
        admin.ensure_topics({topic: TopicSettings(partitions=2)})
        assert admin.topics()[topic] == TopicSettings(partitions=2)
        for other in (TopicSettings(partitions=3), TopicSettings(partitions=2, compacted=True)):
            with pytest.raises(ConfigError, match=topic):
                admin.ensure_topics({topic: other})

    def test_an_unknown_topic_is_an_error_that_names_it(self, bench: Bench) -> None:
        topic = bench.topic(2)
        with pytest.raises(ConfigError, match="nowhere"):
            bench.producer().commit([new("nowhere", 0, "a")])
        with pytest.raises(ConfigError, match="nowhere"):
            bench.transport.reader({TopicPartition("nowhere", 0): 0})
        with pytest.raises(ConfigError, match="nowhere"):
            bench.transport.member("g", ["nowhere"], name="m")
        with pytest.raises(ConfigError, match=topic):
            bench.producer().commit([new(topic, 2, "a")])

    def test_ends(self, bench: Bench) -> None:
        topic = bench.topic(2)
        empty, full = places_of(bench.transport, topic)
        admin = bench.transport.admin
        assert admin.end_offsets(topic) == admin.begin_offsets(topic) == {empty: 0, full: 0}
        bench.write([new(topic, 1, f"{number}") for number in range(5)])
        assert admin.begin_offsets(topic)[full] == 0
        assert admin.end_offsets(topic)[full] > bench.all_records(topic)[-1].offset
        assert admin.end_offsets(topic)[empty] == 0
        assert admin.end_offsets(topic, partitions=[]) == {}
        for settled in (False, True):
            found = admin.end_offsets(topic, settled=settled, partitions=[full.partition])
            assert found == {full: admin.end_offsets(topic)[full]}

    def test_what_was_deleted_is_gone_and_the_rest_keeps_its_offsets(self, bench: Bench) -> None:
        topic = bench.topic(2)
        group = bench.group(topic)
        bench.write([new(topic, number % 2, f"{number}") for number in range(20)])
        place = TopicPartition(topic, 0)
        before = {record.key: record.offset for record in bench.all_records(topic) if record.partition == 0}
        bench.transport.admin.delete_before({place: before[b"10"]})
        assert bench.transport.admin.begin_offsets(topic)[place] == before[b"10"]
        after = {record.key: record.offset for record in bench.all_records(topic) if record.partition == 0}
        assert after == {key: offset for key, offset in before.items() if int(key or b"") >= 10}
        assert sum(bench.transport.admin.lag(group, topic).values()) == 15
        # Positions before the first one kept are moved to it.
        reader = bench.transport.reader({place: 0})
        assert texts(take(bench.transport, reader, 5)) == ["10", "12", "14", "16", "18"]

    def test_deleting_goes_on_where_it_was_left_and_never_back(self, bench: Bench) -> None:
        topic = bench.topic(2)
        left, right = places_of(bench.transport, topic)
        bench.write([new(topic, number % 2, f"{number}") for number in range(12)])
        offsets = {record.key: record.offset for record in bench.all_records(topic)}
        admin = bench.transport.admin
        admin.delete_before({left: offsets[b"8"], right: 0})
        for again in (offsets[b"8"], offsets[b"4"], 0):  # whoever was away may come late
            admin.delete_before({left: again})
        assert admin.begin_offsets(topic) == {left: offsets[b"8"], right: 0}
        ends = admin.end_offsets(topic)
        with pytest.raises(PositionMissing, match="beyond the end"):
            admin.delete_before({right: ends[right] + 1})
        assert [record.key for record in bench.all_records(topic) if record.partition == 1] == [
            b"%d" % number for number in range(1, 12, 2)
        ]
        admin.delete_before(ends)
        assert admin.begin_offsets(topic) == ends == admin.end_offsets(topic)
        assert bench.all_records(topic) == []
        bench.write([new(topic, 0, "next")])
        (record,) = bench.all_records(topic)
        assert record.offset >= ends[left]

    def test_who_reads_what_is_deleted_goes_on_at_the_first_record_kept(self, bench: Bench) -> None:
        topic = bench.topic()
        (place,) = places_of(bench.transport, topic)
        bench.write([new(topic, 0, f"{number}") for number in range(20)])
        offsets = {record.key: record.offset for record in bench.all_records(topic)}
        reader = bench.transport.reader({place: 0})
        seen: list[str] = []

        def saw(key: str) -> bool:
            seen.extend(texts(reader.poll(1)))
            return key in seen

        bench.await_true("the first record", lambda: saw("0"))
        bench.connect().admin.delete_before({place: offsets[b"15"]})
        # What it had fetched it may still deliver; then it goes on behind the gap, and nothing twice.
        bench.await_true("the last record", lambda: saw("19"))
        assert seen[-5:] == ["15", "16", "17", "18", "19"]
        assert sorted(set(seen), key=int) == seen
        late = bench.transport.reader({place: offsets[b"19"]})
        late.seek(place, offsets[b"3"])
        assert texts(take(bench.transport, late, 5)) == ["15", "16", "17", "18", "19"]

    def test_a_group_goes_on_after_what_it_has_done_was_deleted(self, bench: Bench) -> None:
        topic = bench.topic()
        (place,) = places_of(bench.transport, topic)
        group = bench.group(topic)
        bench.write([new(topic, 0, f"{number}") for number in range(10)])
        offsets = {record.key: record.offset for record in bench.all_records(topic)}
        bench.producer().commit([], positions={place: Position(offsets[b"6"])}, group=group)
        bench.transport.admin.delete_before({place: offsets[b"6"]})
        assert bench.transport.admin.lag(group, topic) == {place: 4}
        transport, member = bench.join(group, topic)
        bench.settle([(transport, member)], topic)
        position_new(member, {})
        assert texts(take(transport, member, 4)) == ["6", "7", "8", "9"]

    def test_newest_per_key_survives_compaction(self, bench: Bench) -> None:
        topic = bench.topic(compacted=True)
        group = bench.group(topic)
        producer = bench.producer()
        for turn in range(20):
            producer.commit([NewRecord(topic, 0, b"%d" % key, b"%d" % turn) for key in range(5)])
        producer.commit([NewRecord(topic, 0, b"0", None), NewRecord(topic, 0, b"6", b"only")])
        before = bench.all_records(topic)
        newest = {record.key: (record.offset, record.value) for record in before}
        assert newest[b"0"][1] is None
        bench.transport.admin.compact(topic)
        after = bench.all_records(topic)
        assert {record.key: (record.offset, record.value) for record in after} == newest
        assert len(after) <= len(before)
        assert sum(bench.transport.admin.lag(group, topic).values()) == len(after)
        # A follower that was in the middle goes on over the gaps.
        place = TopicPartition(topic, 0)
        reader = bench.transport.reader({place: before[50].offset})
        wanted = [record.offset for record in after if record.offset >= before[50].offset]
        assert [record.offset for record in take(bench.transport, reader, len(wanted))] == wanted
        producer.commit([NewRecord(topic, 0, b"0", b"back")])
        assert {record.key: record.value for record in bench.all_records(topic)}[b"0"] == b"back"

    def test_lag_counts_records(self, bench: Bench) -> None:
        topic = bench.topic(2)
        group = bench.group(topic)
        admin = bench.transport.admin
        left, right = places_of(bench.transport, topic)
        assert admin.lag(group, topic) == {left: 0, right: 0}
        producer = bench.producer()
        for number in range(10):
            # One transaction each: a log that marks commits in the partition has twice as many offsets.
            producer.commit([new(topic, 0, f"{number}")])
        assert admin.lag(group, topic) == {left: 10, right: 0}
        offsets = [record.offset for record in bench.all_records(topic)]
        producer.commit([], positions={left: Position(offsets[6])}, group=group)
        assert admin.lag(group, topic) == {left: 4, right: 0}
        producer.commit([], positions={left: Position(offsets[9] + 1)}, group=group)
        assert admin.lag(group, topic) == {left: 0, right: 0}

    def test_topics_can_be_deleted(self, bench: Bench) -> None:
        topic, kept = bench.topic(2), bench.topic()
        bench.write([new(topic, 1, "a"), new(kept, 0, "b")])
        bench.transport.admin.delete_topics([topic])
        bench.await_true("the topic is gone", lambda: topic not in bench.transport.admin.topics())
        assert texts(bench.all_records(kept)) == ["b"]

    def test_made_durable_everything_is_still_there(self, bench: Bench) -> None:
        topic = bench.topic()
        bench.write([new(topic, 0, "a")])
        bench.transport.admin.make_durable()
        assert texts(bench.all_records(topic, transport=bench.connect())) == ["a"]
