"""Groups that batches have once more: which, how often, how old, with which bodies; kills, audits, and choices that are
made again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.outcomes import BatchReuse, GroupResult, GroupUse
from rftstream.contracts.rollouts import Posted
from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.data.operators.base import Offer, ReuseLimits, ScoredGroup, Shape
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.data.operators.reuse import ReplayGroups
from rftstream.errors import ConfigError, PositionMissing
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene, make_config
from tests.flow.test_pipelines import buffering, experiences_of, outcomes_of, own, tasks_of

ALWAYS: dict[str, Any] = {"op": "replay", "per_batch": 1, "cool_down": 0, "max_uses": 2, "max_staleness": 100}
HINDSIGHT: dict[str, Any] = {"op": "hindsight", "per_batch": 2, "max_staleness": 100}


class Bonus:
    side = "experience"

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        return Shape({one.sibling: 0.25 for one in group.rollouts if one.reward > 0}, "bonus")


class Impostor:
    """Offers without saying how."""

    side = "experience"

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        return Offer()


def one_each(folder: Path, *operators: dict[str, Any], **settings: Any) -> Scene:
    """A group makes a batch."""
    return buffering(folder, *operators, **{"feeder__groups_per_batch": 1, **settings})


def reuses_of(scene: Scene) -> list[BatchReuse]:
    return [one for one in scene.messages("outcomes") if isinstance(one, BatchReuse)]


def uses_of(scene: Scene) -> list[tuple[int, int, int]]:
    """Batch, sequence of the group, number of the use."""
    return [(one.batch_sequence, use.sequence, use.use) for one in reuses_of(scene) for use in one.uses]


def put(scene: Scene, sequences: Sequence[int], *, version: int | None = None) -> None:
    """Groups on `verified`, each sampled by the version at which it would be trained, or by this one."""
    for sequence in sequences:
        scene.verify(sequence, version=sequence if version is None else version)


def attempt(scene: Scene, sequence: int, rewards: Sequence[float], reached: Sequence[str]) -> None:
    """A group whose attempts reached these."""
    for one, reward, text in zip(scene.siblings(sequence, size=len(rewards)), rewards, reached, strict=True):
        verified = scene.verified(one, reward, version=sequence)
        assert verified.rollout is not None
        messages = (ChatMessage(role="user", content=text),) if text else ()
        posted = Posted(reward=reward, reached=messages)
        scene.put("verified", replace(verified, rollout=replace(verified.rollout, posted=posted)))


def check_again(scene: Scene) -> None:
    found = scene.recompute()
    assert found.fine, found.to_text()
    assert found.num_choices == len(reuses_of(scene))


# --------------------------------------------------------------------------------------------- replay


def test_later_batches_have_groups_once_more(tmp_path: Path) -> None:
    scene = one_each(tmp_path, ALWAYS)
    buffer = RoleDriver(scene, "buffer")
    put(scene, range(6))
    buffer.work()
    uses = uses_of(scene)
    assert [batch for batch, _, _ in uses] == [1, 2, 3, 4, 5], "batch 0 has none to take"
    assert max(Counter(sequence for _, sequence, _ in uses).values()) <= 2
    assert all(sequence < batch for batch, sequence, _ in uses)
    again = [one for one in experiences_of(scene) if one.use]
    for use in (use for one in reuses_of(scene) for use in one.uses):
        first = [one for one in experiences_of(scene) if one.ids.group_id == use.group_id and not one.use]
        later = [one for one in again if one.ids.group_id == use.group_id and one.use == use.use]
        assert [one.weight for one in later] == [0.5 ** (use.use - 1)] * 2
        assert [replace(one, batch_sequence=0, position=0, use=0, weight=1.0) for one in later] == [
            replace(one, batch_sequence=0, position=0) for one in first
        ], "the same tokens, behaviour logprobs, versions and rewards"
    manifests = [one for one in scene.messages("batches") if isinstance(one, BatchManifest)]
    assert [(one.num_groups, one.total_groups, len(one.reused)) for one in manifests] == [
        (1, number + 1, int(number > 0)) for number in range(6)
    ]
    assert [one.metrics.get("reused_groups") for one in manifests] == [0, 1, 1, 1, 1, 1]
    check_again(scene)


def test_copies_that_come_later_change_nothing_of_what_is_computed_again(tmp_path: Path) -> None:
    scene = one_each(tmp_path, ALWAYS)
    put(scene, range(3))
    RoleDriver(scene, "buffer").work()
    put(scene, range(3))
    check_again(scene)


def test_without_such_operators_there_is_nothing_of_it_on_the_log(tmp_path: Path) -> None:
    scene = one_each(tmp_path, {"op": "priority"})
    put(scene, range(3))
    RoleDriver(scene, "buffer").work()
    assert reuses_of(scene) == []
    assert {(one.offers, one.offsets) for one in outcomes_of(scene)} == {((), ())}


def test_a_group_rests_between_two_uses(tmp_path: Path) -> None:
    scene = one_each(tmp_path, {**ALWAYS, "cool_down": 2, "max_uses": 3, "per_batch": 9})
    put(scene, range(10))
    RoleDriver(scene, "buffer").work()
    batches: dict[int, list[int]] = {}
    for batch, sequence, _ in uses_of(scene):
        batches.setdefault(sequence, [sequence]).append(batch)
    assert batches[0] == [0, 3, 6, 9]
    assert batches[1] == [1, 4, 7]
    check_again(scene)


@pytest.mark.law("staleness")
def test_age_is_read_from_stamps(tmp_path: Path) -> None:
    """Group 0 is from version 0; its own batch may have it, later ones only up to version 2."""
    scene = one_each(tmp_path, {**ALWAYS, "max_staleness": 2, "max_uses": 9, "per_batch": 9})
    put(scene, [0], version=0)
    put(scene, range(1, 6))
    RoleDriver(scene, "buffer").work()
    assert [batch for batch, sequence, _ in uses_of(scene) if sequence == 0] == [1, 2]
    assert {use.staleness for one in reuses_of(scene) for use in one.uses} == {1, 2}
    assert [offer.until for one in outcomes_of(scene) for offer in one.offers] == [2, 3, 4, 5, 6, 7]
    check_again(scene)


def test_flat_groups_are_not_offered_unless_asked_for(tmp_path: Path) -> None:
    for flat_too in (False, True):
        scene = one_each(tmp_path / str(flat_too), {**ALWAYS, "flat_too": flat_too})
        scene.verify(0, (1.0, 1.0))
        put(scene, [1])
        RoleDriver(scene, "buffer").work()
        assert uses_of(scene) == ([(1, 0, 1)] if flat_too else [])


def test_rejects_masks_and_terms_stay_what_they_were(tmp_path: Path) -> None:
    here = {"op": "tests.flow.test_reuse:Bonus"}
    scene = one_each(tmp_path, here, own("Masker"), {"op": "outliers", "action": "reject"}, ALWAYS)
    put(scene, range(3))
    RoleDriver(scene, "buffer").work()
    first, later = ([one for one in experiences_of(scene) if one.ids.sequence == 0 and bool(one.use) is again]
                    for again in (False, True))  # fmt: skip
    assert [one.terms for one in first] == [{}, {"bonus": 0.25}]
    assert [(one.reward, one.terms, one.verified_reward) for one in later[:2]] == [
        (one.reward, one.terms, one.verified_reward) for one in first
    ]
    assert [one.segments for one in later[:2]] == [one.segments for one in first]
    assert sum(first[0].segments[0].loss_mask.data) == 1, "the first token was masked"
    check_again(scene)


def test_shares_keep_groups_whole(tmp_path: Path) -> None:
    scene = buffering(tmp_path, {**ALWAYS, "per_batch": 4}, trainer__shares=2, feeder__groups_per_batch=4)
    put(scene, range(12), version=0)
    RoleDriver(scene, "buffer").work()
    for one in reuses_of(scene)[1:]:
        assert len(one.uses) == 4
        shares = {use.group_id: set[int]() for use in one.uses}
        for experience in experiences_of(scene):
            if experience.use and experience.batch_sequence == one.batch_sequence:
                shares[experience.ids.group_id].add(experience.share)
        assert sorted(map(tuple, shares.values())) == [(0,), (0,), (1,), (1,)]
    positions = Counter((one.batch_sequence, one.share, one.position) for one in experiences_of(scene))
    assert set(positions.values()) == {1}
    check_again(scene)


@pytest.mark.law("bounded")
def test_only_so_many_are_kept_in_mind(tmp_path: Path) -> None:
    scene = one_each(tmp_path, {**ALWAYS, "per_batch": 9, "max_held": 2, "max_uses": 9})
    put(scene, range(8))
    RoleDriver(scene, "buffer").work()
    for one in reuses_of(scene):
        batch = one.batch_sequence
        assert {use.sequence for use in one.uses} == {sequence for sequence in (batch - 2, batch - 1) if sequence >= 0}
    check_again(scene)


@pytest.mark.law("derived", "order")
@pytest.mark.parametrize("point", ["before_commit", "in_commit", "after_commit"])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_a_kill_at_any_commit_changes_no_choice(tmp_path: Path, point: str, on_stale: str) -> None:
    """Whoever comes next reads from the log what was offered and used."""
    operators = ({"op": "priority"}, {**ALWAYS, "per_batch": 2, "cool_down": 1, "max_held": 5})
    found: list[list[tuple[Any, ...]]] = []
    for killed in (False, True):
        scene = buffering(tmp_path / str(killed), *operators, feeder__on_stale=on_stale, trainer__shares=2)
        scene.log.fault = deaths = FaultAt(point if killed else "never", Kill, "buffer", every=3)
        buffer = RoleDriver(scene, "buffer")
        for sequence in range(16):
            put(scene, [sequence], version=0)
            work_on(buffer)
        assert deaths.num_visits > 6 or not killed
        check_again(scene)
        found.append([(one.batch_sequence, one.uses) for one in reuses_of(scene)])
        found.append([(one.ids.rollout_id, one.batch_sequence, one.share, one.position, one.use, one.weight)
                      for one in experiences_of(scene)])  # fmt: skip
    assert found[:2] == found[2:]
    assert len(found[0]) == 8


def test_what_is_gone_from_the_log_is_named(tmp_path: Path) -> None:
    """Retention would have kept it."""
    scene = one_each(tmp_path, ALWAYS)
    buffer = RoleDriver(scene, "buffer")
    put(scene, [0])
    buffer.work()
    transport = scene.transport()
    transport.admin.delete_before(transport.admin.end_offsets("verified"))
    put(scene, [1])
    with pytest.raises(PositionMissing, match=r"verified\[0\]@0: sums/0/0/0/0: gone from the log, expected it to stay"):
        buffer.work()


@pytest.mark.law("derived")
def test_a_choice_that_was_another_is_found(tmp_path: Path) -> None:
    scene = one_each(tmp_path, ALWAYS)
    put(scene, range(5))
    RoleDriver(scene, "buffer").work()
    check_again(scene)
    assert not scene.recompute(make_config(pipeline=[{**ALWAYS, "cool_down": 1}], feeder__groups_per_batch=1)).fine
    other_seed = make_config(pipeline=[ALWAYS], feeder__groups_per_batch=1, run__seed=5)
    assert "outcomes: reuse/" in scene.recompute(other_seed).to_text()


def test_an_operator_that_offers_says_how(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = one_each(tmp_path, {"op": "tests.flow.test_reuse:Impostor"})
    put(scene, [0])
    with caplog.at_level(logging.ERROR):
        RoleDriver(scene, "buffer").work()
    assert "answered Offer, expected it from an operator with an attribute `reuse` alone" in caplog.text
    assert [one.result for one in outcomes_of(scene)] == ["filtered"]
    assert isinstance(ReplayGroups(ReplayGroups.Config()).reuse, ReuseLimits)


# --------------------------------------------------------------------------------------------- the audit


def flow(scene: Scene, count: int) -> None:
    """So many groups come, and each batch is trained before the next one is admitted."""
    feeder, buffer = RoleDriver(scene, "feeder"), RoleDriver(scene, "buffer")
    done: set[str] = set()
    for number in range(count):
        feeder.work()
        for task in [task for task in tasks_of(scene) if task.ids.rollout_id not in done]:
            done.add(task.ids.rollout_id)
            verified = scene.verified(task.ids, float(task.ids.sibling % 2), version=number)
            assert verified.rollout is not None
            scene.put("rollouts", verified.rollout)
            scene.put("verified", verified)
        buffer.work()
        scene.step(number + 1, trained=number + 1)


@pytest.mark.law("conservation")
def test_an_audit_counts_uses_apart_from_the_balance(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False, pipeline=[ALWAYS], feeder__groups_per_batch=1, feeder__max_staleness=0)
    flow(scene, 5)
    report = scene.audit()
    assert report.problems == ()
    assert (report.groups.admitted, report.groups.trained, report.rollouts.trained) == (5, 5, 10)
    assert report.to_json()["reused"] == {
        "trained": {"replay": 4, "hindsight": 0}, "batched": {"replay": 0, "hindsight": 0}, "rollouts": 8,
    }  # fmt: skip
    assert "reused: 4 uses of groups in trained batches (4 by replay); 8 rollouts in all" in report.to_text()
    check_again(scene)


@pytest.mark.law("twice")
def test_an_audit_sees_what_is_trained_twice_without_a_word(tmp_path: Path) -> None:
    scene = Scene(tmp_path, manifest=False, pipeline=[ALWAYS], feeder__groups_per_batch=1, feeder__max_staleness=0)
    flow(scene, 4)
    told = reuses_of(scene)
    use = told[2].uses[0]

    def problems(*messages: Any) -> str:
        other = Scene(tmp_path / str(len(list(tmp_path.iterdir()))), manifest=False, pipeline=[ALWAYS],
                      feeder__groups_per_batch=1, feeder__max_staleness=0)  # fmt: skip
        flow(other, 4)
        other.put("outcomes", *messages)
        return "\n".join(other.audit().problems)

    def said(batch: int, **changes: Any) -> BatchReuse:
        return BatchReuse(batch_sequence=batch, seen=4, uses=(replace(use, **changes),))

    assert "1 use of groups out of order" in problems(said(9))
    assert "not in the batch that is said to have it once more" in problems(said(9, use=use.use + 1))
    assert "1 group used once more that have no outcome" in problems(said(9, group_id="sums/9/9/9", use=1))
    assert problems(said(0, use=use.use + 1)) == "", "batches follow one another: it is not in force"
    assert problems(told[2]) == ""


# --------------------------------------------------------------------------------------------- priority


def test_priorities_choose(tmp_path: Path) -> None:
    """Group 0 is of medium difficulty, the others are not: with a high power it is nearly always the one."""
    priority = {"op": "priority", "by": "difficulty", "width": 0.05, "power": 4.0}
    scene = one_each(tmp_path, priority, {**ALWAYS, "max_uses": 99}, feeder__group_size=4)
    for sequence in range(12):
        scene.verify(sequence, (1.0, 1.0, 0.0, 0.0) if sequence == 0 else (1.0, 0.0, 0.0, 0.0), version=sequence)
    RoleDriver(scene, "buffer").work()
    priorities = {one.sequence: one.priority for one in outcomes_of(scene)}
    assert priorities[0] > 1000 * max(value for sequence, value in priorities.items() if sequence)
    assert {sequence for _, sequence, _ in uses_of(scene)} == {0}
    check_again(scene)


def test_priority_zero_is_never(tmp_path: Path) -> None:
    scene = one_each(tmp_path, {"op": "priority", "by": "spread", "floor": 0.0}, {**ALWAYS, "flat_too": True})
    for sequence in range(4):
        scene.verify(sequence, (1.0, 1.0), version=sequence)
    RoleDriver(scene, "buffer").work()
    assert uses_of(scene) == []


def test_groups_that_matter_are_batched_first_unless_another_would_be_too_old(tmp_path: Path) -> None:
    """Batches take two groups. Group 0 is too old for the batch after the next one; 2 and 3 matter more than 1."""
    scene = buffering(tmp_path, {"op": "priority", "by": "spread"}, feeder__on_stale="drop", feeder__group_size=4,
                      feeder__max_staleness=2)  # fmt: skip
    driver = RoleDriver(scene, "buffer")
    for sequence in (4, 5):
        scene.verify(sequence, (1.0, 0.0, 0.0, 0.0), version=0)
    driver.work()
    scene.verify(6, (1.0, 0.0, 0.0, 0.0), version=1)
    scene.verify(7, (1.0, 0.0, 0.0, 0.0), version=1)
    driver.work()
    for sequence, version in ((1, 2), (2, 2), (3, 2), (0, 0)):
        spread = (1.0, 1.0, 0.0, 0.0) if sequence in (2, 3) else (1.0, 0.0, 0.0, 0.0)
        scene.verify(sequence, spread, version=version)
    driver.work()
    batches = {one.sequence: one.batch_sequence for one in outcomes_of(scene)}
    assert batches[0] == 2
    assert sorted((batches[2], batches[3])) == [2, 3]
    assert batches[1] == 3


# --------------------------------------------------------------------------------------------- hindsight


def imitating(folder: Path, *operators: dict[str, Any], **settings: Any) -> Scene:
    return one_each(folder, *operators, trainer__algorithm="mix", **settings)


def test_a_failed_attempt_is_a_demonstration_of_what_it_reached(tmp_path: Path) -> None:
    scene = imitating(tmp_path, HINDSIGHT)
    attempt(scene, 0, (0.0, 1.0), ("4+4=", ""))
    attempt(scene, 1, (1.0, 0.0), ("", ""))
    RoleDriver(scene, "buffer").work()
    (shown,) = [one for one in experiences_of(scene) if one.use]
    assert (shown.batch_sequence, shown.loss_kind, shown.reward, shown.expert) == (1, LossKind.sft, None, False)
    assert shown.ids.rollout_id == "sums/0/0/0/0"
    (rollout,) = [one.rollout for one in scene.messages("verified")
                  if isinstance(one, VerifiedRollout) and one.ids == shown.ids]  # fmt: skip
    assert rollout is not None
    (segment,), (sampled,) = shown.segments, rollout.segments
    assert bytes(segment.token_ids.numpy().tolist()[:4]) == b"4+4="
    assert segment.token_ids.numpy()[4:].tolist() == sampled.token_ids.numpy()[4:].tolist()
    assert list(segment.loss_mask.data) == [0, 0, 0, 0, 1, 1]
    check_again(scene)


def test_a_filtered_group_teaches_what_it_reached(tmp_path: Path) -> None:
    """All of group 0 failed, so it is in no batch; its demonstration is in the next one."""
    scene = imitating(tmp_path, HINDSIGHT, {"op": "zero_variance"})
    attempt(scene, 0, (0.0, 0.0), ("4+4=", "5+5="))
    attempt(scene, 1, (1.0, 0.0), ("", ""))
    attempt(scene, 2, (1.0, 0.0), ("", ""))
    RoleDriver(scene, "buffer").work()
    first, second, third = sorted(outcomes_of(scene), key=lambda one: one.sequence)
    assert (first.result, second.batch_sequence, third.batch_sequence) == (GroupResult.filtered, 0, 1)
    assert uses_of(scene) == [(0, 0, 1)]
    (use,) = reuses_of(scene)[0].uses
    assert isinstance(use, GroupUse)
    assert len(use.rollouts) == 1
    check_again(scene)


@pytest.mark.slow
@pytest.mark.law("order")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_kill_changes_no_demonstration(tmp_path: Path, point: str) -> None:
    found = []
    for killed in (False, True):
        scene = imitating(tmp_path / str(killed), HINDSIGHT, {"op": "zero_variance"}, ALWAYS)
        if killed:
            scene.log.fault = FaultAt(point, Kill, "buffer", every=3)
        buffer = RoleDriver(scene, "buffer")
        for sequence in range(10):
            attempt(scene, sequence, (0.0, float(sequence % 3 == 0)), (f"{sequence}+1=", ""))
            work_on(buffer)
        check_again(scene)
        found.append([(one.batch_sequence, one.uses) for one in reuses_of(scene)])
    assert found[0] == found[1]
    assert {use.kind for _, uses in found[0] for use in uses} == {"hindsight", "replay"}


def test_what_cannot_be_written_is_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = imitating(tmp_path, HINDSIGHT, model__context=1000)
    attempt(scene, 0, (0.0, 1.0), ("4" * 2000, ""))
    attempt(scene, 1, (1.0, 0.0), ("", ""))
    with caplog.at_level(logging.WARNING):
        RoleDriver(scene, "buffer").work()
    (shown,) = [one for one in experiences_of(scene) if one.use]
    assert 1 not in shown.segments[0].loss_mask.data
    assert "what it reached cannot be a demonstration: 2,002 tokens" in caplog.text
    check_again(scene)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "expected trainer.algorithm = 'mix' or 'chord', or a stage with one"),
        ({"trainer__algorithm": "mix", "buffer__zero_variance": "replace"}, "buffer.zero_variance: found 'replace'"),
    ],
)
def test_hindsight_needs_who_learns_from_it(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExperiencePipeline.of(make_config(pipeline=[HINDSIGHT], **settings))
    assert text in str(caught.value)


def test_experiences_of_hindsight_keep_the_verdicts_out(tmp_path: Path) -> None:
    scene = imitating(tmp_path, HINDSIGHT)
    (one, other) = scene.siblings(0)
    for ids, reward in ((one, 0.0), (other, 1.0)):
        verified = scene.verified(ids, reward)
        assert verified.rollout is not None
        posted = Posted(reward=reward, reached=(ChatMessage(role="user", content="7+1="),))
        verdict = Verdict(reward=reward, scorer="exact", scorer_version="1", parts={"right": reward})
        scene.put("verified", replace(verified, rollout=replace(verified.rollout, posted=posted), verdict=verdict))
    put(scene, [1], version=0)
    RoleDriver(scene, "buffer").work()
    shown: list[Experience] = [one for one in experiences_of(scene) if one.use]
    assert [(one.ids.sibling, one.parts, one.reward) for one in shown] == [(0, {}, None)]
