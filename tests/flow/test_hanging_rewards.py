"""The verifier with a reward that hangs: on all rollouts, on those of one problem, for a while; on a manual clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.dead import DeadLetter
from rftstream.errors import StopRule
from rftstream.rewards.base import ScoreRequest
from rftstream.rewards.scorer import InlineScorer
from rftstream.roles.verifier import VERIFIER
from rftstream.roles.verifier.groups import WaitingGroups
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_verifier import put_rollouts, verified_of

pytestmark = pytest.mark.law("unscorable")

LIMIT_S = 10.0

Latency = Callable[[ScoreRequest], float]


def scene_of(folder: Path, *, num_groups: int, group_size: int = 4, **settings: object) -> Scene:
    scene = Scene(folder, feeder__group_size=group_size, verifier__timeout_s=LIMIT_S, **settings)
    put_rollouts(scene, *range(num_groups))
    return scene


def verifier_of(scene: Scene, latency_s: Latency, *, max_dead_share: float = 1.0) -> RoleDriver:
    def build(context: RoleContext) -> Role:
        step = VerifierStep(
            scorer=InlineScorer(context.config, clock=context.clock, latency_s=latency_s),
            max_concurrent=256, max_dead_share=max_dead_share, clock=context.clock,
            groups=WaitingGroups(context.transport, context.clock, context.config.verifier),
        )  # fmt: skip
        return Role(spec=VERIFIER, step=step)

    return RoleDriver(scene, "verifier", build=build)


def hangs(request: ScoreRequest) -> float:
    return math.inf


def test_where_all_hang_the_verdicts_come_within_a_few_time_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(tmp_path, num_groups=12)
    began = scene.clock.now()
    tries: list[str] = []

    def counts(request: ScoreRequest) -> float:
        tries.append(request.rollout_id)
        return math.inf

    with caplog.at_level(logging.WARNING):
        verifier_of(scene, counts).work()
    verified = list(verified_of(scene).values())
    assert len(verified) == 48
    assert {(one.verdict, one.reason) for one in verified} == {(None, "timeout")}, "never a reward of 0"
    assert scene.clock.now() - began < 8 * LIMIT_S
    assert len(tries) < 2 * 48, "fewer tries than three of each"
    letters = [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]
    assert {one.reason for one in letters} == {"timeout"}
    assert all("no result within 10 s" in one.detail for one in letters)
    told = [record.getMessage() for record in caplog.records if "(try 1 of 3)" in record.getMessage()]
    assert told[0] == (
        f"{tries[0]}: reward exact of sums: no result within 10 s (verifier.timeout_s) (try 1 of 3); "
        "its process was replaced"
    )
    assert any("rollouts are given up without a try" in record.getMessage() for record in caplog.records)


def test_what_comes_when_a_reward_was_given_up_waits_for_no_time_limit(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, num_groups=12)
    driver = verifier_of(scene, hangs)
    driver.work()
    came_at = scene.clock.now()
    put_rollouts(scene, *range(12, 24))
    driver.work()
    late = [one for one in verified_of(scene).values() if one.ids.sequence >= 12]
    assert len(late) == 48
    waited = sorted(one.verified_at - came_at for one in late)
    assert waited[-2] < LIMIT_S / 2
    assert waited[-1] < 1.5 * LIMIT_S, "the one that was tried, in case the reward is well again"


@pytest.mark.slow
def test_the_run_ends_by_its_rule_within_a_few_time_limits(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, num_groups=60)
    began = scene.clock.now()
    with pytest.raises(StopRule) as stopped:
        verifier_of(scene, hangs, max_dead_share=0.5).work()
    assert stopped.value.exit_code == 6
    for word in ("200 of the last 200 rollouts could not be scored by exact", "timeout, ", "no result within 10 s"):
        assert word in str(stopped.value)
    assert scene.clock.now() - began < 8 * LIMIT_S
    assert len(scene.messages("dead")) == len(verified_of(scene)) >= 200, "what was given up is on the log"


@pytest.mark.parametrize("outage_s", [5.0, 35.0])
def test_a_reward_that_recovers_in_time_has_cost_nothing_but_time(tmp_path: Path, outage_s: float) -> None:
    """Only what was tried in vain as often as `tries` says has no reward."""
    scene = scene_of(tmp_path, num_groups=12, verifier__tries=5)
    well_at = scene.clock.now() + outage_s
    verifier_of(scene, lambda request: math.inf if scene.clock.now() < well_at else 0.1).work()
    assert [one.reason for one in verified_of(scene).values() if one.verdict is None] == []


def test_a_reward_that_recovers_late_closes_the_breaker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = scene_of(tmp_path, num_groups=12)
    well_at = scene.clock.now() + 100 * LIMIT_S
    driver = verifier_of(scene, lambda request: math.inf if scene.clock.now() < well_at else 0.1)
    driver.work()
    assert all(one.verdict is None for one in verified_of(scene).values())
    scene.clock.advance(100 * LIMIT_S)
    put_rollouts(scene, *range(12, 24))
    with caplog.at_level(logging.WARNING):
        driver.work()
    later = [one for one in verified_of(scene).values() if one.ids.sequence >= 12]
    assert len(later) == 48
    assert all(one.verdict is not None for one in later)
    assert any("it came back; all rollouts are tried again" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("group_size", [4, 24])
def test_a_problem_on_which_a_reward_hangs_costs_the_others_nothing(tmp_path: Path, group_size: int) -> None:
    """Its siblings come first and all hang, and are tried as often as ever if there are few of them."""
    scene = scene_of(tmp_path, num_groups=6, group_size=group_size)
    first = scene.siblings(0)[0].group_id
    verifier_of(scene, lambda request: math.inf if request.group_id == first else 0.1).work()
    verified = verified_of(scene).values()
    assert len(verified) == 6 * group_size
    assert {one.ids.group_id for one in verified if one.verdict is None} == {first}
    if group_size == 4:
        letters = [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]
        assert [one.tries for one in letters] == [3] * 4


def test_one_taskset_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    arithmetic = {"source": "arithmetic"}
    scene = scene_of(tmp_path, num_groups=12, tasksets={"sums": arithmetic, "more": arithmetic})
    began = scene.clock.now()
    driver = verifier_of(scene, lambda request: 0.1 if request.taskset == "more" else math.inf)
    driver.work()
    came_at = scene.clock.now()
    assert came_at - began > LIMIT_S
    put_rollouts(scene, *range(12, 24))
    scene.put("rollouts", *(scene.rollout(replace(one, taskset="more")) for one in scene.siblings(100)))
    driver.work()
    more = [one for one in verified_of(scene).values() if one.ids.taskset == "more"]
    assert len(more) == 4
    assert all(one.verdict is not None and one.verified_at - came_at < LIMIT_S / 4 for one in more)
