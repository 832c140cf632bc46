"""Unfinished rollouts: what is saved when, who goes on from it, and what is left of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts import codec
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus, Segment
from rftstream.errors import ProducerLost, TransactionAborted
from rftstream.roles.explorer.saved.partials import parse_key
from rftstream.service.reading import read_records
from rftstream.testing import RoleDriver
from rftstream.transport.base import Transport
from tests.flow.disturbed import FaultAt
from tests.flow.scene import Scene, without_version
from tests.flow.test_explorer import rollouts_of, versions_of, work_for

pytestmark = pytest.mark.law("lost")

LONG = {
    "policies__fake": {"tokens_per_s": 10.0, "mean_tokens": 100.0, "sigma": 0.0},
    "explorer__partial_every_s": 2.0, "transport__partitions": 1,
}  # fmt: skip
"""Ten seconds for each rollout, which are saved every two of them."""

AWAY_S = 11.0
"""Long enough to be declared dead."""


def finish(scene: Scene, explorer: RoleDriver) -> None:
    """Until every task has its rollout; in larger steps than `RoleDriver.work`."""
    until = scene.clock.now() + 300.0
    while num_of(scene, "rollouts") < num_of(scene, "tasks"):
        assert scene.clock.now() < until, explorer.service.health()
        work_for(scene, explorer, seconds=0.1)


def num_of(scene: Scene, topic: str) -> int:
    return sum(scene.transport().admin.end_offsets(topic).values())


def pieces_of(scene: Scene) -> dict[str, list[PartialRollout]]:
    """All that were ever written, by rollout; none of them twice."""
    found: dict[str, list[PartialRollout]] = {}
    for message in scene.messages("partials"):
        assert isinstance(message, PartialRollout)
        found.setdefault(message.ids.rollout_id, []).append(message)
    for pieces in found.values():
        assert [one.piece for one in pieces] == list(range(len(pieces)))
    return found


def live_pieces(scene: Scene) -> list[tuple[str, int]]:
    live = {record.key: record.value for record in scene.records("partials")}
    return [parse_key(key or b"") for key, value in live.items() if value is not None]


def alone(folder: Path, **more: Any) -> dict[str, Rollout]:
    """What an explorer makes of the same tasks that nobody disturbs."""
    scene = Scene(folder / "alone", **{**LONG, "explorer__partial_every_s": 0.0})
    scene.announce(0)
    scene.admit(0, **more)
    finish(scene, RoleDriver(scene, "explorer"))
    assert pieces_of(scene) == {}
    return rollouts_of(scene)


def assert_same(found: Rollout, expected: Rollout) -> None:
    """But for when it was made, and by which settings of its environment."""

    def compared(rollout: Rollout) -> Rollout:
        posted = rollout.posted and without_version(rollout.posted)
        return replace(rollout, started_at=0.0, finished_at=0.0, posted=posted)

    assert compared(found) == compared(expected)


def joined(pieces: list[PartialRollout], name: str) -> bytes:
    return b"".join(getattr(segment, name).data for piece in pieces for segment in piece.segments)


# --------------------------------------------------------------------------------------------- saved and gone on with


def test_each_piece_holds_what_is_new_and_none_is_left_at_the_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG)
    scene.announce(0)
    tasks = scene.admit(0)
    finish(scene, RoleDriver(scene, "explorer"))
    rollouts, pieces = rollouts_of(scene), pieces_of(scene)
    for task in tasks:
        rollout, own = rollouts[task.ids.rollout_id], pieces[task.ids.rollout_id]
        assert [one.num_tokens for one in own] == [pytest.approx(20, abs=1)] * 4
        assert [one.continues for one in own] == [False, True, True, True]
        assert all(one.ids == task.ids and one.turns == () and one.explorer == "explorer" for one in own)
        (whole,) = rollout.segments
        for name in ("token_ids", "behavior_logprobs", "loss_mask"):
            assert bytes(getattr(whole, name).data).startswith(joined(own, name))
    assert live_pieces(scene) == []
    last = {(record.topic, record.key) for record in scene.records("partials")[-8:]}
    assert last == {("partials", f"{task.ids.rollout_id}#{n}".encode()) for task in tasks for n in range(4)}
    assert scene.transport().admin.lag("explorer", "tasks") == {TopicPartition("tasks", 0): 0}


@pytest.mark.parametrize("point", ["killed", "restarted", "told to leave"])
def test_another_goes_on_where_the_first_one_stopped(tmp_path: Path, point: str) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=5.0)
    if point == "told to leave":
        first.stop()
        assert rollouts_of(scene) == {}
    saved = {name: sum(one.num_tokens for one in own) for name, own in pieces_of(scene).items()}
    lost_s = 0.1 if point == "told to leave" else 2.1
    assert all(50 - 10 * lost_s <= count <= 50 for count in saved.values())
    scene.clock.advance(AWAY_S)
    scene.announce(1)
    if point == "restarted":
        first.restart()
        finish(scene, first)
    else:
        finish(scene, RoleDriver(scene, "explorer", process="second"))
    expected = alone(tmp_path)
    for name, rollout in rollouts_of(scene).items():
        assert versions_of(rollout) == [(0, saved[name]), (1, 100 - saved[name])]
        (found,), (whole,) = rollout.segments, expected[name].segments
        for field in ("token_ids", "loss_mask"):
            assert getattr(found, field) == getattr(whole, field)
        assert found.behavior_logprobs.numpy()[:-2].tobytes() == whole.behavior_logprobs.numpy()[:-2].tobytes()
        assert pieces_of(scene)[name][0].started_at == rollout.started_at
    assert len(rollouts_of(scene)) == 2
    assert live_pieces(scene) == []


def test_with_the_same_weights_it_is_what_it_would_have_been_bit_for_bit(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0])
    for number in range(4):
        work_for(scene, RoleDriver(scene, "explorer", process=f"{number}"), seconds=2.7)
        scene.clock.advance(AWAY_S)
    finish(scene, RoleDriver(scene, "explorer", process="last"))
    rollouts = rollouts_of(scene)
    assert {one.explorer for own in pieces_of(scene).values() for one in own} >= {"0", "1", "2", "3"}
    for name, expected in alone(tmp_path).items():
        assert_same(rollouts[name], expected)


def test_nothing_is_saved_of_what_has_nothing_new(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0])
    scene.admit(1, min_version=1)
    work_for(scene, RoleDriver(scene, "explorer"), seconds=5.0)
    assert {one.ids.sequence for own in pieces_of(scene).values() for one in own} == {0}
    assert all(one.num_tokens > 0 for own in pieces_of(scene).values() for one in own)


def test_told_to_leave_it_gives_everything_back_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, explorer__max_concurrent=3, groups=[0, 1])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=1.0)
    began = scene.clock.now()
    first.stop()
    assert scene.clock.now() - began < 0.5
    assert len(pieces_of(scene)) == 3
    assert rollouts_of(scene) == {}
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    assert len(rollouts_of(scene)) == 4
    assert live_pieces(scene) == []


def test_what_leaves_is_not_ended_here_while_its_commit_has_to_wait(tmp_path: Path) -> None:
    """The groups are decided between the try of a commit that fails for now and the next."""
    scene = Scene(tmp_path, **LONG, explorer__max_concurrent=3, groups=[0, 1])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=1.0)
    scene.log.fault = refused = FaultAt("before_commit", TransactionAborted, "first", most=3)
    first.service.drain()
    while not refused.count:
        scene.clock.advance(first.tick() or 0.001)
    scene.decide(0, GroupResult.filtered)
    scene.decide(1, GroupResult.filtered)
    first.stop()
    assert rollouts_of(scene) == {}, "whoever gets the tasks next says that they are skipped"
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    assert {one.status for one in rollouts_of(scene).values()} == {RolloutStatus.skipped}
    assert live_pieces(scene) == []


def test_without_a_rhythm_it_is_saved_only_when_the_worker_leaves(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{**LONG, "explorer__partial_every_s": 0.0}, groups=[0])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=5.0)
    assert pieces_of(scene) == {}
    first.stop()
    assert [len(own) for own in pieces_of(scene).values()] == [1, 1]


# --------------------------------------------------------------------------------------------- whose it is


@pytest.mark.law("fencing")
def test_who_was_away_saves_nothing_of_what_others_took_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=3.0)
    scene.clock.advance(AWAY_S)
    second = RoleDriver(scene, "explorer", process="second")
    work_for(scene, second, seconds=1.0)
    work_for(scene, first, second, seconds=12.0)
    assert len(rollouts_of(scene)) == 2
    assert {name for own in pieces_of(scene).values() for name in {one.explorer for one in own}} <= {"first", "second"}
    for own in pieces_of(scene).values():
        assert [one.explorer for one in own][:2] == ["first", "second"]


@pytest.mark.law("twice")
@pytest.mark.parametrize("point", ["before_commit", "in_commit", "after_commit"])
def test_a_worker_that_stood_still_while_it_saved(tmp_path: Path, point: str) -> None:
    """Its transaction holds nothing but pieces, and it is refused as any other would be."""
    scene = Scene(tmp_path, **LONG, groups=[0])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=1.9)

    def stand_still() -> None:
        scene.clock.advance(AWAY_S)
        second = RoleDriver(scene, "explorer", process="second")
        work_for(scene, second, seconds=0.5)
        work_for(scene, second, seconds=12.0)
        assert len(rollouts_of(scene)) == 2
        second.stop()

    scene.log.fault = stood = FaultAt(point, stand_still, "first", most=1)
    work_for(scene, first, seconds=3.0)
    assert stood.count == 1
    pieces_of(scene)
    assert live_pieces(scene) == []
    assert len(rollouts_of(scene)) == 2


@pytest.mark.law("twice")
@pytest.mark.parametrize("point", ["before_commit", "in_commit", "marking"])
@pytest.mark.parametrize("parity", [0, 1])
def test_a_save_of_which_nobody_knows_whether_it_happened(tmp_path: Path, point: str, parity: int) -> None:
    """The log is asked, and no piece is there twice or left out."""
    scene = Scene(tmp_path, **LONG)
    scene.announce(0)
    scene.log.num_changes += parity  # by it a log in memory decides whether the commit arrives all the same
    scene.admit(0)
    explorer = RoleDriver(scene, "explorer")
    scene.log.fault = lost = FaultAt(point, ProducerLost, "explorer", most=1)
    work_for(scene, explorer, seconds=25.0)
    assert lost.count == 1
    rollouts = rollouts_of(scene)
    for name, expected in alone(tmp_path).items():
        assert_same(rollouts[name], expected)
    assert len(pieces_of(scene)) == 2
    assert live_pieces(scene) == []


@pytest.mark.law("twice")
def test_a_save_that_was_refused_is_tried_again_and_nothing_is_sampled_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0])
    explorer = RoleDriver(scene, "explorer")
    scene.log.fault = refused = FaultAt("before_commit", TransactionAborted, "explorer", most=6)
    began = scene.clock.now()
    finish(scene, explorer)
    assert refused.count == 6
    assert scene.clock.now() - began < 10.5
    rollouts = rollouts_of(scene)
    for name, expected in alone(tmp_path).items():
        assert_same(rollouts[name], expected)


# --------------------------------------------------------------------------------------------- what ends otherwise


def test_a_saved_rollout_whose_group_is_decided_is_skipped_and_its_pieces_go(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG, groups=[0, 1])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=3.0)
    first.stop()
    assert len(live_pieces(scene)) == 8
    scene.decide(0, GroupResult.expired)
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    found = {(one.ids.sequence, one.status) for one in rollouts_of(scene).values()}
    assert found == {(0, RolloutStatus.skipped), (1, RolloutStatus.completed)}
    assert live_pieces(scene) == []


def test_a_saved_rollout_that_fails_leaves_no_piece(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{**LONG, "policies__fake": {**LONG["policies__fake"], "fail_share": 1.0}})  # type: ignore[dict-item]
    scene.announce(0)
    scene.admit(0)
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=3.0)
    first.stop()
    finish(scene, RoleDriver(scene, "explorer", process="second"))
    assert {one.status for one in rollouts_of(scene).values()} == {RolloutStatus.failed}
    assert pieces_of(scene)
    assert live_pieces(scene) == []


def test_a_task_that_can_be_read_no_more_takes_its_pieces_with_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **LONG)
    ids = scene.siblings(0)[0]
    task = scene.admit(0)[0]
    scene.put("partials", piece_of(scene, task.ids.rollout_id))
    scene.announce(0)
    record = codec.to_record(task, "tasks", 0, run="flow")
    broken = Scene(tmp_path / "broken", **LONG)
    broken.announce(0)
    broken.put("partials", piece_of(scene, task.ids.rollout_id))
    broken.put_raw(NewRecord("tasks", 0, record.key, b"\xc1", record.headers))
    RoleDriver(broken, "explorer").work()
    (rollout,) = rollouts_of(broken).values()
    assert (rollout.ids, rollout.status) == (ids, RolloutStatus.undecodable)
    assert live_pieces(broken) == []


def piece_of(scene: Scene, rollout_id: str, **changes: Any) -> PartialRollout:
    """A first piece with three tokens."""
    ids = next(one for one in scene.siblings(0) if one.rollout_id == rollout_id)
    version = changes.pop("version", 0)
    from tests.flow.scene import segment

    piece = PartialRollout(
        ids=ids, piece=0, turns=(), segments=(segment(3, version),), num_tokens=3, environment_state=b"",
        kept_messages=1, started_at=scene.clock.now(), explorer="before",
    )  # fmt: skip
    return replace(piece, **changes)


def of_old_weights(piece: PartialRollout) -> PartialRollout:
    spans = tuple(replace(span, version=1) for span in piece.segments[0].versions)
    return replace(piece, segments=(replace(piece.segments[0], versions=spans),))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda piece: replace(piece, piece=1), "piece 0 is missing"),
        (lambda piece: replace(piece, num_tokens=4), "3 sampled tokens in it, expected 4"),
        (lambda piece: replace(piece, continues=True), "piece 0 does not fit to the one before"),
        (lambda piece: replace(piece, kept_messages=2), "piece 0 does not fit to the one before"),
        (of_old_weights, "version 1 sampled of it, expected at least 2"),
        (lambda piece: replace(piece, ids=replace(piece.ids, min_version=0)), "expected the task's"),
    ],
    ids=["missing", "length", "beginning", "messages", "weights", "task"],
)
def test_pieces_that_cannot_be_continued_are_never_continued(
    tmp_path: Path, damage: Callable[[PartialRollout], PartialRollout], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, **LONG, feeder__group_size=1)
    (task,) = scene.admit(0, min_version=2)
    good = replace(piece_of(scene, task.ids.rollout_id, version=2), ids=task.ids)
    scene.put("partials", damage(good))
    scene.announce(2)
    with caplog.at_level(logging.WARNING):
        finish(scene, RoleDriver(scene, "explorer"))
    assert why in caplog.text
    assert "begun anew" in caplog.text
    (rollout,) = rollouts_of(scene).values()
    assert versions_of(rollout) == [(2, 100)]
    assert live_pieces(scene) == []


def test_a_piece_that_cannot_be_decoded_is_never_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path, **LONG, feeder__group_size=1)
    (task,) = scene.admit(0)
    record = codec.to_record(piece_of(scene, task.ids.rollout_id), "partials", 0, run="flow")
    scene.put_raw(NewRecord("partials", 0, record.key, b"\xc1", record.headers))
    scene.put_raw(NewRecord("partials", 0, b"of nobody", b"x"))
    scene.put_raw(NewRecord("partials", 0, b"\xff#7", b"x"))
    scene.announce(0)
    with caplog.at_level(logging.WARNING):
        finish(scene, RoleDriver(scene, "explorer"))
    assert "partials[0]@0" in caplog.text
    (rollout,) = rollouts_of(scene).values()
    assert rollout.num_tokens == 100


@pytest.mark.parametrize("limit", ["tokens", "stop"])
def test_what_was_saved_when_it_was_complete_is_finished_at_once(tmp_path: Path, limit: str) -> None:
    scene = Scene(tmp_path, **LONG, feeder__group_size=1, sampling__max_tokens=3 if limit == "tokens" else 50)
    (task,) = scene.admit(0)
    piece = piece_of(scene, task.ids.rollout_id)
    if limit == "stop":
        piece = replace(piece, segments=(_ending_with(piece.segments[0], 0),))
    scene.put("partials", piece)
    scene.announce(1)
    finish(scene, RoleDriver(scene, "explorer"))
    (rollout,) = rollouts_of(scene).values()
    assert versions_of(rollout) == [(0, 3)]
    assert rollout.status is (RolloutStatus.truncated if limit == "tokens" else RolloutStatus.completed)
    assert rollout.turns[0].num_tokens == 3


def _ending_with(segment: Segment, token: int) -> Segment:
    tokens = np.array(segment.token_ids.numpy())
    tokens[-1] = token
    return replace(segment, token_ids=type(segment.token_ids).of(tokens, "int32"))


@pytest.mark.law("bounded")
def test_bodies_beyond_the_limit_are_read_from_the_log_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def read(transport: Transport, place: TopicPartition, offsets: Collection[int]) -> dict[int, Record]:
        asked.extend(offsets)
        return read_records(transport, place, offsets)

    monkeypatch.setattr("rftstream.roles.explorer.saved.partials.read_records", read)
    monkeypatch.setattr("rftstream.roles.explorer.saved.partials.Partials.__init__.__defaults__", (2000,))
    scene = Scene(tmp_path, **LONG, groups=[0, 1, 2])
    first = RoleDriver(scene, "explorer", process="first")
    work_for(scene, first, seconds=5.0)
    first.stop()
    second = RoleDriver(scene, "explorer", process="second")
    finish(scene, second)
    assert len(rollouts_of(scene)) == 6
    assert all(one.num_tokens == 100 for one in rollouts_of(scene).values())
    found = [one for own in pieces_of(scene).values() for one in own if one.explorer == "first"]
    assert len(asked) == len(set(asked))
    assert 1 <= len(found) - len(asked) <= 4, "so many of them fit into what is held"
    assert live_pieces(scene) == []
