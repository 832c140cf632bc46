"""Which groups are through."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from rftstream.contracts.outcomes import GroupOutcome, GroupResult, ReuseKind, ReuseOffer, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.roles.trainer.retention.completed_groups import CompletedGroups
from tests.suite.each import each

pytestmark = pytest.mark.law("conservation")


def outcome(
    sequence: int, result: GroupResult, *siblings: int, size: int = 2, batch: int | None = None, late: bool = False,
    unscored: tuple[int, ...] = (),
) -> GroupOutcome:  # fmt: skip
    return GroupOutcome(
        group_id=f"sums/0/{sequence}/0", taskset="sums", sequence=sequence, result=result, reason="test", late=late,
        batch_sequence=batch, group_size=size,
        rollouts=tuple(
            RolloutSummary(
                rollout_id=f"sums/0/{sequence}/0/{one}", num_tokens=1, status=RolloutStatus.completed,
                reward=None if one in unscored else 1.0, reason=UnscorableReason.timeout if one in unscored else None,
            )
            for one in siblings
        ),
    )  # fmt: skip


def settled(*outcomes: GroupOutcome, version: int = 0) -> tuple[int, dict[str, int], dict[str, int]]:
    found = CompletedGroups()
    for one in outcomes:
        found.add(one)
    found.advance(version)
    return found.sequence, dict(found.groups), dict(found.rollouts)


def test_each_result_counts_as_the_audit_counts_it() -> None:
    assert settled(
        outcome(0, GroupResult.batched, 0, 1, batch=0, unscored=(1,)),
        outcome(1, GroupResult.filtered, 0, 1),
        outcome(2, GroupResult.dead, 0, 1, unscored=(0, 1)),
        outcome(3, GroupResult.expired, 0, 1),
        version=1,
    ) == (
        4,
        {"trained": 1, "filtered": 1, "dead": 1, "expired": 1},
        {"trained": 1, "filtered": 2, "dead": 3, "expired": 2},
    )


def test_a_batched_one_is_through_once_its_batch_is_below_the_version() -> None:
    one = outcome(0, GroupResult.batched, 0, 1, batch=4)
    assert [settled(one, version=version)[0] for version in (3, 4, 5)] == [0, 0, 1]


def test_a_group_that_a_batch_may_have_once_more_is_not_through() -> None:
    offers = (ReuseOffer(kind=ReuseKind.replay, operator=0, since=3, until=6),)
    batched = replace(outcome(0, GroupResult.batched, 0, 1, batch=4), offers=offers, offsets=(0, 1))
    filtered = replace(outcome(0, GroupResult.filtered, 0, 1), offers=offers, offsets=(0, 1))
    for one in (batched, filtered):
        assert [settled(one, version=version)[0] for version in (5, 6, 7)] == [0, 0, 1]


def test_latecomers_are_waited_for() -> None:
    early = outcome(0, GroupResult.expired, 0, size=3)
    late = [outcome(0, GroupResult.expired, sibling, size=3, late=True) for sibling in (2, 1)]
    assert settled(early)[0] == settled(early, late[0])[0] == settled(*late)[0] == 0
    assert settled(early, *late) == (1, {"expired": 1}, {"expired": 3})


def test_all_before_one_that_is_not_through() -> None:
    assert settled(outcome(0, GroupResult.dead, 0, 1), outcome(2, GroupResult.dead, 0, 1))[0] == 1
    assert settled(outcome(0, GroupResult.dead, 0, 1, size=0))[0] == 0, "written before the size was told"


@each("seed", range(20))
def test_counting_on_from_a_predecessor_gives_the_same(seed: int) -> None:
    random = Random(seed)
    results = [random.choice(list(GroupResult)) for _ in range(30)]
    outcomes = [outcome(i, one, 0, 1, batch=i // 3 if one is GroupResult.batched else None)
                for i, one in enumerate(results)]  # fmt: skip
    random.shuffle(outcomes)
    whole, first = CompletedGroups(), CompletedGroups()
    for one in outcomes:
        whole.add(one)
    for one in outcomes[: random.randrange(30)]:
        first.add(one)
    first.advance(random.randrange(12))
    second = CompletedGroups(first.sequence, first.groups, first.rollouts)
    for one in outcomes:
        second.add(one)
        second.advance(5)
    second.advance(12)
    whole.advance(12)
    assert whole.sequence == second.sequence == 30
    assert whole.groups == second.groups == Counter("trained" if one == "batched" else str(one) for one in results)
    assert whole.rollouts == second.rollouts
