"""The trainer's part in a device that engines are on, too: when it asks, has it and leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rftstream.roles.trainer.backend_thread import BackendThread
from rftstream.roles.trainer.device_share import TrainerShare
from rftstream.roles.trainer.pending_update import Inline
from rftstream.testing.devices import MemoryDevice, MemoryLock
from rftstream.testing.memory_run import ManualClock


class Scene:
    def __init__(self) -> None:
        self.left, self.fails = 0, False
        self.clock, self.device = ManualClock(), MemoryDevice()
        self.engine = MemoryLock(self.device, "explorer-0")
        backend = BackendThread(SimpleNamespace(leave_device=self._leave), Inline())  # type: ignore[arg-type]
        self.share = TrainerShare(MemoryLock(self.device, "trainer-0"), backend, self.clock)

    def _leave(self) -> None:
        assert not self.engine.share(), "the memory is free first, and then the lock"
        if self.fails:
            raise RuntimeError("out of memory")
        self.left += 1

    @property
    def says(self) -> object:
        return self.share.health()["device"]


def test_it_asks_has_the_device_and_leaves() -> None:
    scene = Scene()
    assert scene.engine.share() and scene.says == "engines have the device"
    assert not scene.share.take() and scene.share.is_waiting and scene.says == "waits for the device"
    scene.clock.advance(2.0)
    scene.engine.release()
    assert scene.share.take() and scene.share.take() and not scene.share.is_waiting
    assert scene.says == "has the device" and scene.share.metrics() == {"device_wait_s": 2.0}
    assert scene.share.metrics() == {"device_wait_s": 0.0}
    scene.share.leave()
    scene.share.leave()
    assert scene.left == 1 and scene.engine.share()


def test_it_asks_no_more_when_it_is_told_to_pause() -> None:
    scene = Scene()
    assert scene.engine.share() and not scene.share.take()
    scene.share.leave()
    assert not scene.share.is_waiting and not scene.engine.is_wanted() and scene.left == 0


def test_it_has_the_device_while_it_recovers_and_then_no_more() -> None:
    scene = Scene()
    with scene.share.recovering():
        assert not scene.engine.share()
    assert scene.engine.share() and scene.left == 1
    scene.engine.release()
    with pytest.raises(ZeroDivisionError), scene.share.recovering():
        raise ZeroDivisionError
    assert scene.engine.share() and scene.left == 2, "its memory is free, too"
    assert not scene.share.take(), "it asks anew"


def test_it_keeps_a_device_that_it_could_not_leave_until_it_has_recovered() -> None:
    scene = Scene()
    scene.fails = True
    with pytest.raises(ZeroDivisionError), scene.share.recovering():
        raise ZeroDivisionError
    assert scene.says == "has the device" and not scene.engine.share()
    scene.fails = False
    with scene.share.recovering():
        pass
    assert scene.engine.share()


def test_a_device_of_its_own_is_always_there() -> None:
    share = TrainerShare(None, BackendThread(SimpleNamespace(), Inline()), ManualClock())  # type: ignore[arg-type]
    with share.recovering():
        pass
    assert share.take() and not share.is_waiting
    share.leave()
    assert (share.metrics(), share.health()) == ({}, {})
