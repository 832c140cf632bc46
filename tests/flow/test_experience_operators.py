"""The buffer's operators on a log: a version that changes while groups wait, kills, and decisions computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.data.operators.base import Reject, ScoredGroup
from rftstream.data.operators.facts import Facts
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.disturbed import FaultAt, work_on
from tests.flow.scene import Scene
from tests.flow.test_pipelines import buffering, experiences_of, outcomes_of, own


class Dated:
    """An operator of one's own that leaves out the last sibling, with the version as the reason."""

    side = "experience"
    by_version = True

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Reject:
        return Reject(f"at {group.version}", (group.rollouts[-1].sibling,))


class Undated(Dated):
    by_version = False


def put(
    scene: Scene, sequence: int, versions: tuple[int, ...], *, rewards: tuple[float, ...] = (), num_tokens: int = 2
) -> None:
    """A group on `verified`; each sibling was sampled by a version of its own."""
    some = rewards or tuple(float(number % 2) for number in range(len(versions)))
    for one, version, reward in zip(scene.siblings(sequence, size=len(versions)), versions, some, strict=True):
        scene.put("verified", scene.verified(one, reward, version=version, num_tokens=num_tokens + one.sibling))


def check_recomputed(scene: Scene) -> int:
    """Every decision is computed again. Return in how many groups something was decided."""
    found = scene.recompute()
    assert found.fine, found.to_text()
    return sum(bool(one.decisions) for one in outcomes_of(scene))


@pytest.mark.law("staleness")
def test_a_group_is_judged_at_the_version_that_it_is_trained_at(tmp_path: Path) -> None:
    """Groups 1 to 5 are there before group 0, so the later ones wait for batches 1 and 2."""
    scene = buffering(tmp_path, {"op": "stale", "max_age": 1}, feeder__group_size=3)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(1, 6):
        put(scene, sequence, (0, 1, 1))
        buffer.work()
    put(scene, 0, (0, 0, 0))
    buffer.work()
    batches = {one.sequence: one.batch_sequence for one in outcomes_of(scene)}
    assert batches == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert {one.sequence: one.version for one in outcomes_of(scene)} == batches
    rejected = {one.sequence: [rollout.rejected for rollout in one.rollouts] for one in outcomes_of(scene)}
    assert {number for number, reasons in rejected.items() if any(reasons)} == {4, 5}
    assert rejected[4] == ["stale: too old", None, None]
    assert len(experiences_of(scene)) == 18 - 2
    assert check_recomputed(scene) == 2


@pytest.mark.parametrize(("name", "reasons"), [("Dated", ["0", "0", "1", "1"]), ("Undated", ["None"] * 4)])
def test_only_operators_that_declare_it_are_told_the_version(tmp_path: Path, name: str, reasons: list[str]) -> None:
    operator = {"op": f"tests.flow.test_experience_operators:{name}"}
    scene = buffering(tmp_path, operator, feeder__group_size=3)
    for sequence in (3, 2, 1, 0):
        put(scene, sequence, (0, 0, 0))
    RoleDriver(scene, "buffer").work()
    outcomes = sorted(outcomes_of(scene), key=lambda one: one.sequence)
    assert [one.decisions[0].reason for one in outcomes] == [f"at {version}" for version in reasons]
    assert check_recomputed(scene) == 4


def test_one_old_sibling_does_not_cost_the_group(tmp_path: Path) -> None:
    """Without the operator the group expires; with it, its other siblings are trained on."""
    for operators, results in (((), ["expired"]), (({"op": "stale"},), ["batched"])):
        scene = buffering(tmp_path / str(len(operators)), *operators, feeder__group_size=3, feeder__max_staleness=1,
                          feeder__on_stale="drop", feeder__groups_per_batch=1)  # fmt: skip
        buffer = RoleDriver(scene, "buffer")
        for sequence in range(2):
            put(scene, sequence, (sequence,) * 3)
        buffer.work()
        put(scene, 2, (0, 2, 2))
        buffer.work()
        assert [one.result for one in outcomes_of(scene) if one.sequence == 2] == results


def test_old_tokens_are_masked_and_the_rollout_is_compared(tmp_path: Path) -> None:
    operator = {"op": "stale", "max_age": 0, "action": "mask"}
    scene = buffering(tmp_path, operator, feeder__groups_per_batch=1)
    put(scene, 0, (0, 0))
    put(scene, 1, (0, 1))
    RoleDriver(scene, "buffer").work()
    sampled = {one.ids.rollout_id: sum(one.segments[0].loss_mask.data) for one in experiences_of(scene)}
    assert sampled == {"sums/0/0/0/0": 2, "sums/0/0/0/1": 3, "sums/0/1/0/0": 0, "sums/0/1/0/1": 3}
    (decision,) = outcomes_of(scene)[1].decisions
    assert (decision.action, decision.siblings, decision.num_tokens) == ("mask", (0,), 2)


def test_operators_of_an_imported_run_are_told_no_version(tmp_path: Path) -> None:
    scene = buffering(tmp_path, {"op": "stale", "max_age": 0}, feeder__groups_per_batch=1, run__imported_from="another")
    for sequence in range(2):
        put(scene, sequence, (0, 0))
    RoleDriver(scene, "buffer").work()
    assert [(one.result, one.version, one.decisions) for one in outcomes_of(scene)] == [("batched", None, ())] * 2


OPERATORS: tuple[dict[str, Any], ...] = (
    own("ByFacts"),
    {"op": "stale", "max_age": 1},
    {"op": "outliers", "max_score": 3.0},
    {"op": "gibberish", "min_mean_logprob": -1.0},
    {"op": "amplify", "min_share": 0.5},
    {"op": "shape", "term": "length", "weight": 0.5},
    {"op": "shape", "term": "diversity", "ngram": 1},
    own("Masker"),
)


@pytest.mark.law("order")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_buffer_killed_at_every_commit_decides_the_same(tmp_path: Path, point: str) -> None:
    """Groups come in an order of their own, so that many wait for a batch when the buffer dies."""

    def play(folder: Path, *, kills: bool) -> Scene:
        scene = buffering(folder, *OPERATORS, feeder__group_size=6, feeder__groups_per_batch=2)
        scene.log.fault = deaths = FaultAt(point if kills else "never", Kill, "buffer", every=3)
        buffer = RoleDriver(scene, "buffer")
        for number in range(24):
            sequence = number ^ 3  # 3 2 1 0 7 6 5 4 ...
            newest = sequence // 3
            versions = tuple(max(0, newest - (sibling + sequence) % 4) for sibling in range(6))
            put(scene, sequence, versions, rewards=tuple(float(sibling == sequence % 6) for sibling in range(6)))
            work_on(buffer)
        assert deaths.num_visits > 8 or not kills
        return scene

    calm, killed = play(tmp_path / "calm", kills=False), play(tmp_path / "killed", kills=True)

    def told(scene: Scene) -> list[Any]:
        return [
            (one.sequence, one.result, one.reason, one.batch_sequence, one.rollouts, one.decisions)
            for one in sorted(outcomes_of(scene), key=lambda one: one.sequence)
        ]

    assert told(killed) == told(calm)
    assert experiences_of(killed) == experiences_of(calm)
    assert check_recomputed(calm) == check_recomputed(killed) > 10
    names = {decision.operator for one in outcomes_of(calm) for decision in one.decisions}
    assert names >= {"stale", "amplify", "shape", OPERATORS[0]["op"], OPERATORS[-1]["op"]}
    found = killed.recompute(loader.replace(killed.config, pipeline=OPERATORS[:2]))
    assert not found.fine and "decisions" in found.to_text(), "by other operators"


@pytest.mark.law("derived")
def test_decisions_by_facts_are_computed_again_from_what_they_saw(tmp_path: Path) -> None:
    """A restart may know more outcomes than whoever decided before; the record says how many it knew."""
    operators = ({"op": "outliers", "within": "taskset"}, {"op": "stale", "max_age": 2})
    scene = buffering(tmp_path, *operators, feeder__group_size=3, feeder__groups_per_batch=2)
    scene.log.fault = FaultAt("after_commit", Kill, "buffer", every=3)
    buffer = RoleDriver(scene, "buffer")
    for number in range(16):
        put(scene, number ^ 1, (number // 2,) * 3, num_tokens=60 if number in (9, 12) else 10)
        work_on(buffer)
    assert check_recomputed(scene) >= 2
    reasons = {one.sequence: one.reason for one in outcomes_of(scene) if one.result == "filtered"}
    assert reasons == {8: "outliers: length far from the others", 13: "outliers: length far from the others"}
