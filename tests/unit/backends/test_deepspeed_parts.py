"""Versions that two ranks publish, each its part, beside the same version as one process would publish it."""

import dataclasses
import signal

import pytest

from rftstream.backends.deepspeed import rank_processes
from rftstream.backends.deepspeed.publishing import share_out
from rftstream.config.sections import LoraSection
from rftstream.contracts.versions import WeightsKind
from rftstream.errors import BackendError, WeightsError
from rftstream.testing.memory_run import MemoryStore
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import state_digest
from rftstream.weights.stores.store import ObjectStore
from tests.unit import tiny
from tests.unit.backends.with_ranks import GRPO, make_backend, plan

pytestmark = pytest.mark.slow


def make(spec, stage):
    return make_backend(spec, processes=2, stage=stage)


def publisher_of(backend, store):
    return WeightsPublisher(store, backend._spec.name, "bfloat16", anchor_every=9, writer=backend.version_writer(store))


@pytest.mark.parametrize(("stage", "lora"), [(2, False), (3, False), pytest.param(3, True, marks=pytest.mark.long)])
def test_two_ranks_publish_the_version_that_one_would(spec, open_kept, tmp_path, stage, lora):
    spec = dataclasses.replace(spec, dtype="bfloat16", lora=LoraSection(rank=2, alpha=4.0) if lora else None)
    backend, store = (
        open_kept(make(spec, stage)),
        ObjectStore("file://weights", base=tmp_path),
    )
    publisher, follower, told = publisher_of(backend, store), WeightsFollower(store, spec.name), []
    for version in range(3):
        staged = publisher.take(backend.served_tensors(), tiny.name(version), resumed=version == 0)
        expected = state_digest(backend.served_tensors())
        if version < 2:
            backend.update(tiny.rows(), GRPO, plan(lr=1e-5))  # beside the writing
        told.append(publisher.write(staged))
        assert follower.announced(told[-1])
        assert told[-1].weights_digest == expected == state_digest(follower.fetch(told[-1]))
    assert [len(one.parts) for one in told] == [2, 2, 2]
    assert told[0].kind is WeightsKind.full and len({one.weights_digest for one in told}) == 3
    assert publisher_of(backend, store).publish({}, tiny.name(9), resumed=True).weights_digest == expected


@pytest.mark.long
def test_a_rank_that_dies_while_it_writes_leaves_nothing_in_force(spec, open_alone, monkeypatch, tmp_path):
    monkeypatch.setattr(rank_processes, "ABANDON_S", 1e6)  # else this process would end
    backend, store = open_alone(make(spec, 2)), ObjectStore("file://weights", base=tmp_path)
    publisher = publisher_of(backend, store)
    staged = publisher.take(backend.served_tensors(), tiny.name(0), resumed=True)
    backend._ranks._processes[1].send_signal(signal.SIGKILL)
    backend._ranks._processes[1].wait()
    with pytest.raises(BackendError, match="rank 1 of 2"):
        publisher.write(staged)
    assert store.list("versions/") == ["versions/000001-00000000.0000.safetensors"], "which the next trainer sweeps"


def test_an_error_of_another_rank_is_that_of_the_store(spec, open_kept, tmp_path):
    backend, store = open_kept(make(spec, 2)), ObjectStore("file://weights", base=tmp_path)
    publisher = publisher_of(backend, store)
    store.put("versions/000001-00000000.0001.safetensors", b"another run's")
    with pytest.raises(WeightsError, match=r"0001\.safetensors: exists with other bytes"):
        publisher.publish({}, tiny.name(0), resumed=True)
    assert publisher.publish({}, tiny.name(1)).kind is WeightsKind.full


def test_tensors_are_shared_out_by_their_parameters():
    sources = {"a": ["p"], "b": ["p"], "c": ["q", "r"], "d": ["s"], "e": ["r"], "f": ["t"]}
    groups = share_out(sources, {"p": 10, "q": 3, "r": 4, "s": 6, "t": 5}, 2)
    assert [(sorted(one.names), one.owner) for one in groups] == [
        (["a", "b"], 0), (["c", "e"], 1), (["d"], 1), (["f"], 0)
    ]  # fmt: skip


def test_a_store_that_the_ranks_do_not_share_is_written_by_one(spec, monkeypatch, tmp_path):
    there = ObjectStore("file://weights", base=tmp_path)
    for private in (ObjectStore("memory://x", base=tmp_path), MemoryStore()):
        assert make(spec, 2).version_writer(private) is None
    assert make(spec, 2).version_writer(there) is not None
    for key, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "h", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(key, str(value))
    assert make(spec, 2).version_writer(there) is None, "ranks of other hosts may see another folder"
