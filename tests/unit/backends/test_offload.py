"""State that leaves the device between batches: the same bits, and nothing stays behind."""

import dataclasses
import gc

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.config.sections import LoraSection
from rftstream.models.offload import DeviceState
from tests.unit import tiny

GRPO = Grpo(Grpo.Config(kl_coef=0.5))
CONFIGS = [{}, {"offload_optimizer": True}, {"parameters": "bfloat16"}, {"gradient_checkpointing": True}]


def trained(spec, folder, **config):
    """Metrics of three batches, with a renewed reference and one batch that is undone; and all that is saved, served
    and said afterwards. A successor goes on from the middle."""
    backend, metrics = tiny.backend(spec, **config), []
    for seed in range(3):
        if seed == 1:
            backend.renew_reference()
            middle = tiny.whole_state(backend, folder / "middle")
            successor = tiny.backend(spec, **config)
            successor.load(folder / "middle")
            assert tiny.whole_state(successor, folder / "loaded") == middle
            backend = successor
            rows = tiny.rows(seed=9)
            rows[0] = dataclasses.replace(rows[0], advantages=np.full_like(rows[0].advantages, np.nan))
            assert backend.update(rows, GRPO, tiny.plan(minibatches=2)).skipped
        metrics.append(backend.update(tiny.rows(seed=seed), GRPO, tiny.plan(minibatches=2)).metrics)
    said = [backend.logprobs(tiny.rows()), backend.reference_logprobs(tiny.rows(), 64)]
    return (
        metrics,
        tiny.whole_state(backend, folder / "end"),
        tiny.state(backend),
        [one.tobytes() for rows in said for one in rows],
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_steps_with_and_without_give_the_same_bits(spec, tmp_path, config):
    (tmp_path / "plain").mkdir()
    (tmp_path / "offloaded").mkdir()
    plain = trained(spec, tmp_path / "plain", **config)
    assert trained(spec, tmp_path / "offloaded", offload_parameters=True, **config) == plain


@pytest.mark.slow
def test_adapters_do_too(spec, tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "plain").mkdir()
    (tmp_path / "offloaded").mkdir()
    spec = dataclasses.replace(spec, lora=LoraSection(rank=2))
    plain = trained(spec, tmp_path / "plain", autocast="bfloat16")
    assert trained(spec, tmp_path / "offloaded", autocast="bfloat16", offload_parameters=True) == plain


def left_on_device(backend):
    return sum(one.untyped_storage().nbytes() for one in backend._tensors())


def test_between_batches_nothing_is_on_the_device(spec, tmp_path):
    backend = tiny.backend(spec, offload_parameters=True)
    assert left_on_device(backend) == 0
    for call in (
        lambda: backend.update(tiny.rows(), GRPO, tiny.plan()),
        lambda: backend.logprobs(tiny.rows()),
        lambda: backend.reference_logprobs(tiny.rows(), 64),
        backend.renew_reference,
        lambda: tiny.whole_state(backend, tmp_path / "saved"),
        lambda: backend.load(tmp_path / "saved"),
        lambda: tiny.state(backend),
    ):
        call()
        assert left_on_device(backend) == 0
    masters = sum(one.nbytes for one in backend._masters.masters.values())
    counters = len(backend._masters.masters) * 4
    # parameters, two moments and the reference, with what models hold beside
    assert 0 <= backend._state.num_bytes_away - 4 * masters - counters < masters / 4


def test_several_calls_move_it_once(spec, monkeypatch):
    moves = []
    monkeypatch.setattr(DeviceState, "leave", lambda self, leave=DeviceState.leave: (moves.append("away"), leave(self)))
    backend = tiny.backend(spec, offload_parameters=True)
    with backend.on_device():
        backend.logprobs(tiny.rows())
        backend.update(tiny.rows(), GRPO, tiny.plan())
        assert left_on_device(backend) > 0
    assert moves == ["away"] * 2, "after open, and after the batch"


def test_it_leaves_when_it_is_told_to(spec, tmp_path):
    backend, plain = tiny.backend(spec), tiny.backend(spec)
    for one in (backend, plain):
        one.update(tiny.rows(), GRPO, tiny.plan())
    backend.leave_device()
    backend.leave_device()
    assert left_on_device(backend) == 0
    assert tiny.state(backend) == tiny.state(plain)
    backend.update(tiny.rows(seed=1), GRPO, tiny.plan())
    plain.update(tiny.rows(seed=1), GRPO, tiny.plan())
    assert left_on_device(backend) > 0
    assert tiny.whole_state(backend, tmp_path / "a") == tiny.whole_state(plain, tmp_path / "b")


def test_tensors_that_share_bytes_still_do():
    whole = torch.arange(6.0)
    part, other = whole[2:], torch.arange(3)
    state = DeviceState(torch.device("cpu"), lambda: [whole, part, other, whole], offload=False)
    state.leave()
    assert state.num_bytes_away == 6 * 4 + 3 * 8
    assert state.readable({"part": part})["part"].tolist() == [2, 3, 4, 5]
    held = {one.host.data_ptr() for one in state._moved.values()}
    state.come()
    part[0] = 7
    state.leave()
    assert {one.host.data_ptr() for one in state._moved.values()} == held, "main memory that was got once serves again"
    assert not state._spare
    state.come()
    assert (whole.tolist(), other.tolist()) == ([0, 1, 7, 3, 4, 5], [0, 1, 2])


def test_what_has_no_room_stays_away_and_comes_later(no_room):
    tensors = [torch.arange(3.0) + number for number in range(3)]
    state = DeviceState(torch.device("cpu"), lambda: tensors, offload=False)
    state.leave()
    with no_room(2), pytest.raises(torch.cuda.OutOfMemoryError):
        state.come()
    assert state.num_bytes_away == 2 * 12
    state.leave()
    assert state.num_bytes_away == 3 * 12
    state.come()
    assert [one.tolist() for one in tensors] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"parameters": "float32"}, {"offload_optimizer": True}])
def test_a_gpu_is_free_between_batches(tmp_path, config):
    """A model of some 20 million weights: what torch holds falls to less than a hundredth, and losses are equal."""
    spec = dataclasses.replace(tiny.make(tmp_path, width=512, layers=6), device="cuda", dtype="bfloat16")
    found, held = {}, {}
    for offload in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        backend = tiny.backend(spec, offload_parameters=offload, **config)
        metrics = [dict(backend.update(tiny.rows(seed=seed), GRPO, tiny.plan()).metrics) for seed in range(3)]
        held[offload] = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
        if offload:
            assert all(
                one.is_pinned()
                for one in backend._state.readable(dict(backend._network.model.named_parameters())).values()
            )
        found[offload] = metrics, tiny.whole_state(backend, tmp_path / f"{offload}"), tiny.state(backend)
        backend.close()
        del backend
    print(
        {offload: f"{sizes[0] / 1e6:.2f} MB held, {sizes[1] / 1e6:.2f} MB reserved" for offload, sizes in held.items()}
    )
    assert held[False][0] > 30e6
    assert held[True][0] < held[False][0] / 100
    assert held[True][1] < held[False][1] / 2, "others can have it"
    assert found[True] == found[False]
