"""Conformance: members of groups that share work, join, leave, fall silent and return."""

from __future__ import annotations

import time

import pytest

from rftstream.contracts.records import TopicPartition
from rftstream.errors import AssignmentLost
from rftstream.testing.conformance_tests.bench import Bench, CarryingWorker, begin, new, places_of, take, texts
from rftstream.testing.conformance_tests.reading import BenchFixtures
from rftstream.transport.base import MAX_METADATA_BYTES, Member, Position, Transport


class GroupConformance(BenchFixtures):
    """Tests of members that share work, join, leave, fall silent and return."""

    def test_members_share_the_partitions(self, bench: Bench) -> None:
        """Each member owns a fair share of the partitions, and together the members read every record once."""
        topic = bench.topic(6)
        group = bench.group(topic)
        members: list[tuple[Transport, Member]] = []
        for num_members in (1, 2, 3):
            members.append(bench.joined(group, topic, beside=members))
            assert {len(member.assignment()) for _, member in members} == {6 // num_members}
        bench.write([new(topic, number % 6, f"{number}") for number in range(60)])
        found = []
        for transport, member in members:
            begin(member)
            records = take(transport, member, 20)
            assert {record.place for record in records} <= set(member.assignment())
            found += texts(records)
        assert sorted(found, key=int) == [f"{number}" for number in range(60)]
        members.pop(0)[1].close()
        bench.settle(members, topic)

    def test_groups_do_not_share_with_each_other(self, bench: Bench) -> None:
        """Each of two groups reads all records."""
        topic = bench.topic(2)
        bench.write([new(topic, number % 2, f"{number}") for number in range(10)])
        for _ in range(2):
            transport, member = bench.joined(bench.group(topic), topic, begins=True)
            assert sorted(texts(take(transport, member, 10)), key=int) == [f"{number}" for number in range(10)]

    def test_partitions_of_one_number_go_together(self, bench: Bench) -> None:
        """A member of a group on two topics owns partitions of the same numbers on both."""
        tasks, partials = bench.topic(4), bench.topic(4, compacted=True)
        group = bench.group(tasks, partials)
        members = [bench.join(group, tasks, partials) for _ in range(2)]
        bench.settle(members, tasks, partials)
        for _, member in members:
            of_tasks, of_partials = (
                {place.partition for place in member.assignment() if place.topic == topic}
                for topic in (tasks, partials)
            )
            assert of_tasks == of_partials
            assert len(of_tasks) == 2

    def test_a_new_partition_gives_nothing_before_it_was_positioned(self, bench: Bench) -> None:
        """A newly owned partition gives no record before `seek`."""
        topic = bench.topic()
        group = bench.group(topic)
        bench.write([new(topic, 0, f"{number}") for number in range(5)])
        transport, member = bench.joined(group, topic)
        for _ in range(5):
            assert member.poll() == []
        place = TopicPartition(topic, 0)
        member.seek(place, bench.all_records(topic)[3].offset)
        assert texts(take(transport, member, 2)) == ["3", "4"]
        assert member.position(place) > bench.all_records(topic)[4].offset

    def test_paused_partitions_give_nothing_and_keep_their_place(self, bench: Bench) -> None:
        """A paused partition gives no record and wakes nobody. It stays assigned, and continues after `resume`."""
        topic = bench.topic(2)
        group = bench.group(topic)
        transport, member = bench.joined(group, topic, begins=True)
        left, right = places_of(transport, topic)
        member.pause([left])
        bench.write([new(topic, number % 2, f"{number}") for number in range(10)])
        assert texts(take(transport, member, 5)) == ["1", "3", "5", "7", "9"]
        started = time.monotonic()
        transport.wait([member], 0.3)
        assert member.poll() == []
        assert time.monotonic() - started >= 0.25
        assert set(member.assignment()) == {left, right}
        member.resume([left])
        assert texts(take(transport, member, 5)) == ["0", "2", "4", "6", "8"]

    def test_a_successor_finds_what_was_finished_out_of_order(self, bench: Bench) -> None:
        source, target = bench.topic(), bench.topic()
        group = bench.group(source)
        place = TopicPartition(source, 0)
        bench.write([new(source, 0, f"{number}") for number in range(10)])
        transport, member = bench.joined(group, source, begins=True)
        records = {text: record for record in take(transport, member, 10) for text in texts([record])}
        finished = ["0", "1", "5", "8"]
        # The metadata beside the position belongs to the caller. Here it has its greatest length.
        beside = ",".join(str(records[text].offset) for text in finished[2:]).ljust(MAX_METADATA_BYTES)
        bench.producer(transport).commit(
            [new(target, 0, text) for text in finished],
            positions={place: Position(records["2"].offset, beside)},
            snapshot=member.snapshot(),
        )
        transport.close()

        transport, member = bench.joined(group, source)
        position = member.committed([place])[place]
        assert position.metadata == beside
        done = {int(offset) for offset in position.metadata.split(",")}
        member.seek(place, position.offset)
        todo = [record for record in take(transport, member, 8) if record.offset not in done]
        assert texts(todo) == ["2", "3", "4", "6", "7", "9"]
        bench.producer(transport).commit(
            [new(target, 0, text) for text in texts(todo)],
            positions={place: Position(member.position(place))},
            snapshot=member.snapshot(),
        )
        assert sorted(texts(bench.all_records(target)), key=int) == [f"{number}" for number in range(10)]
        assert transport.admin.lag(group, source) == {place: 0}

    def test_who_lost_a_partition_cannot_commit_for_it(self, bench: Bench) -> None:
        source, target = bench.topic(2), bench.topic()
        group = bench.group(source)
        first = bench.joined(group, source)
        snapshot = first[1].snapshot()
        second = bench.joined(group, source, beside=[first])
        (lost,) = second[1].assignment()
        producer = bench.producer(first[0])
        with pytest.raises(AssignmentLost, match=source):
            producer.commit([new(target, 0, "zombie")], positions={lost: Position(0, "zombie")}, snapshot=snapshot)
        assert bench.all_records(target) == []
        assert bench.transport.admin.committed(group)[lost] == Position(0)
        (kept,) = first[1].assignment()
        producer.commit([new(target, 0, "kept")], positions={kept: Position(0, "kept")}, snapshot=first[1].snapshot())
        assert texts(bench.all_records(target)) == ["kept"]
        # The refused records are gone: the producer's next transaction does not contain them.
        assert bench.transport.admin.committed(group) == {lost: Position(0), kept: Position(0, "kept")}

    def test_a_partition_that_came_back_is_another_assignment(self, bench: Bench) -> None:
        source, target = bench.topic(2), bench.topic()
        group = bench.group(source)
        bench.write([new(source, number % 2, f"{number}") for number in range(10)])
        first = bench.joined(group, source, begins=True)
        old = first[1].snapshot()
        second = bench.joined(group, source, beside=[first])
        (away,) = second[1].assignment()
        second[1].close()
        bench.settle([first], source)
        assert first[1].assignment()[away] != old.assignment[away]
        producer = bench.producer(first[0])
        with pytest.raises(AssignmentLost):
            producer.commit([new(target, 0, "old work")], positions={away: Position(0, "old")}, snapshot=old)
        # The member starts afresh: it gets nothing before it seeks the partition again.
        for _ in range(5):
            assert away not in {record.place for record in first[1].poll()}
        producer.commit([new(target, 0, "new work")], positions={away: Position(0)}, snapshot=first[1].snapshot())
        assert texts(bench.all_records(target)) == ["new work"]

    def test_a_silent_member_loses_its_partitions(self, bench: Bench) -> None:
        topic, target = bench.topic(4), bench.topic()
        group = bench.group(topic)
        timeout_s = bench.harness.session_timeout_s
        silent = bench.joined(group, topic, session_timeout_s=timeout_s)
        alive = bench.joined(group, topic, session_timeout_s=timeout_s, beside=[silent])
        old = silent[1].snapshot()
        bench.harness.expire([alive])
        bench.settle([alive], topic)
        place = next(iter(old.assignment))
        producer = bench.producer(silent[0])
        with pytest.raises(AssignmentLost):
            producer.commit([new(target, 0, "zombie")], positions={place: Position(0, "zombie")}, snapshot=old)
        # The member is back with its next call, under other numbers.
        bench.settle([silent, alive], topic)
        for place, number in silent[1].assignment().items():
            assert old.assignment.get(place) != number
        assert bench.all_records(target) == []

    def test_a_member_that_works_lives_on_however_long_that_takes(self, bench: Bench) -> None:
        """The member keeps its partitions, and its work is committed. A member that joins meanwhile does not wait for
        it."""
        if not bench.harness.lives_on_while_working:
            return
        topic, target = bench.topic(4), bench.topic()
        group = bench.group(topic)
        timeout_s = bench.harness.session_timeout_s
        busy = bench.joined(group, topic, session_timeout_s=timeout_s)
        alive = bench.joined(group, topic, session_timeout_s=timeout_s, beside=[busy])
        old = busy[1].snapshot()
        place = next(iter(old.assignment))
        with busy[1].working():
            bench.harness.expire([alive])
            bench.harness.expire([alive])
            bench.producer(busy[0]).commit([new(target, 0, "done")], positions={place: Position(0)}, snapshot=old)
            third = bench.join(group, topic, session_timeout_s=timeout_s)

            def third_has_some() -> bool:
                for transport, member in (alive, third):
                    transport.wait([member], 0.01)
                return bool(third[1].assignment())

            bench.await_true("who joins has something to do", third_has_some)
        bench.settle([busy, alive, third], topic)
        kept = set(busy[1].assignment().items()) & set(old.assignment.items())
        assert kept, "none of its work begins anew, but what went to the third"
        assert texts(bench.all_records(target)) == ["done"]

    def test_workers_that_come_and_go_carry_everything_once(self, bench: Bench) -> None:
        source, target = bench.topic(6), bench.topic(6)
        group = bench.group(source)
        total = 1200
        producer = bench.producer()
        workers: list[CarryingWorker] = []

        def hire() -> None:
            workers.append(CarryingWorker(bench.connect(), group, source, target, name=bench.name("worker")))

        for round_ in range(6):
            start = round_ * 200
            producer.commit([new(source, number % 6, f"{number}") for number in range(start, start + 200)])
            hire()
            if round_ in (2, 4):
                workers.pop(0).member.close()
            for _ in range(2):
                for worker in workers:
                    worker.turn(max_records=17)

        def all_carried() -> bool:
            for worker in workers:
                worker.turn()
            return sum(bench.transport.admin.lag(group, source).values()) == 0

        bench.await_true("no lag", all_carried)
        assert sorted(texts(bench.all_records(target)), key=int) == [f"{number}" for number in range(total)]

    def test_work_polled_before_a_member_left_is_done_by_the_next(self, bench: Bench) -> None:
        topic = bench.topic()
        group = bench.group(topic)
        bench.write([new(topic, 0, f"{number}") for number in range(5)])
        for _ in range(2):
            transport, member = bench.joined(group, topic, begins=True)
            assert texts(take(transport, member, 5)) == ["0", "1", "2", "3", "4"]
            transport.close()
