"""The audit where retention deleted: it counts what the log says, compares it, and sees what nobody spoke of."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.control import Trimmed
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.queries.audits import audit as audits
from rftstream.queries.audits.audit import audit
from rftstream.queries.audits.balance import AuditReport
from rftstream.queries.facts.database import Index
from tests.unit.queries.test_audit import counts, new_log
from tests.unit.synthetic import SyntheticLog, outcome

pytestmark = pytest.mark.law("conservation")

SAID = Trimmed(
    name=VersionName(trainer_epoch=1, version=2), checkpoints=(), version=1, sequence=3,
    offsets={"tasks": (4, 2), "rollouts": (4, 2), "verified": (4, 2), "batches": (5,)},
    groups={"trained": 2, "dead": 1}, rollouts={"trained": 4, "dead": 2},
)  # fmt: skip
"""Of groups 0 to 2, of which 0 and 1 are in batch 0."""


@pytest.fixture
def log() -> SyntheticLog:
    """Groups 0, 1, 3, 4 trained in two batches, 2 dead, 5 and 6 on their way."""
    log = new_log()
    log.flow(*range(5))
    log.batch(0, [0, 1])
    log.put("outcomes", outcome(log.siblings(2), GroupResult.dead))
    log.batch(1, [3, 4])
    log.step(1)
    log.step(2)
    log.flow(5)
    log.admit(6)
    return log


def trim(log: SyntheticLog, said: Trimmed = SAID) -> None:
    log.put("control", said)
    log.transport.admin.delete_before({
        TopicPartition(topic, partition): offset
        for topic, offsets in said.offsets.items() for partition, offset in enumerate(offsets)
    })  # fmt: skip


def problem(log: SyntheticLog) -> str:
    report = audit(log.transport)
    assert not report.balanced
    return "\n".join(report.problems)


def without_deleted(report: AuditReport) -> AuditReport:
    return replace(report, deleted_groups=0, deleted_rollouts=0, earliest_version=0)


def test_what_was_said_counts_whether_it_is_gone_or_not(log: SyntheticLog) -> None:
    whole = audit(log.transport)
    assert whole.fine
    log.put("control", SAID)
    said = audit(log.transport)
    log.transport.admin.delete_before({TopicPartition("verified", 0): 3, TopicPartition("batches", 0): 5})
    half = audit(log.transport)
    trim(log)
    gone = audit(log.transport)
    assert said == half == gone
    assert without_deleted(gone) == whole
    assert counts(gone.groups) == {"admitted": 7, "trained": 4, "dead": 1, "to_be_sampled": 1, "verified": 1}
    assert (gone.deleted_groups, gone.deleted_rollouts, gone.earliest_version) == (3, 6, 1)
    assert "deleted by retention: 3 groups with 6 rollouts, and batches below version 1" in gone.to_text()
    assert gone.to_json()["deleted"] == {"groups": 3, "rollouts": 6, "earliest_version": 1}


def test_what_was_said_and_is_still_there_is_told(log: SyntheticLog) -> None:
    log.put("control", SAID)
    said = audit(log.transport)
    assert said.fine
    assert said.to_json()["undeleted"] == {"tasks": 6, "rollouts": 6, "verified": 6, "batches": 5}
    text = "said to be deleted and still there: offsets 6 of tasks, 6 of rollouts, 6 of verified, 5 of batches; the"
    assert text in said.to_text()
    trim(log)
    gone = audit(log.transport)
    assert gone.to_json()["undeleted"] == {}
    assert "still there" not in gone.to_text()


@pytest.mark.parametrize("made", ["before", "after"])
def test_an_index_made_before_or_after_says_the_same(log: SyntheticLog, tmp_path: Path, made: str) -> None:
    with closing(Index(tmp_path, "this run")) as index:
        if made == "before":
            audit(log.transport, index)
        trim(log)
        for _ in range(2):
            assert audit(log.transport, index) == audit(log.transport)
            log.flow(7)
        assert index.notes == []


def test_counts_that_outcomes_do_not_bear_out(log: SyntheticLog) -> None:
    trim(log, replace(SAID, groups={"trained": 3}, rollouts={"trained": 5, "dead": 1}))
    found = problem(log)
    assert "outcomes: 2 trained groups below sequence 3, expected 3 as `trimmed` says" in found
    assert "outcomes: 1 dead group below sequence 3, expected 0 as `trimmed` says" in found
    assert "outcomes: 4 trained rollouts below sequence 3, expected 5" in found


def test_counts_that_do_not_add_up(log: SyntheticLog) -> None:
    trim(log, replace(SAID, groups={"trained": 2}))
    assert "control: trimmed counts 2 groups, expected 3" in problem(log)


def test_more_deleted_than_was_said(log: SyntheticLog) -> None:
    trim(log)
    log.transport.admin.delete_before({TopicPartition("rollouts", 0): 5})
    assert "rollouts: 1 offset at the beginning deleted of which `control` says nothing" in problem(log)


@pytest.mark.law("lost")
def test_a_group_that_vanished_without_an_outcome_is_missed(log: SyntheticLog) -> None:
    """5 was admitted, sampled and verified; the trainer takes it for one that is through."""
    trim(log, replace(SAID, sequence=6, offsets={**SAID.offsets, "tasks": (6, 6), "rollouts": (6, 6),
                                               "verified": (6, 6)},
                      groups={"trained": 4, "dead": 2}, rollouts={"trained": 8, "dead": 4}, version=2))  # fmt: skip
    assert "outcomes: 1 dead group below sequence 6, expected 2 as `trimmed` says" in problem(log)


def test_what_is_deleted_while_it_is_read_is_read_again(log: SyntheticLog, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = audit(log.transport)
    read: list[Trimmed] = []
    once = audits._audit

    def deleting(transport: Any, index: Any, said: Trimmed, doing: Any) -> AuditReport:
        if not read:
            trim(log)
        read.append(said)
        return once(transport, index, said, doing)

    monkeypatch.setattr(audits, "_audit", deleting)
    assert without_deleted(audit(log.transport)) == whole
    assert [said.sequence for said in read] == [0, 3]
