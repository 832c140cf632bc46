"""What a policy is given where a version cannot be fetched: the newest that was reached, if it is of use."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rftstream.contracts.versions import VersionName
from rftstream.errors import StoreUnreachable, WeightsError, WeightsGone
from rftstream.roles.explorer.weights_update import GIVE_UP_S, RETRY_S, SAY_AGAIN_S, WeightsUpdate
from rftstream.testing.memory_run import ManualClock
from rftstream.weights.shared_memory import SharedTensors, WeightsMemory
from tests.suite.each import each

pytestmark = pytest.mark.law("lineage")


def name(version: int, epoch: int = 1) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


class Scene:
    """An explorer whose policy has version 3 and is to have version 5. The follower fails, and has reached another."""

    def __init__(self, reached: VersionName | None, tensors: Any, has: VersionName | None = name(3)) -> None:  # noqa: B008
        self.problem = WeightsError("a damaged delta")
        self.loads: list[tuple[Any, VersionName]] = []
        self.clock = ManualClock()
        policy = SimpleNamespace(version=has, load=lambda tensors, name: self.loads.append((tensors, name)))
        newest = SimpleNamespace(name=name(5))
        follower = SimpleNamespace(
            newest=lambda: newest,
            find=lambda name: SimpleNamespace(announced_at=0.0),
            fetch=self._fetch,
            held=lambda: reached and (reached, tensors),
        )
        self.update = WeightsUpdate(policy, follower, SimpleNamespace(submit=self._submit), self.clock)  # type: ignore[arg-type]

    def _fetch(self, target: Any) -> Any:
        raise self.problem

    def _submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except WeightsError as error:
            future.set_exception(error)
        return future

    def play(self) -> None:
        newest = self.update.newer()
        assert newest is not None and self.update.take_over(newest, is_sampling=True, began=0.0)


SHARED = SharedTensors({}, WeightsMemory(), marks={})


@each(("reached", "tensors", "is_loaded"), [
    (name(4), {}, True), (name(3), {}, False), (name(2), {}, False), (name(4, epoch=2), {}, False),
    # the memory has been changed and changed back, and the engine may not have read it before
    (name(4), SHARED, True), (name(3), SHARED, True), (name(2), SHARED, False),
])  # fmt: skip
def test_what_was_reached_is_loaded_if_it_is_of_use(reached: VersionName, tensors: Any, is_loaded: bool) -> None:
    scene = Scene(reached, tensors)
    scene.play()
    assert scene.loads == ([(tensors, reached)] if is_loaded else [])
    scene.play()
    assert len(scene.loads) == is_loaded, "it is tried again a while later"
    scene.clock.advance(RETRY_S + 0.1)
    scene.play()
    assert len(scene.loads) == 2 * is_loaded


@each(("has", "problems", "ends"), [
    (None, [WeightsGone("no such object")], True),
    (name(3), [WeightsGone("no such object")], False),  # it samples with what it has
    (None, [StoreUnreachable("no answer")], False),
    (None, [WeightsGone("no such object")] * 50 + [StoreUnreachable("no answer")], False),
])  # fmt: skip
def test_a_process_without_weights_leaves_a_store_that_lacks_them(
    has: VersionName | None, problems: list[WeightsError], ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(None, {}, has)
    began = scene.clock.now()

    def play_on() -> None:
        for tried in range(int(2 * GIVE_UP_S / RETRY_S)):
            scene.problem = problems[tried % len(problems)]
            scene.play()
            scene.clock.advance(RETRY_S + 0.01)

    if not ends:
        play_on()
        assert has is None or caplog.messages[-1].endswith("going on with version 1/3")
        return
    with pytest.raises(WeightsGone):
        play_on()
    assert scene.clock.now() - began >= GIVE_UP_S, "a trainer needs a minute to publish them anew"
    assert len(caplog.messages) == GIVE_UP_S / SAY_AGAIN_S, "not at each try"
