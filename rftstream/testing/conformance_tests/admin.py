"""Conformance: topics, their ends, deletion, compaction, and the lag of groups."""

from __future__ import annotations

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import ConfigError, PositionMissing
from rftstream.testing.conformance_tests.bench import Bench, new, places_of, position_new, take, texts
from rftstream.testing.conformance_tests.reading import BenchFixtures
from rftstream.transport.base import Jump, Position, TopicSettings


class AdminConformance(BenchFixtures):
    """Tests of the promises of `Transport.admin`, and of its effects on readers and groups."""

    def test_a_topic_keeps_its_settings(self, bench: Bench) -> None:
        """A topic has the settings that it was made with. Other settings for it are a ConfigError that names it."""
        topic = bench.topic(2)
        admin = bench.connect().admin
        admin.ensure_topics({topic: TopicSettings(partitions=2)})
        assert admin.topics()[topic] == TopicSettings(partitions=2)
        for other in (TopicSettings(partitions=3), TopicSettings(partitions=2, compacted=True)):
            with pytest.raises(ConfigError, match=topic):
                admin.ensure_topics({topic: other})

    def test_an_unknown_topic_is_an_error_that_names_it(self, bench: Bench) -> None:
        """Writing to, reading and joining an unknown topic or partition is a ConfigError that names the topic."""
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
        """Begin and end offsets are given for each partition. The end is after the last record."""
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
        """Deleted records are neither read nor counted as lag. The others keep their offsets."""
        topic = bench.topic(2)
        group = bench.group(topic)
        bench.write([new(topic, number % 2, f"{number}") for number in range(20)])
        place = TopicPartition(topic, 0)
        before = {record.key: record.offset for record in bench.all_records(topic) if record.partition == 0}
        bench.transport.admin.delete_before({place: before[b"10"]})
        admin, other = bench.transport.admin, bench.topic()
        assert admin.begin_offsets(topic)[place] == before[b"10"]
        assert admin.begin_offsets(other, topic) == admin.begin_offsets(other) | admin.begin_offsets(topic)
        assert admin.begin_offsets() == {}
        after = {record.key: record.offset for record in bench.all_records(topic) if record.partition == 0}
        assert after == {key: offset for key, offset in before.items() if int(key or b"") >= 10}
        assert sum(bench.transport.admin.lag(group, topic).values()) == 15
        # Positions before the first kept record are moved to it, and the transport reports this once.
        transport = bench.connect()
        reader = transport.reader({place: 0})
        assert transport.jumps() == []
        assert texts(take(transport, reader, 5)) == ["10", "12", "14", "16", "18"]
        assert transport.jumps() == [Jump(place, 0, before[b"10"])]
        assert transport.jumps() == []

    def test_deleting_goes_on_where_it_was_left_and_never_back(self, bench: Bench) -> None:
        """Deleting up to an earlier offset than before changes nothing."""
        topic = bench.topic(2)
        left, right = places_of(bench.transport, topic)
        bench.write([new(topic, number % 2, f"{number}") for number in range(12)])
        offsets = {record.key: record.offset for record in bench.all_records(topic)}
        admin = bench.transport.admin
        admin.delete_before({left: offsets[b"8"], right: 0})
        for again in (offsets[b"8"], offsets[b"4"], 0):  # a process that was away may come late
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
        # The reader may still deliver what it had fetched. Then it continues after the gap, and gives no record twice.
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
        transport, member = bench.joined(group, topic)
        position_new(member, {})
        assert texts(take(transport, member, 4)) == ["6", "7", "8", "9"]

    def test_newest_per_key_survives_compaction(self, bench: Bench) -> None:
        """After a compaction the newest record of each key exists, at its old offset."""
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
        # A follower in the middle continues over the gaps.
        place = TopicPartition(topic, 0)
        reader = bench.transport.reader({place: before[50].offset})
        wanted = [record.offset for record in after if record.offset >= before[50].offset]
        assert [record.offset for record in take(bench.transport, reader, len(wanted))] == wanted
        producer.commit([NewRecord(topic, 0, b"0", b"back")])
        assert {record.key: record.value for record in bench.all_records(topic)}[b"0"] == b"back"

    def test_lag_counts_records(self, bench: Bench) -> None:
        """The lag of a group counts records, not offsets."""
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
        """A deleted topic is gone, and the others keep their records."""
        topic, kept = bench.topic(2), bench.topic()
        bench.write([new(topic, 1, "a"), new(kept, 0, "b")])
        bench.transport.admin.delete_topics([topic])
        bench.await_true("the topic is gone", lambda: topic not in bench.transport.admin.topics())
        assert texts(bench.all_records(kept)) == ["b"]

    def test_made_durable_everything_is_still_there(self, bench: Bench) -> None:
        """After `make_durable` another connection reads all records."""
        topic = bench.topic()
        bench.write([new(topic, 0, "a")])
        bench.transport.admin.make_durable()
        assert texts(bench.all_records(topic, transport=bench.connect())) == ["a"]
