"""DeepSpeed's state leaves the device between batches: the same bits, and nothing stays behind."""

import dataclasses
import gc
import warnings

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.ppo import Ppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends import base
from rftstream.backends.deepspeed.held import held_tensors, same_part
from rftstream.config.sections import LoraSection
from rftstream.errors import ConfigError
from tests.unit import tiny
from tests.unit.backends.test_critic import estimated
from tests.unit.backends.with_ranks import make_backend

GRPO = Grpo(Grpo.Config(kl_coef=0.5))
PPO = Ppo(Ppo.Config(critic=CriticConfig(lr=1e-3)))
CONFIGS = [
    {"stage": 2},
    {"stage": 3},
    *(
        pytest.param(config, marks=pytest.mark.long)
        for config in (
            {"stage": 0},
            {"stage": 1, "offload_optimizer": True},
            {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        )
    ),
]
BUCKET = 1_000_000
"""Gradients in a bucket. DeepSpeed's 500 million take seconds to get."""
SCALAR_BYTES = 64
"""What a number or two may take that only look like state, on a device whose memory is main memory."""


@pytest.fixture
def opened(open_alone):
    def make(spec, critic=None, **config):
        backend = make_backend(spec, config={"zero_optimization": {"reduce_bucket_size": BUCKET}}, **config)
        if critic is not None:
            backend.hold_critic(critic, spec.folder)
        return open_alone(backend)

    return make


def trained(make, folder, algorithm, *, leaves):
    """All that three batches, a renewed reference, a batch that is undone and a successor compute, save and serve."""
    folder.mkdir()

    def rows(seed):
        made = tiny.rows(seed=seed)
        return estimated(backend, PPO, seed) if algorithm is PPO else made

    def left(backend):
        if leaves:
            backend.leave_device()
        return backend

    backend, found = left(make()), []
    for seed in range(3):
        if seed == 1:
            left(backend).renew_reference()
            middle = tiny.whole_state(left(backend), folder / "middle")
            backend = left(make())
            backend.load(folder / "middle")
            assert tiny.whole_state(left(backend), folder / "loaded") == middle
            bad = list(rows(9))
            bad[0] = dataclasses.replace(bad[0], advantages=np.full_like(bad[0].advantages, np.nan))
            assert left(backend).update(bad, algorithm, tiny.plan(minibatches=2)).skipped
        found.append(left(backend).update(rows(seed), algorithm, tiny.plan(minibatches=2)).metrics)
        found.append(tiny.state(left(backend)))
    found += [left(backend).logprobs(tiny.rows()), left(backend).reference_logprobs(tiny.rows(), 64)]
    if algorithm is PPO:
        found.append(left(backend).values(tiny.rows(), 64))
    (folder / "exported").mkdir()
    left(backend).export(folder / "exported")
    found.append((folder / "exported" / "model.safetensors").read_bytes())
    found.append(tiny.whole_state(left(backend), folder / "end"))
    return [[one.tobytes() for one in part] if isinstance(part, list) else part for part in found]


def both(make, tmp_path, algorithm=GRPO):
    return [trained(make, tmp_path / str(leaves), algorithm, leaves=leaves) for leaves in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_it_computes_the_same_bits_whether_it_leaves_or_not(spec, opened, tmp_path, config):
    stayed, left = both(lambda: opened(spec, **config), tmp_path)
    assert left == stayed


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_adapters_and_a_critic_leave_too(spec, opened, tmp_path, stage):
    pytest.importorskip("peft")
    adapted = dataclasses.replace(spec, lora=LoraSection(rank=2))
    (tmp_path / "adapted").mkdir()
    stayed, left = both(lambda: opened(adapted, stage=stage), tmp_path / "adapted")
    assert left == stayed
    stayed, left = both(lambda: opened(spec, PPO.critic, stage=stage), tmp_path, PPO)
    assert left == stayed


def storages():
    """Every storage that Python can see, with its bytes, and the storages, so that no other one gets their addresses.
    A mapped file is none: no device has it."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects mind being looked at
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    found = [one.untyped_storage() for one in tensors if not one.is_meta]
    return {one._cdata: one.nbytes() for one in found if one.resizable()}, found


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_stays_on_the_device(spec, opened, config):
    before, _kept = storages()
    backend = opened(spec, PPO.critic, **config)
    backend.update(estimated(backend, PPO), PPO, tiny.plan())
    backend.renew_reference()
    backend.update(tiny.rows(), GRPO, tiny.plan())
    there = {key: size for key, size in storages()[0].items() if key not in before and size > SCALAR_BYTES}
    masters = 4 * sum(one.numel() for one in backend._rank.trained["policy"].shapes.values())
    assert sum(there.values()) > 4 * masters, "parameters, moments, the reference: it would be seen"
    backend.leave_device()
    moved = [one.host for one in backend._state._moved.values() if one.host is not None]
    hosts = {host.untyped_storage()._cdata for host in moved}
    stayed = {key: size for key, size in storages()[0].items() if key not in before and key not in hosts}
    assert not [size for size in stayed.values() if size > SCALAR_BYTES]
    assert max(map(len, moved)) < 4 * BUCKET, "buckets are given up, not kept in main memory"


@pytest.mark.slow
def test_what_could_not_come_back_is_read_all_the_same(spec, opened, tmp_path, no_room):
    """The device has no room half way. What was taken over before, is saved or served then, is as it was."""
    backend = opened(spec, stage=2)
    backend.update(tiny.rows(), GRPO, tiny.plan())
    backend.renew_reference()
    early, state = backend.served_tensors(), tiny.state(backend)
    expected = tiny.whole_state(backend, tmp_path / "expected")
    backend.leave_device()
    assert {name: bytes(one.data) for name, one in early.items()} == state
    with no_room(5), pytest.raises(torch.cuda.OutOfMemoryError), backend.on_device():
        pass
    assert tiny.state(backend) == state
    assert tiny.whole_state(backend, tmp_path / "found") == expected
    backend.leave_device()
    assert tiny.whole_state(backend, tmp_path / "again") == expected


@pytest.mark.slow
def test_an_older_reference_does_not_stay(spec, opened):
    backend = opened(spec, stage=2)
    backend.renew_reference()
    backend.leave_device()
    with backend.on_device():
        old = {one.untyped_storage()._cdata for one in backend._rank.renewed}
        backend.renew_reference()
        assert not old & storages()[0].keys()


def test_parts_are_found_where_several_share_bytes():
    whole = torch.arange(8.0)
    of = [whole[:4], whole[4:]]
    to = [one.clone() for one in of]
    found = same_part(whole[5:7], of=of, to=to)
    assert found.tolist() == [5, 6] and found.untyped_storage()._cdata == to[1].untyped_storage()._cdata


def test_what_objects_hold_is_found():
    class Base:
        __slots__ = ("slot",)

    class Holder(Base):
        __module__ = "deepspeed.somewhere"
        __slots__ = ("unset",)

    holder, owner = Holder(), torch.nn.Linear(2, 2)
    holder.slot = {"deep": [({torch.zeros(1): torch.zeros(2)},)]}
    owner.weight.grad = torch.zeros(2, 2)
    owner.weight.part = torch.zeros(3)
    foreign = type("Foreign", (), {"__module__": "elsewhere"})()
    foreign.tensor = torch.zeros(9)
    found = [tuple(one.shape) for one in held_tensors([holder, [owner, holder], foreign])]
    assert sorted(found) == [(1,), (2,), (2,), (2, 2), (2, 2), (3,)]


def test_several_ranks_do_not_leave(spec, monkeypatch):
    backend = make_backend(spec)
    monkeypatch.setattr(backend, "_ranks", type("Two", (), {"place": type("Place", (), {"size": 2})}))
    with base.on_device(backend):
        pass
    with pytest.raises(ConfigError, match=r"trainer.colocate: DeepSpeed's launcher started 2 ranks, expected one"):
        backend.leave_device()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload_optimizer": True}])
def test_a_gpu_is_free_between_batches(tmp_path, opened, config):
    """A model of some 20 million weights: what torch holds falls to less than a hundredth, and losses are equal."""
    spec = dataclasses.replace(tiny.make(tmp_path / "model", width=512, layers=6), device="cuda", dtype="bfloat16")
    found, held = {}, {}
    for leaves in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        backend = opened(spec, **config)
        metrics = []
        for seed in range(3):
            metrics.append(dict(backend.update(tiny.rows(seed=seed), GRPO, tiny.plan()).metrics))
            if leaves:
                backend.leave_device()
        held[leaves] = torch.cuda.memory_allocated() - before
        found[leaves] = metrics, tiny.whole_state(backend, tmp_path / f"{leaves}"), tiny.state(backend)
    print({leaves: f"{size / 1e6:.2f} MB held" for leaves, size in held.items()})
    assert held[False] > 30e6
    assert held[True] < held[False] / 100
    assert found[True] == found[False]
