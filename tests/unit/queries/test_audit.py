"""The audit counts every admitted rollout once, also on a log that grows while it is read, and sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.contracts import codec
from rftstream.contracts.control import TasksEnded
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.contracts.versions import StepRecord, VersionName, WeightsAnnounced, WeightsKind
from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.balance import AuditReport, Balance
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.queries.naive_counts import check_counts
from tests.unit.synthetic import SyntheticLog, experience, outcome, piece, rollout, task, verified

pytestmark = pytest.mark.law("conservation")


@pytest.fixture
def log() -> SyntheticLog:
    return new_log()


def new_log(**shape: int) -> SyntheticLog:
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect(), **shape)
    log.step(0, resumed=True)
    return log


def balanced(log: SyntheticLog) -> AuditReport:
    report = audit(log.transport)
    assert report.fine
    assert report.problems == ()
    check_counts(report, log.transport)
    return report


def counts(balance: Balance) -> dict[str, Any]:
    """What is not zero."""
    flat = {**balance.to_json(), **balance.pending_by_stage}
    return {name: count for name, count in flat.items() if count and name not in ("pending", "pending_by_stage")}


# --------------------------------------------------------------------------------------------- what balances


def test_an_empty_log(log: SyntheticLog) -> None:
    report = balanced(log)
    assert counts(report.rollouts) == counts(report.groups) == {}
    assert report.to_json()["lengths"]["trained"] == {"count": 0, "mean": None, "p50": None, "p95": None}
    assert "completion tokens" not in report.to_text()


def test_every_stage_and_outcome(log: SyntheticLog) -> None:
    log.flow(*range(8))
    log.admit(8, 9)
    log.sample(8)
    log.batch(0, [0, 1])
    log.batch(1, [2, 3])
    log.step(1)
    log.decide(4, GroupResult.filtered)
    log.decide(5, GroupResult.expired)
    log.decide(6, GroupResult.dead)
    report = balanced(log)
    assert report.filtered == {"test": 1}
    assert "\n\nfiltered: 14% of the decided groups: 1 test\n" in report.to_text()
    assert counts(report.groups) == {
        "admitted": 10, "to_be_sampled": 1, "sampled": 1, "verified": 1, "batched": 2,
        "trained": 2, "filtered": 1, "expired": 1, "dead": 1,
    }  # fmt: skip
    assert counts(report.rollouts) == {name: 2 * count for name, count in counts(report.groups).items()}
    assert report.version == 1


def test_a_group_stands_where_its_last_sibling_does(log: SyntheticLog) -> None:
    log.admit(0)
    first, second = log.siblings(0)
    log.put("rollouts", rollout(first))
    log.put("verified", verified(first))
    report = balanced(log)
    assert counts(report.groups) == {"admitted": 1, "to_be_sampled": 1}
    assert counts(report.rollouts) == {"admitted": 2, "to_be_sampled": 1, "verified": 1}
    log.put("rollouts", rollout(second))
    assert counts(balanced(log).groups) == {"admitted": 1, "sampled": 1}


def test_a_sibling_without_reward_is_dead_though_its_group_is_trained() -> None:
    log = new_log(group_size=3)
    log.flow(0)
    log.batch(0, [0], unscored=[log.siblings(0)[1].rollout_id])
    log.step(1)
    report = balanced(log)
    assert counts(report.rollouts) == {"admitted": 3, "trained": 2, "dead": 1}
    assert counts(report.groups) == {"admitted": 1, "trained": 1}


def test_latecomers_are_pending_until_they_are_expired(log: SyntheticLog) -> None:
    log.admit(0)
    log.put("rollouts", rollout(log.siblings(0)[0]))
    log.put("verified", verified(log.siblings(0)[0]))
    log.decide(0, GroupResult.expired, only=[0])
    assert counts(balanced(log).rollouts) == {"admitted": 2, "expired": 1, "to_be_sampled": 1}
    late = log.siblings(0)[1]
    log.put("rollouts", rollout(late, status=RolloutStatus.skipped, num_tokens=0))
    log.put("verified", verified(late, reason=UnscorableReason.skipped))
    assert counts(balanced(log).rollouts) == {"admitted": 2, "expired": 1, "verified": 1}
    log.late(0, 1)
    report = balanced(log)
    assert counts(report.rollouts) == {"admitted": 2, "expired": 2}
    assert counts(report.groups) == {"admitted": 1, "expired": 1}
    assert report.lengths["expired"].count == 1, "one was skipped, so it has no length"


def test_a_latecomer_of_a_batched_group_is_not_trained(log: SyntheticLog) -> None:
    log.flow(0)
    late = log.siblings(0)[1].rollout_id
    log.put_all(
        [
            ("outcomes", outcome([log.siblings(0)[0]], GroupResult.batched, batch=0), None),
            ("batches", experience(log.siblings(0)[0], 0, 0, 0), None),
        ]
    )
    log.put("outcomes", outcome([log.siblings(0)[1]], GroupResult.batched, batch=0, late=True))
    report = audit(log.transport)
    assert counts(report.rollouts) == {"admitted": 2, "batched": 1, "expired": 1}
    assert late not in " ".join(report.problems)


@pytest.mark.law("lineage")
def test_a_rollback_takes_the_older_trainers_versions_out_of_force(log: SyntheticLog) -> None:
    log.flow(0, 1, 2)
    for batch in range(3):
        log.batch(batch, [batch])
        log.step(batch + 1)
    assert counts(balanced(log).groups) == {"admitted": 3, "trained": 3}
    log.step(1, epoch=2, resumed=True)
    assert counts(balanced(log).groups) == {"admitted": 3, "trained": 1, "batched": 2}
    log.step(2, epoch=2)
    report = balanced(log)
    assert counts(report.groups) == {"admitted": 3, "trained": 2, "batched": 1}
    assert (report.trainer_epoch, report.version) == (2, 2)


@pytest.mark.law("fencing")
def test_a_zombie_trainer_changes_nothing(log: SyntheticLog) -> None:
    log.flow(0, 1)
    log.batch(0, [0])
    log.batch(1, [1])
    log.step(1)
    log.step(0, epoch=2, resumed=True)
    log.step(2, epoch=1)
    assert counts(balanced(log).groups) == {"admitted": 2, "batched": 2}


def test_lengths_by_outcome(log: SyntheticLog) -> None:
    log.admit(*range(4))
    for sequence in range(4):
        log.sample(sequence, num_tokens=10 * (sequence + 1))
    log.verify(*range(4))
    log.batch(0, [0, 1])
    log.step(1)
    log.decide(2, GroupResult.filtered)
    lengths = balanced(log).to_json()["lengths"]
    assert lengths["trained"] == {"count": 4, "mean": 15.0, "p50": 15.0, "p95": 20.0}
    assert lengths["filtered"] == {"count": 2, "mean": 30.0, "p50": 30.0, "p95": 30.0}
    assert lengths["pending"]["count"] == 2


def test_several_shares_and_an_empty_last_batch() -> None:
    log = new_log(shares=2, partitions=3)
    log.flow(*range(5))
    log.batch(0, range(5))
    log.batch(1, [], last=True)
    log.step(1)
    log.step(2, last=True)
    assert counts(balanced(log).groups) == {"admitted": 5, "trained": 5}


def test_other_peoples_records_are_named_and_not_counted(log: SyntheticLog) -> None:
    log.admit(0)
    log.put_raw(NewRecord("rollouts", 0, b"?", b"?", (("from", b"elsewhere"),)))
    report = balanced(log)
    assert report.unreadable == {"rollouts": 1}
    assert "rollouts: 1 record without id headers" in report.to_text()


# --------------------------------------------------------------------------------------------- what does not


def problem(log: SyntheticLog, *, balances: bool = False) -> str:
    report = audit(log.transport)
    assert not report.fine
    assert report.balanced is balances
    return "\n".join(report.problems)


def ready(log: SyntheticLog) -> None:
    """Two groups on their way, one of them trained."""
    log.flow(0, 1)
    log.batch(0, [0])
    log.step(1)


@pytest.mark.law("twice")
@pytest.mark.parametrize("topic", ["tasks", "rollouts", "verified"])
def test_twins_of_rollouts(log: SyntheticLog, topic: str) -> None:
    ready(log)
    one = log.siblings(1)[0]
    twin = {"tasks": replace(task(one), created_at=9.0), "rollouts": replace(rollout(one), finished_at=9.0),
            "verified": replace(verified(one), verified_at=9.0)}[topic]  # fmt: skip
    log.put(topic, twin)  # type: ignore[arg-type]
    report = audit(log.transport)
    assert report.balanced
    assert not report.fine
    assert {name: count for name, count in report.twins.items() if count} == {topic: 1}
    assert counts(report.rollouts)["admitted"] == 4
    assert report.problems == (f"{topic}: 1 twin: sums/0/1/0/0 ({topic}[1]@0, {topic}[1]@2)",)


@pytest.mark.law("twice")
@pytest.mark.parametrize("topic", ["tasks", "rollouts", "verified", "outcomes"])
def test_copies_and_noise_are_no_twins(log: SyntheticLog, topic: str) -> None:
    """A mirror or a tool that plays records again leaves copies, byte for byte. What roles make of these is an echo."""
    ready(log)
    record = next(iter(Log(log.transport).read(topic)))
    copy = NewRecord(topic, record.partition, record.key, record.value, record.headers)
    log.put_raw(copy, copy, msgspec.structs.replace(copy, value=b"\x80"))
    foreign = {topic: 3}
    if topic in ("tasks", "rollouts"):
        log.put("verified", replace(verified(log.siblings(0)[0]), verified_at=9.0))
        foreign["verified"] = 1
    report = balanced(log)
    assert report.foreign == foreign, report.to_text()
    assert not any(report.twins.values())
    assert f"foreign: 3 on {topic}" in report.to_text()


@pytest.mark.law("twice")
def test_what_is_said_again_is_foreign_where_records_follow_one_another(log: SyntheticLog) -> None:
    ready(log)
    log.put("outcomes", outcome(log.siblings(0), GroupResult.batched, batch=0))
    log.step(1)
    for _ in range(3):
        log.put("weights", WeightsAnnounced(
            model="m", name=VersionName(trainer_epoch=1, version=1), kind=WeightsKind.full, parent=None, object="o",
            num_bytes=1, digest="", weights_digest="", dtype="float32",
        ))  # fmt: skip
    assert balanced(log).foreign == {"outcomes": 1, "weights": 2}


@pytest.mark.law("twice")
def test_twins_and_strangers_among_pieces(log: SyntheticLog) -> None:
    """A piece is unique by its rollout and number; what takes it back belongs to nobody."""
    ready(log)
    known, stranger = log.siblings(1)[0], log.siblings(9)[0]
    log.put("partials", piece(known, 0), piece(known, 1), partition=1)
    log.put_raw(NewRecord("partials", 1, b"sums/0/1/0/0#0", None), NewRecord("partials", 1, b"sums/0/1/0/0#1", None))
    report = audit(log.transport)
    assert report.fine, report.to_text()
    assert report.twins["partials"] == 0
    log.put("partials", piece(known, 1, explorer="another"), piece(stranger, 0), partition=1)
    report = audit(log.transport)
    assert report.twins["partials"] == 1
    assert "partials: 1 rollout that tasks does not have: sums/0/9/0/0 (partials[1]@5)" in report.problems
    assert any(text.startswith("partials: 1 twin: sums/0/1/0/0 1 (") for text in report.problems)


@pytest.mark.law("twice")
def test_a_twin_in_a_batch(log: SyntheticLog) -> None:
    ready(log)
    log.put("batches", experience(log.siblings(0)[0], 0, 0, 2))
    text = problem(log)
    assert "batches: 1 twin: 0 0 sums/0/0/0/0" in text
    assert "batches[0]: 3 experiences of batch 0, expected 2" in text


def test_an_outcome_of_a_group_never_admitted(log: SyntheticLog) -> None:
    ready(log)
    log.decide(7, GroupResult.dead)
    report = audit(log.transport)
    assert not report.balanced
    assert not report.groups.balanced
    assert not report.rollouts.balanced
    assert "outcomes: 1 group that was never admitted: sums/0/7/0 (outcomes[0]@1)" in report.problems


@pytest.mark.parametrize(("topic", "before"), [("rollouts", "tasks"), ("verified", "rollouts")])
def test_a_rollout_from_nowhere(log: SyntheticLog, topic: str, before: str) -> None:
    log.admit(0)
    one = log.siblings(5)[0]
    log.put(topic, rollout(one) if topic == "rollouts" else verified(one))
    assert f"{topic}: 1 rollout that {before} does not have: sums/0/5/0/0 ({topic}[1]@0)" in problem(log)


@pytest.mark.law("lost")
def test_what_the_readers_passed_and_did_not_pass_on_is_lost(log: SyntheticLog) -> None:
    log.admit(0, 2)  # both in partition 0
    log.sample(0)
    log.passed("explorer", "tasks", 2)
    balanced(log)
    log.passed("explorer", "tasks", 3)
    assert "tasks: 1 rollout that the explorers passed, with nothing on rollouts: sums/0/2/0/0" in problem(log)


@pytest.mark.law("lost")
def test_what_the_buffer_passed_without_an_outcome_is_lost(log: SyntheticLog) -> None:
    log.flow(0, 2)
    log.batch(0, [0])
    log.passed("buffer", "verified", 2)
    balanced(log)
    log.passed("buffer", "verified", 4)
    assert "verified: 2 rollouts that the buffer passed, with nothing on outcomes" in problem(log)


def test_a_rollout_that_its_outcome_batched_and_the_batch_does_not_have(log: SyntheticLog) -> None:
    log.flow(0)
    log.batch(0, [0], leave_out=[log.siblings(0)[1].rollout_id])
    assert "batches: 1 rollout not in the batch that the outcome says: sums/0/0/0/1" in problem(log)


def test_a_batch_that_was_trained_but_never_written(log: SyntheticLog) -> None:
    ready(log)
    log.trained[2] = 1
    log.step(2)
    assert "batches: 1 manifest missing below version 2, first of batch 1, share 0" in problem(log)


def test_the_trainers_own_count_must_agree(log: SyntheticLog) -> None:
    log.flow(0)
    log.batch(0, [0])
    log.put("steps", StepRecord(
        name=VersionName(trainer_epoch=1, version=1), batch_sequence=0, positions=(0,), trained_groups=2,
        trained_rollouts=4, weights_digest=None, metrics={},
    ))  # fmt: skip
    assert "steps: 2 trained groups by version 1, expected 1 as outcomes says" in problem(log)


def test_half_a_group(log: SyntheticLog) -> None:
    log.put("tasks", task(log.siblings(0)[0]))
    assert "tasks: 1 group with other than group_size siblings: sums/0/0/0" in problem(log)


def test_fewer_groups_than_the_feeder_ended_with(log: SyntheticLog) -> None:
    log.admit(0)
    log.put("control", TasksEnded(admitted=2, reason="taskset"))
    assert "tasks: 1 group, expected 2 as `end` says" in problem(log)


def test_deleted_records_cannot_be_counted(log: SyntheticLog) -> None:
    ready(log)
    log.transport.admin.delete_before({TopicPartition("tasks", 0): 1})
    assert "tasks: 1 offset at the beginning deleted" in problem(log)


def test_an_outcome_that_cannot_be_decoded(log: SyntheticLog) -> None:
    """One of a group that has none, of a later release. What names no group is noise."""
    ready(log)
    log.put_raw(NewRecord("outcomes", 0, b"?", b"?", (("contract", b"group_outcome"),)))
    assert balanced(log).foreign == {"outcomes": 1}
    later = codec.to_record(outcome(log.siblings(1), GroupResult.dead), "outcomes", 0, run="r", writer_epoch=1)
    headers = tuple(
        (name, b"99" if name in ("contract_version", "readable_since") else text) for name, text in later.headers
    )
    log.put_raw(msgspec.structs.replace(later, headers=headers))
    assert "got group_outcome.v99, expected at most v7" in problem(log)


# --------------------------------------------------------------------------------------------- a live log


class Growing:
    """A transport on whose log something happens whenever the end of a topic is asked for."""

    def __init__(self, transport: Transport, grow: Callable[[], None]) -> None:
        self._transport, self._grow = transport, grow
        self.admin = self

    def end_offsets(self, topic: str, **how: Any) -> dict[TopicPartition, int]:
        self._grow()
        return self._transport.admin.end_offsets(topic)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport if name == "reader" else self._transport.admin, name)


class RandomRun:
    """The roles, each doing one of the things that it may do next."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.log = new_log(
            partitions=self.random.randint(1, 3), shares=self.random.randint(1, 2),
            group_size=self.random.randint(1, 3),
        )  # fmt: skip
        self.admitted, self.batches, self.version, self.epoch = 0, 0, 0, 1
        self.open: set[int] = set()
        """Groups without an outcome."""
        self.closed_early: dict[int, set[int]] = {}
        """Group -> siblings that its outcome did not name and that are still to come."""
        self.stage: dict[tuple[int, int], int] = {}
        self.order: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """(topic, partition) -> siblings in the order of their offsets."""

    def go(self, num_moves: int) -> None:
        moves = [self.admit, self.sample, self.sample, self.verify, self.verify, self.batch, self.reject, self.expire,
                 self.step, self.step, self.resume, self.commit]  # fmt: skip
        for _ in range(num_moves):
            self.random.choice(moves)()

    def admit(self) -> None:
        self.log.admit(self.admitted)
        self.open.add(self.admitted)
        for i in range(self.log.group_size):
            self._arrived("tasks", self.admitted, i, 0)
        self.admitted += 1

    def _arrived(self, topic: str, sequence: int, i: int, stage: int) -> None:
        self.stage[sequence, i] = stage
        self.order.setdefault((topic, sequence % self.log.partitions), []).append((sequence, i))

    def commit(self) -> None:
        """Each reader says up to where it is done."""
        for (topic, partition), siblings in self.order.items():
            group, stage = {"tasks": ("explorer", 1), "rollouts": ("verifier", 2), "verified": ("buffer", 3)}[topic]
            is_open = [self.stage[one] < stage if stage < 3 else one[0] in self.open for one in siblings]
            self.log.passed(group, topic, is_open.index(True) if True in is_open else len(siblings), partition)

    def _some(self, stage: int) -> list[tuple[int, int]]:
        there = [key for key, value in self.stage.items() if value == stage]
        return self.random.sample(there, min(len(there), 2))

    def sample(self) -> None:
        for sequence, i in self._some(0):
            skipped = sequence not in self.open
            one = self.log.siblings(sequence)[i]
            status = RolloutStatus.skipped if skipped else RolloutStatus.completed
            self.log.put("rollouts", rollout(one, num_tokens=0 if skipped else 3, status=status))
            self._arrived("rollouts", sequence, i, 1)

    def verify(self) -> None:
        for sequence, i in self._some(1):
            self.log.put("verified", verified(self.log.siblings(sequence)[i]))
            self._arrived("verified", sequence, i, 2)
            if i in self.closed_early.get(sequence, ()):
                self.log.late(sequence, i)

    def _complete(self) -> list[int]:
        return [s for s in sorted(self.open) if all(self.stage[s, i] == 2 for i in range(self.log.group_size))]

    def batch(self) -> None:
        groups = self._complete()[: self.random.randint(1, 3)]
        unscored = [one.rollout_id for s in groups for one in self.log.siblings(s)[1:] if self.random.random() < 0.3]
        self.log.batch(self.batches, groups, unscored=unscored)
        self.batches += 1
        self.open -= set(groups)

    def reject(self) -> None:
        for sequence in self._complete()[:1]:
            self.log.decide(sequence, self.random.choice([GroupResult.filtered, GroupResult.dead]))
            self.open.discard(sequence)

    def expire(self) -> None:
        for sequence in self.random.sample(sorted(self.open), min(len(self.open), 1)):
            here = [i for i in range(self.log.group_size) if self.stage[sequence, i] == 2]
            if not here:  # a deadline counts from the first one
                continue
            self.log.decide(sequence, GroupResult.expired, only=here)
            self.open.discard(sequence)
            self.closed_early[sequence] = set(range(self.log.group_size)) - set(here)

    def step(self) -> None:
        if self.version < self.batches:
            self.version += 1
            self.log.step(self.version, epoch=self.epoch)

    def resume(self) -> None:
        if self.random.random() < 0.2:
            self.epoch += 1
            self.version = self.random.randint(0, self.version)
            self.log.step(self.version, epoch=self.epoch, resumed=True)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_what_is_written_while_the_audit_reads_is_not_counted(seed: int, num_before: int) -> None:
    """An audit of a long log takes minutes: what is pending in its report was in flight at one moment."""
    run = RandomRun(seed)
    run.go(num_before)
    before, admitted = audit(run.log.transport), run.admitted

    class Read(Growing):
        def reader(self, *args: Any, **how: Any) -> Any:
            if "control" not in str(args) and "summaries" not in str(args):
                run.admit()
                run.go(4)
            return self._transport.reader(*args, **how)

    during = audit(Read(run.log.transport, lambda: None))  # type: ignore[arg-type]
    assert during == before
    assert run.admitted > admitted or not admitted


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 8))
def test_any_flow_balances_at_any_moment(seed: int, num_before: int, num_between: int) -> None:
    run = RandomRun(seed)
    run.go(num_before)
    growing = Growing(run.log.transport, lambda: run.go(run.random.randint(0, num_between)))
    report = audit(growing)  # type: ignore[arg-type]
    assert report.problems == ()
    assert report.fine
    still = audit(run.log.transport)
    assert still.problems == ()
    assert still.fine
    check_counts(still, run.log.transport)
    assert still.groups.admitted == run.admitted
    assert still.groups.trained == run.log.trained[run.version]
