"""Rollouts that have had their share make room for those that wait; text that repeats itself is cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Sampling
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_explorer import rollouts_of, versions_of, work_for
from tests.flow.test_partials import AWAY_S, assert_same, finish, live_pieces, pieces_of

RATE = 20.0
TAIL = {
    "policies__fake": {"tokens_per_s": RATE, "mean_tokens": 60.0, "sigma": 1.5},
    "transport__partitions": 1, "explorer__partial_every_s": 0.0, "sampling__max_tokens": 800,
    "feeder__group_size": 1, "explorer__max_concurrent": 2,
}  # fmt: skip
"""A long tail, and two places."""


def scene_of(folder: Path, **more: Any) -> Scene:
    scene = Scene(folder, **{**TAIL, **more}, groups=range(10))
    return scene


def finished_at(scene: Scene) -> dict[str, float]:
    began = scene.clock.now()
    finish(scene, RoleDriver(scene, "explorer"))
    return {name: one.finished_at - began for name, one in rollouts_of(scene).items()}


def test_a_long_one_holds_up_nobody(tmp_path: Path) -> None:
    """Seven of ten are shorter than 30 tokens; without turns they wait for the two longest."""
    in_one_go = scene_of(tmp_path / "whole")
    in_turns = scene_of(tmp_path / "turns", explorer__yield_after_tokens=30)
    before, after = finished_at(in_one_go), finished_at(in_turns)
    expected, found = rollouts_of(in_one_go), rollouts_of(in_turns)
    for name, rollout in found.items():
        assert_same(rollout, expected[name])
    short = [name for name, one in expected.items() if one.num_tokens <= 30]
    longest = max(one.num_tokens for one in expected.values())
    assert len(short) >= 4
    assert longest > 150
    assert sum(after[name] for name in short) < 0.7 * sum(before[name] for name in short)
    assert max(after.values()) <= max(before.values()) + longest / RATE
    assert live_pieces(in_turns) == []
    assert pieces_of(in_turns).keys() == {name for name, own in pieces_of(in_turns).items() if own}


@pytest.mark.law("lost")
def test_whoever_makes_room_is_saved(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, explorer__yield_after_tokens=30)
    work_for(scene, RoleDriver(scene, "explorer", process="first"), seconds=6.0)
    saved = {name: sum(one.num_tokens for one in own) for name, own in pieces_of(scene).items()}
    assert saved
    assert all(one >= 30 for one in saved.values())
    done = rollouts_of(scene).keys()
    scene.clock.advance(AWAY_S)
    scene.announce(1)
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    for name in saved.keys() - done:
        assert versions_of(rollouts_of(scene)[name])[0] == (0, saved[name])
    assert live_pieces(scene) == []
    assert len(rollouts_of(scene)) == 10


def test_nobody_makes_room_when_nobody_waits(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{**TAIL, "explorer__yield_after_tokens": 5}, groups=[0, 1])
    scene.admit(2, 3, min_version=1)
    work_for(scene, RoleDriver(scene, "explorer"), seconds=40.0)
    assert len(rollouts_of(scene)) == 2
    assert pieces_of(scene) == {}


def test_it_takes_turns_for_the_places_of_the_policy(tmp_path: Path) -> None:
    scene = scene_of(
        tmp_path, explorer__yield_after_tokens=20, explorer__max_concurrent=64,
        policies__fake={"tokens_per_s": RATE, "mean_tokens": 60.0, "sigma": 1.5, "batch_size": 1},
    )  # fmt: skip
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=5.0)
    assert explorer.service.health()["sampling"] == 1
    assert explorer.service.health()["in_hand"] == 2
    finish(scene, explorer)
    assert len(rollouts_of(scene)) == 10


@pytest.mark.slow
def test_who_has_made_room_is_given_back_when_the_worker_leaves(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, explorer__yield_after_tokens=30)
    first = RoleDriver(scene, "explorer", process="first")
    while not first.service.health()["paused"]:
        work_for(scene, first, seconds=0.1)
    first.stop()
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    whole = scene_of(tmp_path / "whole")
    finish(whole, RoleDriver(whole, "explorer"))
    for name, rollout in rollouts_of(scene).items():
        assert_same(rollout, rollouts_of(whole)[name])
    assert len(rollouts_of(scene)) == 10
    assert live_pieces(scene) == []


# --------------------------------------------------------------------------------------------- repeated text


REPETITION = {
    "policies__fake": {"tokens_per_s": RATE, "mean_tokens": 60.0, "sigma": 1.5},
    "sampling__max_tokens": 800, "explorer__repetition_tokens": 100, "explorer__repetition_period": 4,
}  # fmt: skip
"""The fake policy's padding is one blank after the other."""


def test_repeated_text_is_cut_short_and_nothing_else(tmp_path: Path) -> None:
    whole, cut = (Scene(tmp_path / name, **settings) for name, settings in (  # type: ignore[arg-type]
        ("whole", {**REPETITION, "explorer__repetition_tokens": 0}), ("cut", REPETITION),
    ))  # fmt: skip
    for scene in (whole, cut):
        scene.announce(0)
        scene.admit(*range(12))
        finish(scene, RoleDriver(scene, "explorer"))
    expected, found = rollouts_of(whole), rollouts_of(cut)
    long = {name for name, one in expected.items() if one.num_tokens > 120}
    assert 2 <= len(long) <= 12
    for name, rollout in found.items():
        if name not in long:
            assert_same(rollout, expected[name])
            continue
        assert rollout.status is RolloutStatus.truncated
        assert rollout.turns[-1].finish_reason == "repetition"
        assert 100 <= rollout.num_tokens <= 106
        assert rollout.turns[-1].num_tokens == rollout.num_tokens
        (segment,), (before,) = rollout.segments, expected[name].segments
        assert bytes(before.behavior_logprobs.data).startswith(segment.behavior_logprobs.data)
    mean = {scene: sum(one.num_tokens for one in rollouts_of(scene).values()) / 24 for scene in (whole, cut)}
    assert mean[cut] < 0.8 * mean[whole]


def test_what_was_sampled_before_counts(tmp_path: Path) -> None:
    settings = {**REPETITION, "policies__fake": {"tokens_per_s": RATE, "mean_tokens": 300.0, "sigma": 0.0}}
    scene = Scene(tmp_path, **settings, explorer__partial_every_s=1.0)  # type: ignore[arg-type]
    scene.announce(0)
    scene.admit(0)
    work_for(scene, RoleDriver(scene, "explorer", process="first"), seconds=4.0)
    scene.clock.advance(AWAY_S)
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    for rollout in rollouts_of(scene).values():
        assert 100 <= rollout.num_tokens <= 106
        assert rollout.turns[-1].finish_reason == "repetition"
    assert live_pieces(scene) == []


def test_it_ends_a_conversation(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **REPETITION)  # type: ignore[arg-type]
    scene.announce(0)
    scene.admit(0, environment="tests.flow.environments:Conversation", sampling=Sampling(max_tokens=2000))
    scene.admit(*range(1, 8), environment="tests.flow.environments:Conversation", sampling=Sampling(max_tokens=2000))
    finish(scene, RoleDriver(scene, "explorer"))
    cut = [one for one in rollouts_of(scene).values() if one.turns[-1].finish_reason == "repetition"]
    assert cut
    assert all(one.status is RolloutStatus.truncated for one in cut)
    assert any(len(one.turns) == 3 for one in rollouts_of(scene).values())


@pytest.mark.parametrize(("tokens", "period"), [(7, 4), (1, 1)])
def test_a_pattern_has_to_be_there_twice(tokens: int, period: int) -> None:
    from rftstream.errors import ConfigError
    from tests.flow.scene import make_config

    with pytest.raises(ConfigError, match="expected at least twice explorer"):
        make_config(explorer__repetition_tokens=tokens, explorer__repetition_period=period)
