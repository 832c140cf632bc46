"""Summaries: where a reader begins, what it knows then, and how much of the log it has read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.errors import ConfigError
from rftstream.queries.audits.audit import audit
from rftstream.service.records import outcomes_in_force, versions_in_force
from rftstream.service.records.summaries import begin_with_summary, judge
from rftstream.service.role import Log
from rftstream.testing import RoleDriver
from rftstream.transport.memory.transport import MemoryLog
from tests.flow.scene import Scene
from tests.unit.grown import EVERY, count_reads, grow, play, summarise
from tests.unit.synthetic import SyntheticLog

pytestmark = pytest.mark.law("lost", "twice", "bounded")

END = 10**9


@pytest.fixture
def log() -> SyntheticLog:
    return SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))


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
    return replace(summary, through=summary.through + 1, outcomes=replace(summary.outcomes, above=()))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "begins"),
    [
        (lambda log: None, True),
        (_noise, True),
        (_copy, True),
        (_unclaimed, True),
        (lambda log: _changed(log, _late), False),
        (lambda log: _changed(log, lambda one: replace(one, through=END)), True),
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


@pytest.mark.parametrize("topic", ["outcomes", "steps", "weights"])
@pytest.mark.parametrize("above", [False, True])
def test_what_is_too_large_has_no_summary(
    log: SyntheticLog, topic: str, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 rounds leave 10 siblings open, and one trainer with 21 versions
    monkeypatch.setattr(outcomes_in_force, "MAX_ITEMS", 9 if above else 10)
    monkeypatch.setattr(versions_in_force, "MAX_RUNS", 0 if above else 1)
    monkeypatch.setattr(versions_in_force, "MAX_ITEMS", 21 if above else 22)
    play(log, 20)
    reader = Log(log.transport)
    judge(reader, topic, 0, END)
    assert (reader.rule.summary(topic, END) is None) is above


@pytest.mark.slow
@pytest.mark.parametrize("role", ["feeder", "buffer", "trainer"])
def test_a_start_reads_no_more_of_a_longer_log(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    run = Scene(tmp_path, manifest=role != "feeder")
    log = SyntheticLog(run.transport())
    counts, states = [], []
    for begin in (0, 48):
        grow(log, 48, first=begin)
        read.clear()
        driver = RoleDriver(run, role)
        lost = pytest.raises(ConfigError, match="has no checkpoint") if role == "trainer" else contextlib.nullcontext()
        with lost:  # this log's weights are nowhere
            driver.tick()
        counts.append((read["outcomes"], read["steps"], read["weights"]))
        states.append(driver.service.health())
        driver.service.close()
    assert all(later <= before + EVERY for before, later in zip(*counts, strict=True))
    assert 0 < sum(counts[0]) < 60
    if role != "trainer":
        key, amounts = ("rejected", [96, 192]) if role == "feeder" else ("decided_groups", [192, 384])
        assert [state[key] for state in states] == amounts
