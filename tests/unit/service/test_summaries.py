"""Summaries: where a reader begins, what it knows then, and how much of the log it has read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.queries.audit import audit
from rftstream.service import outcomes_in_force, versions_in_force
from rftstream.service.role import Log
from rftstream.service.summaries import SummaryWriter, begin_with_summary, judge
from rftstream.testing import RoleDriver
from rftstream.transport.memory.clients import MemoryReader
from rftstream.transport.memory.transport import MemoryLog
from tests.flow.scene import Scene
from tests.unit.synthetic import SyntheticLog, outcome

pytestmark = pytest.mark.law("lost", "twice", "bounded")

EVERY = 4
END = 10**9


@pytest.fixture
def log() -> SyntheticLog:
    return SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))


def decided(
    log: SyntheticLog, sequence: int, result: GroupResult, batch: int | None = None, come: int = 2
) -> GroupOutcome:
    found = outcome(log.siblings(sequence)[:come], result, batch=batch)
    return replace(found, group_size=log.group_size)


def announced(version: int, epoch: int = 1) -> WeightsAnnounced:
    name, is_full = VersionName(trainer_epoch=epoch, version=version), version % 3 == 0
    return WeightsAnnounced(
        model="m", name=name, kind=WeightsKind.full if is_full else WeightsKind.delta, object=f"o{version}",
        parent=None if is_full else replace(name, version=version - 1), num_bytes=1, digest="d", weights_digest="w",
        dtype="float32", resumed=version == 0,
    )  # fmt: skip


def play(log: SyntheticLog, rounds: int, *, first: int = 0) -> None:
    """In each round a dead group, one that is decided too early, and a batch; groups are decided out of order."""
    for batch in range(first, first + rounds):
        begin = 4 * batch
        log.put("outcomes", decided(log, begin + 1, GroupResult.dead))
        log.put("outcomes", decided(log, begin + 3, GroupResult.expired, come=1))
        if batch % 2:
            late = outcome(log.siblings(begin + 3)[1:], GroupResult.expired, late=True)
            log.put("outcomes", replace(late, group_size=log.group_size))
        log.put("outcomes", *(decided(log, begin + one, GroupResult.batched, batch) for one in (0, 2)))
        log.trained[batch + 1] = 2 * (batch + 1)
        if batch == 0:
            log.step(0, resumed=True)
            log.put("weights", announced(0))
        log.step(batch + 1)
        log.put("weights", announced(batch + 1))


def summarise(log: SyntheticLog, *topics: str, every: int = EVERY) -> list[Summary]:
    """Write the summaries of what stands there, as the role would that has just started."""
    writer = SummaryWriter(log.transport, topics or ("outcomes", "steps", "weights"), every)
    found = []
    for _ in range(200):
        writer.look()
        for output in writer.take():
            assert isinstance(output.message, Summary)
            found.append(output.message)
            log.put("summaries", output.message)
    return found


@pytest.mark.parametrize("topic", ["outcomes", "steps", "weights"])
def test_a_summary_says_what_reading_all_of_it_says(log: SyntheticLog, topic: str) -> None:
    play(log, 12)
    first = summarise(log)
    play(log, 12, first=12)
    more = summarise(log)  # another writer goes on from what the first one wrote
    reader = Log(log.transport)
    start = begin_with_summary(reader, topic)
    assert start.summary == max((one for one in (*first, *more) if one.topic == topic), key=lambda one: one.through)
    assert start.positions == {TopicPartition(topic, 0): start.summary.through}
    judge(reader, topic, start.summary.through, END)
    whole = Log(log.transport)
    judge(whole, topic, 0, END)
    assert reader.rule.summary(topic, END) == whole.rule.summary(topic, END) is not None
    assert not [problem for problem in audit(log.transport).problems if problem.startswith("summaries")]


def _changed(log: SyntheticLog, change: Callable[[Summary], Summary]) -> None:
    newest = begin_with_summary(Log(log.transport), "outcomes").summary
    assert newest is not None
    log.put("summaries", change(newest))


def _late(summary: Summary) -> Summary:
    """The one before, with a place that is not its own."""
    assert summary.outcomes is not None
    return replace(summary, through=summary.through + 9, outcomes=replace(summary.outcomes, above=()))


def _only(log: SyntheticLog) -> None:
    end = log.transport.admin.end_offsets("summaries")
    log.transport.admin.delete_before(end)


def _unclaimed(log: SyntheticLog) -> None:
    record = next(Log(log.transport).read("summaries"))
    headers = tuple((name, b"77" if name == "writer_epoch" else value) for name, value in record.headers)
    log.put_raw(NewRecord("summaries", 0, record.key, record.value, headers))


def _noise(log: SyntheticLog) -> None:
    record = next(Log(log.transport).read("summaries"))
    log.put_raw(
        NewRecord("summaries", 0, record.key, b"\xc1", record.headers), NewRecord("summaries", 0, b"", b"?", ())
    )


def _copy(log: SyntheticLog) -> None:
    record = next(Log(log.transport).read("summaries"))
    log.put_raw(*[NewRecord("summaries", 0, record.key, record.value, record.headers)] * 300)


@pytest.mark.parametrize(
    ("spoil", "begins"),
    [
        (lambda log: None, True),
        (_noise, True),
        (_copy, True),
        (_unclaimed, True),
        (lambda log: _changed(log, _late), False),
        (lambda log: _changed(log, lambda one: replace(one, through=END)), False),
        (_only, False),
    ],
    ids=["whole", "noise", "copies", "unclaimed", "late", "beyond-the-end", "gone"],
)
def test_a_reader_trusts_what_another_summary_bears_out(
    log: SyntheticLog, spoil: Callable[[SyntheticLog], None], begins: bool
) -> None:
    play(log, 20)
    summarise(log)
    spoil(log)
    reader = Log(log.transport)
    start = begin_with_summary(reader, "outcomes")
    assert (start.summary is not None) is begins
    judge(reader, "outcomes", start.positions[TopicPartition("outcomes", 0)], END)
    whole = Log(log.transport)
    judge(whole, "outcomes", 0, END)
    assert reader.rule.summary("outcomes", END) == whole.rule.summary("outcomes", END) is not None


def test_the_audit_tells_a_summary_that_is_not_true(log: SyntheticLog) -> None:
    play(log, 20)
    summarise(log)
    _changed(log, _late)
    assert any("whoever begins with it would go wrong" in problem for problem in audit(log.transport).problems)


@pytest.mark.parametrize("topic", ["outcomes", "steps"])
@pytest.mark.parametrize("above", [False, True])
def test_what_is_too_large_has_no_summary(
    log: SyntheticLog, topic: str, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 rounds leave 10 siblings open, and one trainer
    monkeypatch.setattr(outcomes_in_force, "MAX_ITEMS", 9 if above else 10)
    monkeypatch.setattr(versions_in_force, "MAX_RUNS", 0 if above else 1)
    play(log, 20)
    reader = Log(log.transport)
    judge(reader, topic, 0, END)
    assert (reader.rule.summary(topic, END) is None) is above


@pytest.mark.parametrize("role", ["feeder", "buffer"])
def test_a_start_reads_no_more_of_a_longer_log(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    poll = MemoryReader.poll

    def counted(self: MemoryReader, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[object]:
        found = poll(self, max_records, max_bytes)
        read.update(record.topic for record in found)
        return found  # type: ignore[return-value]

    monkeypatch.setattr(MemoryReader, "poll", counted)
    run = Scene(tmp_path, manifest=role != "feeder")
    log = SyntheticLog(run.transport())
    counts, states = [], []
    for begin in (0, 40):
        play(log, 40, first=begin)
        summarise(log)
        read.clear()
        driver = RoleDriver(run, role)
        driver.tick()
        counts.append((read["outcomes"], read["steps"]))
        states.append(driver.service.health())
        driver.service.close()
    assert counts[0] == counts[1]
    assert all(0 < outcomes < 40 for outcomes, _ in counts)
    key, amounts = ("rejected", [80, 160]) if role == "feeder" else ("decided_groups", [160, 320])
    assert [state[key] for state in states] == amounts
