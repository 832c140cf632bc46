"""Summaries of `control`: who begins with one knows what a reader of all of it knows, after each record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from rftstream.contracts import codec
from rftstream.contracts.control import (
    Claim,
    DatasetExported,
    DesiredState,
    Drawn,
    Request,
    RequestKind,
    RunFinished,
    RunManifest,
    RunState,
    TasksEnded,
    Trimmed,
)
from rftstream.contracts.messages import Message
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.summaries import ControlSummary, Summary
from rftstream.contracts.versions import VersionName
from rftstream.queries.audits.audit import audit
from rftstream.service.control_view import ControlReader, ControlView, read_control
from rftstream.service.records import control_in_force
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.records.summaries import SummaryWriter
from rftstream.service.role import Log
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.grown import EVERY, count_reads, summarise
from tests.unit.synthetic import SyntheticLog
from tests.unit.synthetic import task as synthetic_task

pytestmark = pytest.mark.law("lost", "twice", "bounded")

NAME = VersionName(trainer_epoch=1, version=0)
TRAINER_CLAIM = Claim(role=RoleName.trainer, epoch=1, host="h", pid=1, process="trainer-0", claimed_at=0.0)
MANIFEST = RunManifest(
    run="r", created_at=1.0, config="", digests={}, partitions=2, shares=1, seed=7, rftstream_version="1"
)


@pytest.fixture
def log() -> SyntheticLog:
    return SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))


def _whole(log: SyntheticLog) -> ControlView:
    view, reader = ControlView(), Log(log.transport)
    for record, message in reader.in_force("control"):
        view.absorb(record.key, message)
    return view


def _known(view: ControlView) -> tuple[object, ...]:
    return (view.manifest, view.finished, view.ended, view.state, view.trimmed, view.drawn, view.claims, view.retries,
            view.exports)  # fmt: skip


class Life:
    """What becomes of a run, as `control` tells it, with records of strangers in between."""

    def __init__(self, log: SyntheticLog, seed: int) -> None:
        self.log, self.random, self.number = log, Random(seed), 0
        log.put("control", MANIFEST)
        self.claim(RoleName.trainer)
        self.claim(RoleName.feeder)

    def claim(self, role: str = "") -> None:
        role = role or self.random.choice([RoleName.feeder, RoleName.buffer, RoleName.trainer])
        known = _whole(self.log).claims.get(role)
        self.log.put("control", Claim(role=role, epoch=1 + (known.epoch if known else 0), host="h", pid=self.number,
                                      process=f"{role}-0", claimed_at=0.0))  # fmt: skip

    def step(self) -> None:
        """Write one record, each of them another one than those before."""
        self.number += 1
        one = str(self.random.randrange(4))
        request = Request(request_id=one, kind=RequestKind.retry_dead, arguments={"n": self.number}, expires_at=9e9)
        export = DatasetExported(export_id=f"e{self.number}", digest="", form="sft", filters={}, through=(0,),
                                 num_rows=1, folder="/", by="ada")  # fmt: skip
        steps: list[Callable[[], None]] = [
            lambda: self.put(Trimmed(name=NAME, checkpoints=(NAME,), sequence=self.number)),
            lambda: self.put(Drawn(seen=0, admitted=self.number, drawn={"sums": self.number}, alone=one < "2")),
            lambda: self.put(RunState(state=self.random.choice(list(DesiredState)), by=str(self.number))),
            lambda: self.put(request),
            lambda: self.withdraw(f"request/{one}"),
            lambda: self.put(RunFinished(reason="steps", name=self.trainer(), finished_at=float(self.number))),
            lambda: self.put(TasksEnded(admitted=self.number, reason="taskset")),
            lambda: self.withdraw(self.random.choice(["finished", "end", "state", "manifest", "claim/trainer"])),
            self.claim,
            lambda: self.put(export),
            lambda: self.log.put_raw(NewRecord("control", 0, b"manifest", b"\xc1", ())),
            lambda: self.put(replace(MANIFEST, seed=self.number)),
            lambda: self.log.put_raw(self.stale()),
        ]  # fmt: skip
        self.random.choice(steps)()

    def put(self, message: Message) -> None:
        self.log.put("control", message)

    def withdraw(self, key: str) -> None:
        self.log.put_raw(NewRecord("control", 0, key.encode(), None, ()))

    def trainer(self) -> VersionName:
        return VersionName(trainer_epoch=_whole(self.log).claims[RoleName.trainer].epoch, version=0)

    def stale(self) -> NewRecord:
        """Return a copy of any record, which is foreign if it says something of an older trainer or a claim."""
        record = self.random.choice([*Log(self.log.transport).read("control")])
        return NewRecord("control", 0, record.key, record.value, record.headers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whenever_somebody_is_killed_the_next_one_knows_what_a_reader_of_all_of_it_knows(
    log: SyntheticLog, seed: int
) -> None:
    """After each record, each summary and each change of who writes them; the audit finds all of them true."""
    life, follower, num_begun = Life(log, seed), ControlReader(log.transport), 0
    writer = SummaryWriter(log.transport, ["control"], EVERY)
    for _ in range(150):
        life.step()
        writer.committed([])
        writer.look()
        for summary in writer.take():
            assert summary.message is not None
            assert _known(read_control(log.transport)) == _known(_whole(log)) == _known(follower.read())
            if life.random.random() < 0.9:  # else it is killed before this is on the log
                log.put("summaries", summary.message)
            else:
                writer.begin()
        if life.random.random() < 0.1:
            writer.begin()
        rule = RecordsInForce(log.transport)
        num_begun += rule.begin_control().offset > 0
        view = read_control(log.transport, log=Log(log.transport, rule))
        assert _known(view) == _known(_whole(log)) == _known(follower.read())
        for role, claim in view.claims.items():
            assert rule.is_claimed(role, claim.epoch) and not rule.is_claimed(role, claim.epoch + 1)
        # The same rule can read all of it afterwards, with the same judgement of each record.
        fresh, offsets = RecordsInForce(log.transport), [*Log(log.transport).read("control")]
        assert [*rule.messages(offsets)] == [*fresh.messages(offsets)]
    assert num_begun > 100
    assert not [problem for problem in audit(log.transport).problems if problem.startswith("summaries")]


def test_a_start_reads_no_more_of_a_longer_control(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    life, counts = Life(log, 0), []
    for _ in range(3):
        for _ in range(10):
            for _ in range(EVERY):
                life.number += 1
                life.put(Trimmed(name=NAME, checkpoints=(NAME,), sequence=life.number))
                life.put(Drawn(seen=0, admitted=0, drawn={"sums": life.number}, alone=True))
            summarise(log, "control")
        read = count_reads(monkeypatch)
        assert read_control(log.transport).deleted.sequence == life.number
        counts.append(read["control"])
        assert len(RecordsInForce(log.transport).begin_control().records) == 5
    assert 0 < max(counts) <= 3 * EVERY


def test_that_a_run_was_imported_outlives_the_record_that_says_it(log: SyntheticLog) -> None:
    log.put("control", MANIFEST, TasksEnded(admitted=1, reason="imported"), TRAINER_CLAIM)
    log.put_raw(NewRecord("control", 0, b"end", None, ()))
    (task,) = log.siblings(0)[:1]
    log.put_raw(codec.to_record(synthetic_task(task), "tasks", 0, run="another", writer_epoch=7))
    for number in range(1, 4 * EVERY):
        log.put("control", Trimmed(name=NAME, checkpoints=(NAME,), sequence=number))
    summarise(log, "control")
    rule = RecordsInForce(log.transport)
    assert rule.begin_control().offset > 0
    assert len([*rule.messages(Log(log.transport).read("tasks"))]) == 1


def _changed(log: SyntheticLog, change: Callable[[ControlSummary], ControlSummary]) -> None:
    through = RecordsInForce(log.transport).begin_control().offset
    told = [one for _, one in Log(log.transport).in_force("summaries") if isinstance(one, Summary)]
    newest = next(one for one in told if one.through == through)
    assert newest.control is not None
    log.put("summaries", replace(newest, through=through + 1, control=change(newest.control)))


@pytest.mark.parametrize(
    "change",
    [
        lambda said: replace(said, records=said.records[:-1]),
        lambda said: replace(said, was_imported=True),
        lambda said: replace(said, records=(*said.records[:-1], replace(said.records[-1], value=b"\xc1"))),
    ],
    ids=["one-missing", "imported", "damaged"],
)
def test_what_the_one_before_does_not_bear_out_is_not_trusted(
    log: SyntheticLog, change: Callable[[ControlSummary], ControlSummary], caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(log, 0)
    for _ in range(5 * EVERY):
        life.put(RunState(state=DesiredState.paused, by="ada", since=1.0))
    summarise(log, "control")
    _changed(log, change)
    assert RecordsInForce(log.transport).begin_control().offset == 0
    assert "says something else of control than stands there" in caplog.text
    assert _known(read_control(log.transport)) == _known(_whole(log))
    assert any("whoever begins with it would go wrong" in problem for problem in audit(log.transport).problems)


@pytest.mark.parametrize("above", [False, True])
def test_what_is_too_large_has_no_summary(log: SyntheticLog, above: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Life(log, 0)
    size = sum(control_in_force._num_bytes(record) for record in Log(log.transport).control())
    monkeypatch.setattr(control_in_force, "MAX_SUMMARY_BYTES", size - above)
    rule, end = RecordsInForce(log.transport), log.transport.admin.end_offsets("control")[TopicPartition("control", 0)]
    assert [*rule.messages(Log(log.transport).read("control"))]
    assert (rule.summary("control", end) is None) is above
