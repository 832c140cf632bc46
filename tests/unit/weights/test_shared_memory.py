"""One copy of the weights for all processes of a machine: who may read and change it when, and where it lies."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.versions import VersionName
from rftstream.errors import StoreUnreachable, WeightsError
from rftstream.weights import shared_memory
from rftstream.weights.deltas import delta
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.shared_memory import SharedTensors, WeightsMemory, name_prefix
from rftstream.weights.snapshot import RawTensor, decode_snapshot, state_digest
from rftstream.weights.stores.store import ObjectStore
from tests.unit.weights_samples import encode_snapshot


def state(**values: float) -> dict[str, RawTensor]:
    return {key: RawTensor("F32", (2000,), np.full(2000, value, np.float32)) for key, value in values.items()}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore("file://weights", base=tmp_path)


class Trainer:
    """Publishes versions 0, 1, ... to a follower."""

    def __init__(self, store: ObjectStore, follower: WeightsFollower) -> None:
        self.publisher = WeightsPublisher(store, "m", "float32", anchor_every=1000, threads=1)
        self.follower, self.count = follower, 0

    def publish(self, *, resumed: bool = False, **values: float) -> Any:
        name = VersionName(trainer_epoch=1, version=self.count)
        told = self.publisher.publish(state(**values), name, resumed=self.count == 0 or resumed)
        self.count += 1
        assert self.follower.announced(told)
        return told


def fetch(follower: WeightsFollower, told: Any) -> SharedTensors:
    tensors = follower.fetch(told)
    assert isinstance(tensors, SharedTensors)
    return tensors


def read_elsewhere(path: str) -> dict[str, RawTensor]:
    """What another process reads."""
    return decode_snapshot(subprocess.run(["cat", path], stdout=subprocess.PIPE, check=True).stdout)


def test_a_follower_changes_the_one_copy_that_others_read(store: ObjectStore) -> None:
    follower = WeightsFollower(store, "m", threads=1, shared=True)
    trainer = Trainer(store, follower)
    first = fetch(follower, trainer.publish(a=1, b=2, c=3))
    path = first.memory.path
    assert state_digest(read_elsewhere(path)) == state_digest(state(a=1, b=2, c=3))
    assert first.changed_since(None) is None and first.changed_since({"a": 0}) is None
    trainer.publish(a=1, b=5, c=3)
    third = fetch(follower, trainer.publish(a=7, b=5, c=3))  # two deltas at once
    assert third.changed_since(first.marks) == ["a", "b"] and third.changed_since(third.marks) == []
    assert third.memory.path == path  # nothing was copied: it is the same memory
    assert state_digest(read_elsewhere(path)) == state_digest(state(a=7, b=5, c=3))
    with first.reading() as is_current:
        assert not is_current
    with third.reading() as is_current:
        assert is_current
    held = follower.held()
    assert held is not None and isinstance(held[1], SharedTensors) and held[1].changed_since(third.marks) == []


def test_the_next_anchor_of_the_same_size_lies_where_the_last_one_did(store: ObjectStore) -> None:
    follower = WeightsFollower(store, "m", shared=True)
    first = fetch(follower, Trainer(store, follower).publish(a=1, b=2))
    other = WeightsPublisher(store, "m", "float32").publish(
        state(a=1, b=3), VersionName(trainer_epoch=2, version=0), resumed=True
    )
    follower.announced(other)
    second = fetch(follower, other)
    assert second.memory is first.memory and second.changed_since(first.marks) == ["b"]
    assert state_digest(read_elsewhere(second.memory.path)) == state_digest(state(a=1, b=3))
    fresh = follower.fresh()
    fresh.announced(other)
    assert fetch(fresh, other).memory is not first.memory


def test_a_follower_waits_until_what_it_would_change_has_been_read(store: ObjectStore, monkeypatch: Any) -> None:
    follower = WeightsFollower(store, "m", threads=1, shared=True)
    trainer = Trainer(store, follower)
    first = fetch(follower, trainer.publish(a=1))
    memory, arrived = first.memory, threading.Event()
    changing = memory.changing

    def noted() -> Any:
        arrived.set()
        return changing()

    assert follower._state is not None
    monkeypatch.setattr(follower._state, "changing", noted)
    told = trainer.publish(a=2)
    thread = threading.Thread(target=follower.fetch, args=(told,))
    with first.reading() as is_current, first.reading() as by_another:
        assert is_current and by_another
        thread.start()
        assert arrived.wait(60)
        thread.join(0.2)
        assert thread.is_alive()
        assert state_digest(read_elsewhere(memory.path)) == state_digest(state(a=1))
    thread.join(60)
    assert state_digest(read_elsewhere(memory.path)) == state_digest(state(a=2))


@pytest.mark.law("lineage")
def test_what_is_being_changed_or_came_out_wrong_is_read_by_nobody(store: ObjectStore, monkeypatch: Any) -> None:
    follower = WeightsFollower(store, "m", threads=1, shared=True)
    trainer = Trainer(store, follower)
    memory = fetch(follower, trainer.publish(a=1)).memory
    with memory.changing():
        for revision in range(memory.revision + 1):
            with memory.reading(revision) as is_current:
                assert not is_current
    second = fetch(follower, trainer.publish(a=2))
    told = trainer.publish(a=3)

    def wrong(*_: object) -> None:
        raise WeightsError("it came out wrong")

    with monkeypatch.context() as patched:
        patched.setattr(delta, "_check_made", wrong)
        with pytest.raises(WeightsError, match="came out wrong"):
            follower.fetch(told)
    with second.reading() as is_current:
        assert not is_current
    with fetch(follower, told).reading() as is_current:
        assert is_current
    assert state_digest(read_elsewhere(memory.path)) == state_digest(state(a=3))


def test_a_store_that_does_not_answer_leaves_what_is_there_to_be_read(store: ObjectStore, monkeypatch: Any) -> None:
    follower = WeightsFollower(store, "m", threads=1, shared=True)
    trainer = Trainer(store, follower)
    first = fetch(follower, trainer.publish(a=1))
    told = trainer.publish(a=2)

    def unreachable(*_: object) -> Any:
        raise StoreUnreachable("weights: no answer")

    monkeypatch.setattr(store, "open", unreachable)
    with pytest.raises(StoreUnreachable):
        follower.fetch(told)
    with first.reading() as is_current:
        assert is_current


def test_nobody_else_changes_the_bytes_or_the_size() -> None:
    memory = WeightsMemory()
    with memory.changing():
        memory.allocate(3)[:] = b"abc"
    with open(memory.path, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(1)
    with open(memory.path, "r+b") as file, pytest.raises(PermissionError):
        os.write(file.fileno(), b"x")
    with memory.changing():
        view = memory.allocate(3)
        assert bytes(view) == b"abc"
        view[0] = ord("x")
    assert Path(memory.path).read_bytes() == b"xbc"


@pytest.mark.slow
def test_the_memory_is_given_back_with_its_owner() -> None:
    memory = WeightsMemory()
    with memory.changing():
        memory.allocate(10)
        path = memory.path
        assert memory.allocate(10) and memory.path == path
        memory.allocate(20)
    path = memory.path
    assert Path(path).stat().st_size == 20
    del memory
    gc.collect()
    assert not Path(path).exists()


def no_memfd(monkeypatch: Any, path: Path, how: str) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    if how == "absent":
        monkeypatch.delattr(os, "memfd_create")
    elif how == "refused":
        monkeypatch.setattr(os, "memfd_create", refused)
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(shared_memory, "MEMORY", path)


@pytest.mark.parametrize("how", ["absent", "refused", "no /proc"])
def test_without_such_memory_it_is_a_file(monkeypatch: Any, tmp_path: Path, how: str) -> None:
    no_memfd(monkeypatch, tmp_path, how)
    left = tmp_path / f"{name_prefix('weights')}999999999-x"
    left.write_bytes(b"of one that was killed")
    memory = WeightsMemory()
    snapshot = encode_snapshot(state(a=4))
    for size in (len(snapshot), 10, len(snapshot)):
        with memory.changing():
            view = memory.allocate(size)
            view[:] = snapshot[:size]
    assert not left.exists()
    assert [str(one) for one in tmp_path.iterdir()] == [memory.path]
    assert os.stat(memory.path).st_mode & 0o777 == 0o600
    assert state_digest(read_elsewhere(memory.path)) == state_digest(state(a=4))
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_elsewhere_where_memory_is_too_small(monkeypatch: Any, tmp_path: Path) -> None:
    memory_folder, other = tmp_path / "memory", tmp_path / "other"
    memory_folder.mkdir()
    other.mkdir()
    no_memfd(monkeypatch, memory_folder, "absent")
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    full: Iterator[bool] = iter([True, False])

    def filled(descriptor: int, begin: int, size: int) -> None:
        if next(full):
            raise OSError(errno.ENOSPC, "no room")
        fallocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", filled)
    memory = WeightsMemory()
    with memory.changing():
        memory.allocate(5)[:] = b"there"
    assert list(memory_folder.iterdir()) == [] and Path(memory.path).parent == other
    assert Path(memory.path).read_bytes() == b"there"
    memory.close()
    assert list(other.iterdir()) == []


OWNER = """
import os, signal, sys
from pathlib import Path
from rftstream.weights import shared_memory
from tests.unit.weights_samples import encode_snapshot
if sys.argv[1] == "file":
    del os.memfd_create
    shared_memory.MEMORY = Path(sys.argv[2])
memory = shared_memory.WeightsMemory()
with memory.changing():
    memory.allocate(5)[:] = b"there"
print(memory.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_process_that_ends_leaves_nothing(tmp_path: Path, kind: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdin is not None
    path = Path(owner.stdout.readline().strip())
    assert path.read_bytes() == b"there"
    owner.communicate("")
    assert owner.returncode == 0 and not path.exists() and list(tmp_path.iterdir()) == []
