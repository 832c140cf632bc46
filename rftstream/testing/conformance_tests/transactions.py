"""Conformance: transactions, positions without a group membership, claims and fencing."""

from __future__ import annotations

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import PositionMissing, ProducerLost, RecordTooLarge
from rftstream.testing.conformance_tests.bench import Bench, new, texts
from rftstream.testing.conformance_tests.reading import BenchFixtures
from rftstream.transport.base import MAX_METADATA_BYTES, Position


class TransactionConformance(BenchFixtures):
    """Tests of transactions, positions without a group membership, claims and fencing."""

    def test_records_and_positions_commit_together(self, bench: Bench) -> None:
        """Another connection sees the records and the position of one transaction."""
        source, first, second = bench.topic(2), bench.topic(2), bench.topic()
        group = bench.group(source)
        place = TopicPartition(source, 1)
        bench.write([new(source, 1, "in")])
        bench.producer().commit(
            [new(first, 0, "a"), new(first, 1, "b"), new(second, 0, "c")],
            positions={place: Position(1, "beside")},
            group=group,
        )
        other = bench.connect()
        assert sorted(texts(bench.all_records(first, second, transport=other))) == ["a", "b", "c"]
        assert other.admin.committed(group)[place] == Position(1, "beside")

    def test_of_a_failed_transaction_nothing_is_visible(self, bench: Bench) -> None:
        """If one record is too large, neither the other records nor the position change. The producer can commit
        again."""
        source, first, second = bench.topic(), bench.topic(2), bench.topic(max_record_bytes=100)
        group = bench.group(source)
        place = TopicPartition(source, 0)
        producer = bench.producer()
        with pytest.raises(RecordTooLarge):
            producer.commit(
                [new(first, 0, "a"), new(first, 1, "b"), NewRecord(second, 0, b"c", b"x" * 100)],
                positions={place: Position(0, "changed")},
                group=group,
            )
        assert bench.all_records(first, second) == []
        assert bench.transport.admin.committed(group)[place] == Position(0)
        producer.commit([new(first, 0, "again")])
        assert texts(bench.all_records(first, second)) == ["again"]

    def test_metadata_has_a_limit_and_is_kept_up_to_it(self, bench: Bench) -> None:
        """Metadata of MAX_METADATA_BYTES is kept. One byte more is RecordTooLarge, and nothing is written."""
        source, target = bench.topic(), bench.topic()
        group = bench.group(source)
        place = TopicPartition(source, 0)
        producer = bench.producer()
        longest = "é" * (MAX_METADATA_BYTES // 2)
        with pytest.raises(RecordTooLarge, match=str(MAX_METADATA_BYTES)):
            producer.commit([new(target, 0, "a")], positions={place: Position(0, longest + "x")}, group=group)
        assert bench.all_records(target) == []
        producer.commit([], positions={place: Position(0, longest)}, group=group)
        assert bench.transport.admin.committed(group)[place] == Position(0, longest)

    def test_a_single_role_goes_on_where_it_stood(self, bench: Bench) -> None:
        """A single role reads by position, and commits for a group without being a member of it."""
        source, target = bench.topic(2), bench.topic()
        group = bench.group(source)
        bench.write([new(source, number % 2, f"{number}") for number in range(20)])
        producer_name = bench.name("single")
        for _ in range(4):
            transport = bench.connect()
            producer = bench.producer(transport, producer_name)
            committed = transport.admin.committed(group)
            reader = transport.reader({place: position.offset for place, position in committed.items()})
            records: list[NewRecord] = []
            while not records:
                records = [NewRecord(target, 0, record.key, record.value) for record in reader.poll(max_records=5)]
                transport.wait([reader], 0.01)
            positions = {place: Position(reader.position(place)) for place in committed}
            producer.commit(records, positions=positions, group=group)
            transport.close()
        assert sorted(texts(bench.all_records(target)), key=int) == [f"{number}" for number in range(20)]
        assert set(bench.transport.admin.lag(group, source).values()) == {0}

    def test_positions_are_there_from_the_start_or_missing(self, bench: Bench) -> None:
        topic, other = bench.topic(2), bench.topic()
        group = bench.group(topic)
        left = TopicPartition(topic, 0)
        assert bench.transport.admin.committed(group) == {left: Position(0), TopicPartition(topic, 1): Position(0)}
        bench.write([new(topic, 0, "a")])
        bench.producer().commit([], positions={left: Position(1, "kept")}, group=group)
        bench.transport.admin.commit_initial(group, [topic, other])
        committed = bench.transport.admin.committed(group)
        assert committed[left] == Position(1, "kept")
        assert committed[TopicPartition(other, 0)] == Position(0)
        _, member = bench.join(group, topic)
        assert member.committed([left]) == {left: Position(1, "kept")}
        _, stranger = bench.join(bench.name("group"), topic)
        with pytest.raises(PositionMissing, match=topic):
            stranger.committed([left])

    def test_a_newer_producer_fences_the_older(self, bench: Bench) -> None:
        topic = bench.topic()
        group = bench.group(topic)
        name = bench.name("producer")
        older = bench.producer(bench.connect(), name)
        older.commit([new(topic, 0, "older")])
        newer = bench.producer(bench.connect(), name)
        with pytest.raises(ProducerLost):
            older.commit([new(topic, 0, "zombie")], positions={TopicPartition(topic, 0): Position(1)}, group=group)
        newer.commit([new(topic, 0, "newer")])
        with pytest.raises(ProducerLost):
            older.commit([new(topic, 0, "zombie")])
        assert texts(bench.all_records(topic)) == ["older", "newer"]
        assert bench.transport.admin.committed(group)[TopicPartition(topic, 0)] == Position(0)
        older.start()
        older.commit([new(topic, 0, "took it back")])
        with pytest.raises(ProducerLost):
            newer.commit([new(topic, 0, "zombie")])
        assert texts(bench.all_records(topic)) == ["older", "newer", "took it back"]

    def test_producers_of_other_names_do_not_fence(self, bench: Bench) -> None:
        topic = bench.topic()
        first, second = bench.producer(bench.connect()), bench.producer(bench.connect())
        for number in range(4):
            (first, second)[number % 2].commit([new(topic, 0, f"{number}")])
        assert texts(bench.all_records(topic)) == ["0", "1", "2", "3"]

    def test_of_several_claims_the_latest_is_in_force(self, bench: Bench) -> None:
        """A process starts, reads, and claims. So a later claimant has read the claims before its own."""
        control, work = bench.topic(), bench.topic()
        name = bench.name("role")
        claimants = []
        for number in range(3):
            transport = bench.connect()
            producer = bench.producer(transport, name)
            epoch = 1 + max((int(text) for text in texts(bench.all_records(control, transport=transport))), default=0)
            assert epoch == number + 1
            producer.commit([new(control, 0, f"{epoch}")])
            claimants.append(producer)
        for producer in claimants[:-1]:
            with pytest.raises(ProducerLost):
                producer.commit([new(work, 0, "zombie")])
        claimants[-1].commit([new(work, 0, "in force")])
        assert texts(bench.all_records(work)) == ["in force"]

    def test_a_claim_between_start_and_claim_is_fenced(self, bench: Bench) -> None:
        control = bench.topic()
        name = bench.name("role")
        slow = bench.producer(bench.connect(), name)
        fast = bench.producer(bench.connect(), name)
        fast.commit([new(control, 0, "fast")])
        with pytest.raises(ProducerLost):
            slow.commit([new(control, 0, "slow")])
        assert texts(bench.all_records(control)) == ["fast"]
