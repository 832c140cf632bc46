"""Images through all roles: by reference from taskset to trainer, replayed bit for bit; bad ones cost their rollout."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import ChatMessage, Problem, Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.data.tasksets.images import image_in
from rftstream.data.tasksets.squares import SquaresTaskset, draw_png
from rftstream.environments.base import Reply
from rftstream.errors import ConfigError
from rftstream.models.vision.images import digest_of
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_replay import replayed

MODEL: dict[str, Any] = {
    "vision": True,
    "characters": "1234",
    "words": ["color?", "count?", "place?", "red", "green", "blue", "yellow", "white", "top left", "top right",
              "bottom left", "bottom right"],
    "width": 32,
    "context": 40,
}  # fmt: skip
ROLES = ("feeder", "explorer", "verifier", "buffer", "trainer")


def scene_of(folder: Path, **settings: Any) -> Scene:
    return Scene(folder, manifest=False, **{
        "model__path": None, "model__make": MODEL, "tasksets": {"squares": {"source": "squares", "reward": "exact"}},
        "run__steps": 3, "explorer__policy": "hf", "trainer__backend": "torch", "trainer__lr": 1e-3,
        "sampling__max_tokens": 3, "feeder__groups_per_batch": 4, "feeder__group_size": 4, **settings,
    })  # fmt: skip


def play(scene: Scene, *, rounds: int = 60) -> None:
    """Let all roles work in turn until the run is over, or nothing happens any more."""
    drivers = [RoleDriver(scene, role) for role in ROLES]
    for _ in range(rounds):
        for driver in drivers:
            driver.work()
        if all(driver.done for driver in drivers):
            return


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = scene_of(tmp_path_factory.mktemp("run"))
    play(scene)
    return scene


def messages_of(scene: Scene, kind: type) -> list[Any]:
    found = [one for topic in ("tasks", "rollouts", "verified", "batches", "steps") for one in scene.messages(topic)]
    return [one for one in found if isinstance(one, kind)]


@pytest.mark.slow
def test_images_travel_by_reference_from_the_taskset_to_the_trainer(played: Scene) -> None:
    taskset = SquaresTaskset(SquaresTaskset.Config(), location="", columns={}, system=None)
    there = {name: data for name, data in played.store.objects.items() if name.startswith("media/")}
    assert there
    assert {f"sha256:{name.rpartition('/')[2]}" for name in there} == {digest_of(data) for data in there.values()}
    for task in messages_of(played, Task):
        (media,) = task.problem.messages[0].media
        index = int(task.ids.group_id.split("/")[2])
        assert replace(media, url="") == replace(taskset.problem(index).messages[0].media[0], url="")
        assert media.url.removeprefix("store:") in there
    for rollout in messages_of(played, Rollout):
        assert rollout.status in (RolloutStatus.completed, RolloutStatus.truncated)
        assert rollout.problem is not None
        (segment,) = rollout.segments
        (span,) = segment.images
        assert span.image == rollout.problem.messages[0].media[0]
        assert set(segment.token_ids.numpy()[span.start : span.start + span.count].tolist()) == {1}
        assert 1 not in segment.token_ids.numpy()[span.start + span.count :]
    assert all(experience.segments[0].images for experience in messages_of(played, Experience))
    steps = [step for step in messages_of(played, StepRecord) if step.batch_sequence is not None]
    assert len(steps) == 3
    assert all(step.metrics["mismatch_k3"] < 1e-6 for step in steps if "mismatch_k3" in step.metrics)
    assert max(len(record.value or b"") for record in played.records("tasks")) < 2000


@pytest.mark.law("replay")
@pytest.mark.slow
def test_a_replay_with_images_gives_the_recorded_digests_bit_for_bit(played: Scene) -> None:
    report = replayed(played)
    assert report.equal
    assert (report.num_batches, report.not_promised) == (3, [])


@pytest.mark.slow
def test_bad_images_cost_their_rollouts_with_the_digest_in_the_reason(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.png").write_bytes(draw_png([(number, 0, (255, 0, 0))]))
    (data / "text.png").write_bytes(b"no image")
    (data / "cut.png").write_bytes(draw_png([])[:800])
    names = ["0.png", "1.png", "2.png", "text.png", "cut.png"]
    rows = [{"prompt": "color?", "answer": "red", "picture": name} for name in names]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"source": f"jsonl:{data / 'rows.jsonl'}", "columns": {"images": "picture"}, "passes": 1}
    scene = scene_of(tmp_path, tasksets={"squares": section}, feeder__groups_per_batch=1)
    play(scene)
    by_row: dict[str, list[VerifiedRollout]] = {}
    for verified in messages_of(scene, VerifiedRollout):
        by_row.setdefault(names[int(verified.ids.group_id.split("/")[2])], []).append(verified)
    for name in ("text.png", "cut.png"):
        digest = digest_of((data / name).read_bytes())
        for verified in by_row[name]:
            assert verified.verdict is None
            assert verified.reason is not None
            assert verified.rollout is not None
            assert verified.rollout.status is RolloutStatus.failed
            assert digest in (verified.rollout.error or "")
    assert all(one.verdict is not None for name in names[:3] for one in by_row[name])
    assert scene.audit().balanced


@pytest.mark.slow
def test_an_image_that_is_gone_when_it_is_trained_on_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(tmp_path, run__steps=2)
    drivers = {role: RoleDriver(scene, role) for role in ROLES}
    for role in ("feeder", "trainer"):  # version 0, which the explorer waits for
        drivers[role].work()
    for _ in range(3):
        for role in ROLES[:-1]:
            drivers[role].work()
    counts = Counter(
        span.image.url
        for experience in messages_of(scene, Experience)
        for segment in experience.segments
        for span in segment.images
    )
    gone = next(iter(counts)).removeprefix("store:")
    kept = scene.store.objects.pop(gone)
    with caplog.at_level(logging.WARNING, logger="rftstream"):
        drivers["trainer"].work()
    step = next(step for step in messages_of(scene, StepRecord) if step.batch_sequence == 0)
    assert step.metrics["rows_without_image"] == counts[f"store:{gone}"]
    assert "is not in the store any more" in caplog.text
    scene.store.objects[gone] = kept


class Shows:
    """An environment that shows a picture of its own with each answer."""

    def __init__(self, config: None, *, problem: Problem, seed: int) -> None:
        self._problem, self._turns = problem, 0

    def start(self) -> tuple[ChatMessage, ...]:
        return self._problem.messages

    def reply(self, said: AssistantMessage) -> Reply:
        self._turns += 1
        picture = image_in(draw_png([(self._turns, 1, (0, 0, 255))]))
        more = (ChatMessage(role="user", content="color?", media=(picture,)),)
        return Reply(done=self._turns == 2, reward=1.0, messages=() if self._turns == 2 else more)


@pytest.mark.slow
def test_images_that_an_environment_shows_are_stored_and_seen(tmp_path: Path) -> None:
    section = {"source": "squares", "environment": f"{__name__}:Shows", "reward": "environment"}
    scene = scene_of(tmp_path, tasksets={"squares": section}, sampling__max_tokens=4, sampling__stop=["1", "red"])
    play(scene)
    expected = digest_of(draw_png([(1, 1, (0, 0, 255))]))
    seen = [
        [span.image.digest for segment in rollout.segments for span in segment.images]
        for rollout in messages_of(scene, Rollout)
        if len([turn for turn in rollout.turns if turn.role == "assistant"]) == 2
    ]
    assert seen
    assert all(digests[-1] == expected for digests in seen)
    assert f"media/{expected[7:9]}/{expected[7:]}" in scene.store.objects
    assert not any(b"data:image" in (record.value or b"") for record in scene.records("rollouts"))


def test_parts_that_are_given_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy 'fake': is given no images, but the model is shown them"):
        RoleDriver(scene_of(tmp_path, explorer__policy="fake"), "explorer")
    with pytest.raises(ConfigError, match=r"trainer.backend: 'fake': is given no images"):
        RoleDriver(scene_of(tmp_path, trainer__backend="fake"), "trainer")
