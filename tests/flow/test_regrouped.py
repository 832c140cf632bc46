"""Recorded groups decided anew in another run: copied exactly once, decided as the same operators decided there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.verdicts import PEOPLE, UnscorableReason, VerifiedRollout
from rftstream.errors import ConfigError
from rftstream.queries.datasets.scorers import scored_otherwise
from rftstream.queries.decisions.side_by_side import compare_runs
from rftstream.replay.regrouped import VerdictImport
from rftstream.runs.making import imported
from rftstream.service.role import Log
from rftstream.testing import RoleDriver
from tests.flow.disturbed import copy_on
from tests.flow.scene import Scene
from tests.flow.test_imported import manifest
from tests.flow.test_pipelines import outcomes_of, own, put_group

OPERATORS = [own("Shaper"), {"op": "truncated"}, {"op": "zero_variance"}]


def scene_of(folder: Path, *operators: dict[str, Any], **settings: Any) -> Scene:
    return Scene(folder, manifest=False, pipeline=list(operators), feeder__group_size=3, feeder__max_staleness=100,
                 **settings)  # fmt: skip


def copy(source: Scene, target: Scene, unscored: Collection[str] = ()) -> None:
    VerdictImport(
        source.transport(), target.transport("import"), target.folder.run_id, lambda text: None, unscored=unscored
    ).run(lambda: manifest(target))


@pytest.fixture
def source(tmp_path: Path) -> Scene:
    """Groups 0 to 8, decided; every second has a truncated sibling, every third equal rewards. Of group 9 one rollout
    is not scored yet, and of group 10 one is not sampled."""
    scene = scene_of(tmp_path / "source", *OPERATORS)
    scene.put_manifest()
    scene.admit(*range(11))
    for sequence in range(9):
        rewards = (1.0, 1.0, 1.0) if sequence % 3 == 0 else (0.0, 1.0, 1.0)
        put_group(scene, sequence, rewards, truncated=(1,) if sequence % 2 else ())
    for verified in scene.messages("verified"):
        assert isinstance(verified, VerifiedRollout)
        assert verified.rollout is not None
        scene.put("rollouts", verified.rollout)
    RoleDriver(scene, "buffer").work()
    scene.put("rollouts", *(scene.rollout(one) for one in (*scene.siblings(9), *scene.siblings(10)[:2])))
    scene.verify(9, (0.0, 1.0), only=(0, 1))
    scene.verify(10, (0.0, 1.0), only=(0, 1))
    return scene


def verified_of(scene: Scene) -> dict[str, VerifiedRollout]:
    some = [one for one in scene.messages("verified") if isinstance(one, VerifiedRollout)]
    assert len({one.ids.rollout_id for one in some}) == len(some), "no twins"
    return {one.ids.rollout_id: one for one in some}


@pytest.mark.law("derived")
def test_the_same_operators_decide_the_same_and_others_do_not(source: Scene, tmp_path: Path) -> None:
    same = scene_of(tmp_path / "same", *OPERATORS, run__imported_from="source", explorer__count=0)
    copy(source, same)
    ours, theirs = verified_of(same), verified_of(source)
    assert {name: ours[name] for name in theirs} == theirs
    assert {name: ours[name].reason for name in set(ours) - set(theirs)} == dict.fromkeys(
        ("sums/0/9/0/2", "sums/0/10/0/2"), UnscorableReason.skipped
    )
    RoleDriver(same, "buffer").work()

    def told(scene: Scene) -> dict[str, Any]:
        return {one.group_id: (one.result, one.reason, one.rollouts, one.decisions) for one in outcomes_of(scene)
                if one.sequence < 9}  # fmt: skip

    assert told(same) == told(source)
    assert {one[0] for one in told(source).values()} == {"batched", "filtered"}
    report = same.audit()
    assert report.fine, report.to_text()

    other = scene_of(tmp_path / "other", {"op": "truncated"}, run__imported_from="source", explorer__count=0)
    copy(source, other)
    RoleDriver(other, "buffer").work()
    other.step(1)
    found = compare_runs(("source", source.transport()), ("other", other.transport())).to_json()
    before, after = found["before"], found["after"]
    assert before["groups"] == {**dict.fromkeys(map(str, GroupResult), 0), "batched": 6, "filtered": 3}
    assert after["groups"]["batched"] == 11
    assert (found["batched_in_both"], found["batched_only_before"], found["batched_only_after"]) == (6, 0, 5)
    done = {(one["operator"], one["action"]): (one["groups"], one["siblings"]) for one in after["operators"]}
    assert done == {("truncated", "reject"): (4, 4)}
    done = {(one["operator"], one["action"]): (one["groups"], one["siblings"]) for one in before["operators"]}
    assert done["zero_variance", "reject"] == (3, 0)
    assert done["truncated", "reject"] == (4, 4)
    assert (before["rollouts"], after["batches"]) == (0, 6)
    assert after["batch_rewards"] == [pytest.approx((3 * 1.0 + 0.0 + 1.0) / 5)], "of the one that was trained"


@pytest.mark.law("conservation")
def test_what_another_version_of_the_reward_scored_counts_no_more(tmp_path: Path) -> None:
    source = scene_of(tmp_path / "source", buffer__min_siblings=2)
    source.put_manifest()
    source.admit(*range(6))
    for one in (one for sequence in range(6) for one in source.siblings(sequence)):
        is_new = one.sequence > 2 or (one.sequence, one.sibling) in {(1, 0), (2, 0), (2, 2)}
        verified = source.verified(one, float(one.sibling))
        assert verified.verdict is not None
        verdict = replace(verified.verdict, scorer_version="2+b" if is_new else "1+a")
        if (one.sequence, one.sibling) == (5, 2):
            verdict = replace(verdict, scorer=PEOPLE, scorer_version="1")
        assert verified.rollout is not None
        source.put("rollouts", verified.rollout)
        source.put("verified", replace(verified, verdict=verdict, verified_at=one.sequence + one.sibling / 9))
    RoleDriver(source, "buffer").work()
    log = Log(source.transport())
    old, newest = scored_otherwise(log, "newest")
    assert (len(old), newest) == (3 + 2 + 1, "exact 2+b")
    assert old == scored_otherwise(log, "2")[0] == scored_otherwise(log, "exact 2+b")[0]
    assert len(scored_otherwise(log, "1+")[0]) == 17 - len(old)
    assert scored_otherwise(log, "exact") == (frozenset(), "exact")
    with pytest.raises(ConfigError, match="got '3', expected newest or the beginning of one of: exact 1"):
        scored_otherwise(log, "3")

    target = scene_of(tmp_path / "target", buffer__min_siblings=2, run__imported_from="source", explorer__count=0)
    copy(source, target, old)
    RoleDriver(target, "buffer").work()
    assert {name for name, one in verified_of(target).items() if one.verdict is None} == old
    decided = {one.sequence: one.result for one in outcomes_of(target)}
    assert [decided[sequence] == "batched" for sequence in range(6)] == [False, False, True, True, True, True]
    report = target.audit()
    assert report.fine, report.to_text()


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_killed_at_any_commit_the_import_goes_on(
    source: Scene, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "MAX_RECORDS", 5)
    target = scene_of(tmp_path / "target", run__imported_from="source", explorer__count=0)
    calm = scene_of(tmp_path / "calm", run__imported_from="source", explorer__count=0)
    copy(source, calm)

    def goes_on(kills: int) -> None:
        if kills == 3:
            source.put("verified", source.verified(source.siblings(9)[2], 1.0))

    assert copy_on(target, point, lambda: copy(source, target), goes_on) > 3

    def told(scene: Scene) -> dict[str, Any]:
        return {name: replace(one, verified_at=0.0, rollout=None) for name, one in verified_of(scene).items()}

    assert told(target) == told(calm)
    assert len(target.records("rollouts")) == len(target.records("tasks")) == 33
