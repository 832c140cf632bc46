"""Large states of environments: written before the piece that refers to them, read by those who go on, and deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rftstream.contracts.rollouts import Rollout, StoredState
from rftstream.roles.explorer.saved.saved_states import LARGE_BYTES
from rftstream.testing import RoleDriver
from rftstream.testing.faults import Kill
from tests.flow.scene import Scene, playing
from tests.flow.test_explorer import rollouts_of, work_for
from tests.flow.test_partials import AWAY_S, assert_same, finish, live_pieces, pieces_of

pytestmark = pytest.mark.law("lost")

NAME = "tests.flow.environments:Saving"
LARGE = LARGE_BYTES + 1


def scene_of(folder: Path, *, state_bytes: int = LARGE, every_s: float = 0.5) -> Scene:
    return playing(folder, NAME, {"turns": 3, "state_bytes": state_bytes}, every_s=every_s)


def alone(folder: Path) -> dict[str, Rollout]:
    scene = scene_of(folder / "alone", every_s=0.0)
    finish(scene, RoleDriver(scene, "explorer"))
    return rollouts_of(scene)


def states_in(scene: Scene) -> list[str]:
    return scene.store.list("states/")


def stored_in(scene: Scene) -> list[StoredState]:
    pieces = [piece for own in pieces_of(scene).values() for piece in own]
    return [piece.stored_state for piece in pieces if piece.stored_state is not None]


def newest_in(scene: Scene) -> set[str]:
    """What a successor would read."""
    return set({one.object.rpartition("/")[0]: one.object for one in stored_in(scene)}.values())


def assert_as_alone(scene: Scene, folder: Path) -> None:
    expected = alone(folder)
    assert rollouts_of(scene).keys() == expected.keys()
    for name, rollout in rollouts_of(scene).items():
        assert_same(rollout, expected[name])


@pytest.mark.parametrize(("state_bytes", "is_stored"), [(LARGE_BYTES, False), (LARGE, True)])
def test_a_large_state_is_an_object_and_a_small_one_stands_in_the_piece(
    tmp_path: Path, state_bytes: int, is_stored: bool
) -> None:
    scene = scene_of(tmp_path, state_bytes=state_bytes)
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=2.7)
    pieces = [piece for own in pieces_of(scene).values() for piece in own]
    with_state = [piece for piece in pieces if piece.turns]
    assert with_state
    assert all((piece.stored_state is not None) is is_stored for piece in with_state)
    assert all((piece.environment_state is None) is is_stored for piece in with_state)
    for stored in stored_in(scene):
        assert stored.num_bytes == LARGE
        assert stored.digest.removeprefix("sha256:") in stored.object
    finish(scene, explorer)
    explorer.service.close()
    assert states_in(scene) == []
    assert_as_alone(scene, tmp_path)


def test_what_a_newer_state_supersedes_goes_while_the_rollout_goes_on(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    explorer = RoleDriver(scene, "explorer")
    work_for(scene, explorer, seconds=2.7)
    newest = newest_in(scene)
    assert len(stored_in(scene)) > len(newest), "each rollout has saved in several turns"
    explorer.service.close()
    assert set(states_in(scene)) == newest


@pytest.mark.parametrize("seconds", [(1.7,), (2.6,), (1.0, 0.8, 0.8)], ids=str)
def test_another_goes_on_from_the_object_and_deletes_it_at_the_end(
    tmp_path: Path, seconds: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(tmp_path)
    for number, one in enumerate(seconds):
        work_for(scene, RoleDriver(scene, "explorer", process=f"{number}"), seconds=one)
        scene.clock.advance(AWAY_S)
    last = RoleDriver(scene, "explorer", process="last")
    with caplog.at_level(logging.WARNING):
        finish(scene, last)
    last.service.close()
    assert "begun anew" not in caplog.text
    assert states_in(scene) == []
    assert live_pieces(scene) == []
    assert_as_alone(scene, tmp_path)


def _gone(scene: Scene, name: str) -> None:
    del scene.store.objects[name]


def _damaged(scene: Scene, name: str) -> None:
    scene.store.objects[name] = b"turn 2".ljust(LARGE)


@pytest.mark.parametrize(("harm", "text"), [(_gone, "no such object"), (_damaged, "it is damaged")])
def test_without_its_object_a_rollout_begins_anew(
    tmp_path: Path, harm: Callable[[Scene, str], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(tmp_path)
    work_for(scene, RoleDriver(scene, "explorer", process="first"), seconds=1.7)
    scene.clock.advance(AWAY_S)
    for name in states_in(scene):
        harm(scene, name)
    second = RoleDriver(scene, "explorer", process="second")
    with caplog.at_level(logging.WARNING):
        finish(scene, second)
    second.service.close()
    assert text in caplog.text
    assert "begun anew" in caplog.text
    assert_as_alone(scene, tmp_path)
    assert states_in(scene) == []
    assert live_pieces(scene) == []


@pytest.mark.parametrize("point", ["before_states", "after_states"])
def test_killed_between_the_object_and_its_piece(tmp_path: Path, point: str) -> None:
    """What was put for a piece that was never committed goes with the rollout that has other pieces, and by the
    successor's look at the partition if it has none."""
    scene = scene_of(tmp_path)
    first = RoleDriver(scene, "explorer", process="first")

    def kill(at: str) -> None:
        if at == point:
            raise Kill(at)

    scene.store.fault = kill
    with pytest.raises(Kill):
        work_for(scene, first, seconds=3.0)
    scene.store.fault = None
    scene.clock.advance(AWAY_S)
    left = states_in(scene)
    assert len(left) == (point == "after_states")
    assert not stored_in(scene)
    scene.store.put("states/flow/0/sums/0/99/0/0/0000-0-00", b"of a rollout that nobody has")
    scene.store.put("states/another-run/0/sums/0/99/0/0/0000-0-00", b"of a run that shares the store")
    second = RoleDriver(scene, "explorer", process="second")
    finish(scene, second)
    second.service.close()
    assert states_in(scene) == ["states/another-run/0/sums/0/99/0/0/0000-0-00"]
    assert_as_alone(scene, tmp_path)


@pytest.mark.law("fencing")
def test_an_explorer_that_stood_still_deletes_nothing_of_its_successor(tmp_path: Path) -> None:
    """It lists the store after its partition was taken, and finishes nothing there any more."""
    scene = scene_of(tmp_path)
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=0.2)
    scene.clock.advance(AWAY_S)
    second = RoleDriver(scene, "explorer", process="second")
    work_for(scene, second, seconds=1.7)
    live = newest_in(scene)
    assert live
    for _ in range(5):
        first.tick()
    assert live <= set(states_in(scene))
    finish(scene, second)
    first.service.close()
    second.service.close()
    assert_as_alone(scene, tmp_path)


def test_a_store_that_takes_nothing_costs_the_saving_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = scene_of(tmp_path)

    def refuse(at: str) -> None:
        if at == "before_states":
            raise OSError("no room")

    scene.store.fault = refuse
    with caplog.at_level(logging.WARNING):
        finish(scene, RoleDriver(scene, "explorer"))
    assert "its environment cannot be saved" in caplog.text
    assert "no room" in caplog.text
    assert not stored_in(scene)
    assert_as_alone(scene, tmp_path)
