"""Environments that take their time, hang, give rewards or die in the middle: their rollouts, and those of others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.rollouts import Posted, Rollout, RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import EvalResult
from rftstream.service.role import Role, RoleContext
from rftstream.testing import RoleDriver
from tests.flow.environments import GATE
from tests.flow.scene import Scene, playing, without_version
from tests.flow.test_explorer import rollouts_of, work_for
from tests.flow.test_partials import AWAY_S, assert_same, finish, live_pieces, pieces_of
from workers import explorer as explorer_worker

PLACE = "tests.flow.environments"
GAME = f"{PLACE}:Game"
PATIENCE_S = 60.0


def beside(context: RoleContext) -> Role:
    """An explorer whose environments run in threads, as outside of a simulation."""
    return explorer_worker.build(dataclasses.replace(context, simulated=False))


@pytest.fixture
def gate() -> Iterator[None]:
    GATE.reset()
    yield
    GATE.opened.set()


def tick_until(driver: RoleDriver, holds: Callable[[], bool]) -> None:
    """Tick and wait as a process does, until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, driver.service.health()
        driver.run.clock.advance(0.001)
        if driver.tick() > 0:
            driver.service.wait(0.01)


def game(folder: Path, *, every_s: float = 0.5, rate: float = 30.0, **settings: Any) -> Scene:
    explorer = {key: settings.pop(key) for key in list(settings) if key.startswith("explorer__")}
    return playing(folder, GAME, settings, every_s=every_s, rate=rate, tasksets__sums__reward="environment", **explorer)


def outcome(scene: Scene) -> dict[str, Rollout]:
    finish(scene, RoleDriver(scene, "explorer", process="last"))
    assert live_pieces(scene) == []
    return rollouts_of(scene)


# --------------------------------------------------------------------------------------------- nobody waits


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["Blocking", "BlockingLater"])
def test_a_reply_that_blocks_delays_no_rollout_and_no_weights(scene: Scene, environment: str, gate: None) -> None:
    scene.announce(0)
    scene.admit(0, environment=f"{PLACE}:{environment}")
    driver = RoleDriver(scene, "explorer", build=beside)
    tick_until(driver, GATE.entered.is_set)
    scene.admit(1, 2)
    tick_until(driver, lambda: len(rollouts_of(scene)) == 4)
    scene.announce(1)
    tick_until(driver, lambda: driver.service.health()["version"] == 1)
    assert {one.ids.sequence for one in rollouts_of(scene).values()} == {1, 2}
    GATE.opened.set()
    tick_until(driver, lambda: len(rollouts_of(scene)) == 6)
    assert {one.status for one in rollouts_of(scene).values()} == {RolloutStatus.completed}
    tick_until(driver, GATE.closed.is_set)
    driver.service.close()


def test_an_answer_ends_the_wait(tmp_path: Path, gate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.service.service.LOG_LOOK_S", 600.0)
    scene = Scene(tmp_path, feeder__group_size=1)
    scene.announce(0)
    scene.admit(0, environment=f"{PLACE}:Blocking")
    driver = RoleDriver(scene, "explorer", build=beside)
    tick_until(driver, GATE.entered.is_set)
    while driver.tick() == 0:
        pass
    GATE.opened.set()
    driver.service.wait(600.0)
    tick_until(driver, lambda: len(rollouts_of(scene)) == 1)
    driver.service.close()


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["Blocking", "BlockingLater"])
def test_a_reply_that_hangs_is_given_up(tmp_path: Path, environment: str, gate: None) -> None:
    scene = Scene(tmp_path, explorer__reply_timeout_s=0.3)
    scene.announce(0)
    name = f"{PLACE}:{environment}"
    scene.admit(0, environment=name)
    driver = RoleDriver(scene, "explorer", build=beside)
    tick_until(driver, lambda: len(rollouts_of(scene)) == 2)
    for rollout in rollouts_of(scene).values():
        assert rollout.status is RolloutStatus.truncated
        assert rollout.error == f"environment {name}: reply: no answer within 0.3 s"
        assert (rollout.num_tokens, rollout.posted) == (2, None)
    tick_until(driver, GATE.closed.is_set)
    driver.service.close()


def test_a_reply_that_is_computed_does_not_hold_up_a_trainer_that_went_back(tmp_path: Path) -> None:
    scene = game(tmp_path, reply_s=5.0, turns=2, every_s=0.0)
    for version in (1, 2, 3):
        scene.announce(version)
    scene.admit(1, environment=GAME, min_version=3)
    driver = RoleDriver(scene, "explorer")
    work_for(scene, driver, seconds=2.0)
    scene.announce(1, epoch=2, resumed=True)
    work_for(scene, driver, seconds=1.0)
    assert driver.service.health()["version"] == 1
    work_for(scene, driver, seconds=20.0)
    assert {one.ids.sequence for one in rollouts_of(scene).values()} == {0}, "the others wait for version 3"
    for version in (2, 3):
        scene.announce(version, epoch=2)
    finish(scene, driver)
    for rollout in rollouts_of(scene).values():
        versions = [span.version for segment in rollout.segments for span in segment.versions]
        assert min(versions) >= rollout.ids.min_version
        assert rollout.status is RolloutStatus.completed


# --------------------------------------------------------------------------------------------- rewards


def test_rewards_of_turns_add_up_and_reach_the_verdict(tmp_path: Path) -> None:
    scene = game(tmp_path, reply_s=0.3)
    rollouts = outcome(scene)
    RoleDriver(scene, "verifier").work()
    for rollout in rollouts.values():
        assert without_version(rollout.posted) == Posted(reward=1.5, parts={"turns": 3.0, "odd": 0.0})
        assert [turn.reward for turn in rollout.turns] == [0.5, None, 0.5, None, 0.5]
        assert len(rollout.segments) == 1
    for verified in verified_of(scene):
        assert verified.verdict is not None
        assert (verified.verdict.reward, verified.verdict.parts) == (1.5, {"turns": 3.0, "odd": 0.0})


@pytest.mark.law("unscorable")
@pytest.mark.parametrize(
    ("odd", "reward", "reason", "words"),
    [
        ("nan", 1.0, UnscorableReason.error, "the reward of turn 1 is nan, expected a finite number"),
        ("nan part", 1.5, UnscorableReason.error, "the part 'odd' of turn 1 is inf, expected a finite number"),
        ("none", 1.0, None, ""),
    ],
)
def test_what_is_no_reward_is_never_one(
    tmp_path: Path, odd: str, reward: float, reason: UnscorableReason | None, words: str
) -> None:
    scene = game(tmp_path, odd=odd, odd_turn=1)
    for rollout in outcome(scene).values():
        assert rollout.posted is not None
        assert rollout.posted.reward == reward
        assert [turn.reward for turn in rollout.turns if turn.role == "assistant"][1] == (
            0.5 if odd == "nan part" else None
        )
    RoleDriver(scene, "verifier").work()
    for verified in verified_of(scene):
        assert verified.reason is reason
        assert words in (verified.detail or "")


@pytest.mark.law("unscorable")
def test_an_environment_without_rewards_is_no_reward_of_0(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tasksets__sums__reward="environment", groups=[0])
    RoleDriver(scene, "explorer").work()
    RoleDriver(scene, "verifier").work()
    assert {one.posted for one in rollouts_of(scene).values()} == {None}
    for verified in verified_of(scene):
        assert (verified.verdict, verified.reason) == (None, UnscorableReason.no_reward)
        assert "neither environment nor agent gave a reward" in (verified.detail or "")


def verified_of(scene: Scene) -> list[VerifiedRollout]:
    verified = [one for one in scene.messages("verified") if isinstance(one, VerifiedRollout)]
    assert verified
    return verified


def test_an_evaluation_has_the_reward_of_its_environment(tmp_path: Path) -> None:
    scene = Scene(
        tmp_path, environments={GAME: {"reply_s": 0.3}},
        evaluations={"games": {
            "source": "arithmetic", "options": {"size": 3}, "environment": GAME, "reward": "environment", "n": 2,
        }},
    )  # fmt: skip
    scene.announce(0)
    scene.step(0, resumed=True)
    RoleDriver(scene, "evaluator").work()
    (result,) = [one for one in scene.messages("evals") if isinstance(one, EvalResult)]
    assert (result.num_tasks, result.num_unscored) == (3, 0)
    assert result.metrics["mean"] == result.metrics["environment_reward"] == 1.5
    assert result.metrics["metric/turns"] == 3.0


# --------------------------------------------------------------------------------------------- limits


def test_what_was_there_before_a_reply_that_hangs_is_kept(tmp_path: Path) -> None:
    scene = game(tmp_path, odd="hangs", odd_turn=1, explorer__reply_timeout_s=5.0)
    for rollout in outcome(scene).values():
        assert rollout.status is RolloutStatus.truncated
        assert without_version(rollout.posted) == Posted(reward=0.5, parts={"turns": 1.0, "odd": 0.0})
        assert rollout.metrics == {"turns": 1.0}
        assert [turn.role for turn in rollout.turns] == ["assistant", "user", "assistant"]
        assert rollout.num_tokens == sum(turn.num_tokens for turn in rollout.turns) == 60


def test_an_environment_that_leaves_the_process_fails_alone(tmp_path: Path) -> None:
    scene = game(tmp_path, odd="exits", odd_turn=1)
    for rollout in outcome(scene).values():
        assert (rollout.status, rollout.error) == (RolloutStatus.failed, f"environment {GAME}: reply: SystemExit: 3")


@pytest.mark.parametrize(("limit_s", "tokens"), [(0.5, 30), (1.5, 45), (3.6, 60)])
def test_a_rollout_has_a_time_limit(tmp_path: Path, limit_s: float, tokens: int) -> None:
    """A second for a turn, then two for its reply."""
    scene = game(tmp_path, reply_s=2.0, rate=60.0, turns=9, explorer__rollout_timeout_s=limit_s)
    for rollout in outcome(scene).values():
        assert rollout.status is RolloutStatus.truncated
        assert rollout.error == f"not finished within {limit_s:g} s"
        assert rollout.num_tokens == sum(turn.num_tokens for turn in rollout.turns) > 0


def test_the_time_limit_of_a_rollout_goes_over_explorers(tmp_path: Path) -> None:
    scene = game(tmp_path, turns=50, explorer__rollout_timeout_s=AWAY_S)
    work_for(scene, RoleDriver(scene, "explorer", process="first"), seconds=2.0)
    scene.clock.advance(AWAY_S)
    for rollout in outcome(scene).values():
        assert rollout.status is RolloutStatus.truncated
        assert 0 < rollout.num_tokens <= 90, "it is over as soon as another explorer has it"


# --------------------------------------------------------------------------------------------- restarts


@pytest.mark.law("lost")
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("seconds", [(0.7,), (1.2,), (1.6,), (2.1,), (3.4,), (0.8, 0.8, 0.8, 0.8)], ids=str)
def test_rewards_outlive_the_explorer(tmp_path: Path, seconds: tuple[float, ...], saves: bool) -> None:
    """A second for a turn, then one for its reply: killed in both."""
    expected = outcome(game(tmp_path / "alone", reply_s=1.0, every_s=0.0))
    scene = game(tmp_path, reply_s=1.0, saves=saves)
    for number, one in enumerate(seconds):
        work_for(scene, RoleDriver(scene, "explorer", process=f"{number}"), seconds=one)
        scene.clock.advance(AWAY_S)
    rollouts = outcome(scene)
    assert rollouts.keys() == expected.keys()
    for name, rollout in rollouts.items():
        assert_same(rollout, expected[name])
        assert without_version(rollout.posted) == Posted(reward=1.5, parts={"turns": 3.0, "odd": 0.0})
        assert rollout.turns == expected[name].turns
    if saves and seconds[0] > 3:
        pieces = next(iter(pieces_of(scene).values()))
        assert pieces[-1].posted is not None, "the rewards of turns before"


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("seconds", [0.7, 1.2, 2.5, 3.6])
def test_a_worker_that_leaves_gives_back_what_can_be_saved(tmp_path: Path, seconds: float, saves: bool) -> None:
    expected = outcome(game(tmp_path / "alone", reply_s=1.0, every_s=0.0))
    scene = game(tmp_path, reply_s=1.0, saves=saves, every_s=0.0)
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=seconds)
    first.stop()
    done = rollouts_of(scene)
    assert bool(done) == (not saves and seconds > 2), "what cannot be saved goes on to its end"
    scene.clock.advance(AWAY_S)
    for name, rollout in outcome(scene).items():
        assert_same(rollout, expected[name])
        assert without_version(rollout.posted) == without_version(expected[name].posted)
