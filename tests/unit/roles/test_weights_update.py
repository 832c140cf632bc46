"""What a policy is given where a version cannot be fetched: the newest that was reached, if it is of use."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rftstream.contracts.versions import VersionName
from rftstream.errors import WeightsError
from rftstream.roles.explorer.weights_update import RETRY_S, WeightsUpdate
from rftstream.testing.memory_run import ManualClock
from rftstream.weights.shared_memory import SharedTensors, WeightsMemory
from tests.suite.each import each

pytestmark = pytest.mark.law("lineage")


def name(version: int, epoch: int = 1) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


class Scene:
    """An explorer whose policy has version 3 and is to have version 5. The follower fails, and has reached another."""

    def __init__(self, reached: VersionName, tensors: Any) -> None:
        self.loads: list[tuple[Any, VersionName]] = []
        self.clock = ManualClock()
        policy = SimpleNamespace(version=name(3), load=lambda tensors, name: self.loads.append((tensors, name)))
        newest = SimpleNamespace(name=name(5))
        follower = SimpleNamespace(
            newest=lambda: newest,
            find=lambda name: SimpleNamespace(announced_at=0.0),
            fetch=self._fetch,
            held=lambda: (reached, tensors),
        )
        self.update = WeightsUpdate(policy, follower, SimpleNamespace(submit=self._submit), self.clock)  # type: ignore[arg-type]

    def _fetch(self, target: Any) -> Any:
        raise WeightsError("a damaged delta")

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
