"""Weights in four bits, moments in eight, activations away from the device: what a small GPU needs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.torch.network import is_weight
from rftstream.backends.torch.quantized import FourBitLinear
from rftstream.config import loader
from rftstream.config.sections import LoraSection, MakeModel, ModelSection
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import model_digests, prepare_model
from rftstream.models.folders.rounded import rounded
from rftstream.preflight.checks.check import check
from tests.unit import tiny

pytestmark = pytest.mark.slow


def spec_of(folder, *, dtype="bfloat16", family="llama", device="cpu"):
    lora = LoraSection(rank=4, alpha=8.0)
    section = ModelSection(make=MakeModel(width=64, family=family), dtype=dtype, lora=lora, quantize="nf4")
    return prepare_model(section, folder / "tiny", 0, device=device)


@pytest.fixture
def grpo():
    return Grpo(Grpo.Config())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(96, 80), (64, 128), (7, 9)])
def test_values_are_rounded_as_defined_and_no_further(dtype, shape):
    from bitsandbytes.functional import get_4bit_type

    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    once_OI, levels = rounded(weight_OI), get_4bit_type("nf4", device="cpu")
    expected = []
    for block in weight_OI.float().flatten().split(64):
        scale = block.abs().max()
        expected.append(scale * levels[(block[:, None] / scale - levels).abs().argmin(1)])
    assert torch.equal(once_OI, torch.cat(expected).view(shape).to(weight_OI.dtype))
    assert torch.equal(rounded(once_OI), once_OI)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_four_bits_give_the_bits_of_the_rounded_folder(tmp_path, grpo, family):
    spec = spec_of(tmp_path, family=family)
    found = tiny.backend(spec), tiny.backend(dataclasses.replace(spec, quantize=None))
    held = [one for one in found[0]._network.model.modules() if isinstance(one, FourBitLinear)]
    assert len(held) == sum(1 for one in found[1]._network.model.modules() if hasattr(one, "lora_A"))
    for step in range(2):
        for one, other in zip(*(one.logprobs(tiny.rows()) for one in found), strict=True):
            np.testing.assert_array_equal(one, other)
        updates = [one.update(tiny.rows(seed=step), grpo, tiny.plan()) for one in found]
        assert updates[0].metrics == updates[1].metrics
    assert tiny.state(found[0]) == tiny.state(found[1])
    for one in held:
        assert one.weight.nbytes + one.absmax.nbytes == one.in_features * one.out_features * (1 / 2 + 4 / 64)


def test_the_policy_samples_from_what_is_trained_and_an_export_has_it(tmp_path, grpo):
    spec = spec_of(tmp_path, dtype="float32")
    backend = tiny.backend(spec)
    backend.update(tiny.rows(), grpo, tiny.plan())
    policy = tiny.policy(spec, backend.served_tensors())
    request = tiny.request(1)
    completion = tiny.drain_one(policy, request)
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits_TV = backend._network.model(input_ids=ids.long()).logits[0, len(request.token_ids) - 1 : -1]
    expected = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])
    np.testing.assert_allclose(completion.behavior_logprobs, expected[:, 0], atol=2e-5)
    (tmp_path / "final").mkdir()
    backend.export(tmp_path / "final")
    merged, base = load_file(tmp_path / "final" / "model.safetensors"), load_file(spec.folder / "model.safetensors")
    assert merged.keys() == base.keys()
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_second_host_makes_the_same_folder(tmp_path):
    specs = [spec_of(tmp_path / name) for name in ("one", "other")]
    assert model_digests(specs[0]) == model_digests(specs[1])
    assert specs[0].name == specs[1].name
    assert "+nf4" in specs[0].name
    plain = prepare_model(ModelSection(make=MakeModel(width=64), dtype="bfloat16"), tmp_path / "one" / "tiny", 0)
    assert model_digests(plain)["model"] != model_digests(specs[0])["model"]


def test_four_bits_that_cannot_be_are_refused(tmp_path):
    run = {"run": {"name": "a", "steps": 1}, "tasksets": {"sums": {"source": "arithmetic"}}, "base": str(tmp_path)}
    for given, expected in (
        ({"model": {"make": {}, "quantize": "nf4"}}, "got 'nf4' without [model.lora], expected adapters"),
        (
            {"model": {"make": {}, "quantize": "nf4", "lora": {}}, "trainer": {"backend": "deepspeed"}},
            "got the backend 'deepspeed', which holds no weights in four bits, expected 'torch'",
        ),
    ):
        found = check(loader.from_dict({**run, **given})).errors
        assert any(f"model.quantize: {expected}" in one for one in found), found


def test_moments_in_8_bits_learn_alike_and_are_restored(tmp_path, grpo):
    spec = tiny.make(tmp_path, width=64)
    rows = tiny.rows(24)
    losses, bytes_of_moments = {}, {}
    for moments in ("float32", "8bit"):
        backend = tiny.backend(spec, moments=moments)
        losses[moments] = [backend.update(rows, grpo, tiny.plan(lr=1e-3)).metrics["loss"] for _ in range(6)]
        number = sum(one.numel() for one in backend._network.model.parameters())
        held = (one.nbytes for name, one in backend._masters.moments() if not name.startswith(("step/", "qmap")))
        bytes_of_moments[moments] = sum(held) / number
    assert losses["8bit"] == pytest.approx(losses["float32"], rel=0.1, abs=0.02)
    assert losses["8bit"][-1] < losses["8bit"][0]
    assert bytes_of_moments["float32"] == 8
    assert bytes_of_moments["8bit"] < 3  # norms and other small tensors stay in float32
    saved = tiny.whole_state(backend, tmp_path / "saved")
    again = tiny.backend(spec, moments="8bit")
    again.load(tmp_path / "saved")
    assert tiny.whole_state(again, tmp_path / "again") == saved
    updates = [one.update(rows, grpo, tiny.plan(lr=1e-3)).metrics for one in (backend, again)]
    assert updates[0] == updates[1]
    assert tiny.state(backend) == tiny.state(again)
    with pytest.raises(ConfigError, match="has moments in 8bit, expected float32; set it to '8bit'"):
        tiny.backend(spec).load(tmp_path / "saved")


def test_activations_away_from_the_device_change_no_bit(tmp_path, grpo):
    spec = tiny.make(tmp_path)
    states = []
    for away in (False, True):
        backend = tiny.backend(spec, gradient_checkpointing=True, offload_activations=away)
        backend.update(tiny.rows(), grpo, tiny.plan())
        states.append(tiny.state(backend))
    assert states[0] == states[1]


def test_weights_are_known_among_what_is_saved_for_the_backward_pass():
    saved, layers = [], torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        layers(torch.ones(2, 3, requires_grad=True))
    weights = {one.untyped_storage().data_ptr() for one in layers.parameters()}
    found = [is_weight(one) for one in saved]
    assert found == [one.untyped_storage().data_ptr() in weights for one in saved]
    assert any(found) and not all(found)


@pytest.mark.gpu
def test_a_gpu_computes_with_four_bits_and_8_bit_moments(tmp_path, grpo):
    """The GPU's four bits give the folder's weights again, the update is the one of whole weights, and activations of
    long rows leave it."""
    spec = spec_of(tmp_path, device="cuda")
    rows = tiny.rows(64, longest=60)
    found = [
        tiny.backend(dataclasses.replace(spec, quantize=which), autocast="none", moments="8bit")
        for which in ("nf4", None)
    ]
    for one, other in zip(*(one.logprobs(rows) for one in found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    metrics = [one.update(rows, grpo, tiny.plan()).metrics for one in found]
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-3)

    peaks = []
    for away in (False, True):
        one = tiny.backend(spec, gradient_checkpointing=True, offload_activations=away)
        torch.cuda.reset_peak_memory_stats()
        one.update(rows, grpo, tiny.plan())
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
