"""What a worker begins of partitions that come and go."""

from __future__ import annotations

from typing import cast

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.roles.verifier import VERIFIER
from rftstream.service.loops.owned_partitions import OwnedPartitions
from rftstream.service.role import ConcurrentStep
from rftstream.testing.memory_run import ManualClock
from rftstream.transport.base import TopicSettings
from rftstream.transport.memory.transport import MemoryLog

pytestmark = pytest.mark.law("lost", "twice")

RECORDS = 5


def test_what_was_polled_before_a_partition_went_and_came_is_begun_once() -> None:
    transport = MemoryLog(ManualClock(1000.0).now).connect()
    transport.admin.ensure_topics({topic: TopicSettings(partitions=4) for topic in ("rollouts", "verified")})
    transport.admin.commit_initial("verifier", ["rollouts"])
    producer = transport.producer("test")
    producer.start()
    producer.commit([NewRecord("rollouts", part, b"k", b"v") for part in range(4) for _ in range(RECORDS)])

    def joined(name: str) -> OwnedPartitions:
        member = transport.member("verifier", ["rollouts"], name=name)
        return OwnedPartitions(transport, VERIFIER, cast(ConcurrentStep, None), member)

    lost: list[TopicPartition] = []
    worker = joined("a")
    while worker.poll(100, lost.append) and len(worker) < 4:
        pass
    worker.poll(100, lost.append)  # polled, and not begun
    other = joined("b")
    while len(other) < 2:
        other.poll(0, lost.append)
        worker.poll(100, lost.append)
    assert len(set(lost)) == 2
    other.close()
    while len(worker) < 4:
        worker.poll(100, lost.append)
    for _ in range(4):
        worker.poll(100, lost.append)
    begun = [(record.place, record.offset) for record, _ in worker.records()]
    assert sorted(begun) == sorted(set(begun)), "begun twice"
    assert len(begun) == 4 * RECORDS
