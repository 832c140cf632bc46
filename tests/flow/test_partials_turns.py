"""Unfinished rollouts of several turns: they go on in the middle of a conversation, if its environment can be saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene, playing
from tests.flow.test_explorer import rollouts_of, work_for
from tests.flow.test_partials import AWAY_S, assert_same, finish, live_pieces, pieces_of

pytestmark = pytest.mark.law("lost")

PLACE = "tests.flow.environments"


def scene_of(folder: Path, environment: str, *, fails_in: str = "", every_s: float = 0.5, turns: int = 3) -> Scene:
    return playing(folder, f"{PLACE}:{environment}", {"turns": turns, "fails_in": fails_in}, every_s=every_s)


def alone(folder: Path, environment: str) -> dict[str, Rollout]:
    scene = scene_of(folder / "alone", environment, every_s=0.0)
    finish(scene, RoleDriver(scene, "explorer"))
    assert pieces_of(scene) == {}
    return rollouts_of(scene)


def disturbed(scene: Scene, *seconds: float) -> dict[str, Rollout]:
    """One explorer after the other dies after so long."""
    for number, one in enumerate(seconds):
        work_for(scene, RoleDriver(scene, "explorer", process=f"{number}"), seconds=one)
        scene.clock.advance(AWAY_S)
    finish(scene, RoleDriver(scene, "explorer", process="last"))
    assert live_pieces(scene) == []
    return rollouts_of(scene)


@pytest.mark.parametrize("environment", ["Saving", "SavingRewriter"])
@pytest.mark.parametrize("seconds", [(0.7,), (1.2,), (1.6,), (0.8, 0.8, 0.8), (2.9,)], ids=str)
def test_it_goes_on_in_the_middle_of_the_conversation(
    tmp_path: Path, environment: str, seconds: tuple[float, ...]
) -> None:
    rollouts = disturbed(scene := scene_of(tmp_path, environment), *seconds)
    expected = alone(tmp_path, environment)
    assert rollouts.keys() == expected.keys()
    for name, rollout in rollouts.items():
        assert rollout.status is RolloutStatus.completed
        assert_same(rollout, expected[name])
    own = next(iter(pieces_of(scene).values()))
    if seconds[0] > 1.5 or len(seconds) > 1:
        assert any(piece.turns for piece in own), "some turn was saved"
    # The state of the environment is in the first piece, and in those that have another turn.
    assert [piece.environment_state is not None for piece in own] == [
        number == 0 or bool(piece.turns) for number, piece in enumerate(own)
    ]


def test_a_piece_has_only_what_the_conversation_has_more(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, "Saving")
    finish(scene, RoleDriver(scene, "explorer"))
    for own in pieces_of(scene).values():
        messages = [1, *(piece.kept_messages + len(piece.messages) for piece in own)]
        assert [piece.kept_messages for piece in own] == messages[:-1]
        assert messages[-1] == 5
        assert [turn.role for piece in own for turn in piece.turns] == ["assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(("environment", "fails_in"), [("Conversation", ""), ("Saving", "save"), ("Saving", "load")])
def test_what_cannot_be_saved_or_loaded_is_begun_anew_and_never_wrong(
    tmp_path: Path, environment: str, fails_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(tmp_path, environment, fails_in=fails_in)
    with caplog.at_level(logging.WARNING):
        rollouts = disturbed(scene, 1.7)
    expected = alone(tmp_path, "Conversation")
    for name, rollout in rollouts.items():
        assert_same(rollout, expected[name])
    saved = [piece for own in pieces_of(scene).values() for piece in own]
    if fails_in == "save":
        assert all(piece.turns == () for piece in saved), "of its first turn alone: no state is needed for that"
        assert "save: RuntimeError: the environment cannot be saved" in caplog.text
    elif fails_in == "load":
        assert "load: RuntimeError: the environment cannot be loaded" in caplog.text
    else:
        assert all(piece.turns == () for piece in saved), "of its first turn alone: no state is needed for that"


def test_an_environment_that_begins_otherwise_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.flow.environments import Conversation

    scene = scene_of(tmp_path, "Conversation")
    work_for(scene, RoleDriver(scene, "explorer", process="first"), seconds=0.8)
    scene.clock.advance(AWAY_S)
    start = Conversation.start

    def otherwise(self: Any) -> Any:
        return (*start(self), *start(self))

    monkeypatch.setattr(Conversation, "start", otherwise)
    with caplog.at_level(logging.WARNING):
        finish(scene, RoleDriver(scene, "explorer", process="second"))
    assert "begins otherwise now" in caplog.text
    assert len(rollouts_of(scene)) == 2
    for rollout in rollouts_of(scene).values():
        prompt = rollout.segments[0].token_ids.numpy()[:9]
        assert bytes(prompt.tolist()) == b"1+2=\n1+2="
