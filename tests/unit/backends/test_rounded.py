"""The backend torch with parameters in bfloat16, which are rounded from float32 masters."""

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.torch.backend import TorchBackend, rounds_parameters
from rftstream.config.sections import LoraSection
from tests.unit import tiny


@pytest.fixture
def grpo():
    return Grpo(Grpo.Config())


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_parameters_in_bfloat16_are_rounded_from_float32_masters(spec, grpo, tmp_path, offload):
    """What is served equals what is computed with, bit for bit. Checkpoints go on under either setting, and a batch
    that is skipped in its second step leaves everything as it was."""
    spec = dataclasses.replace(spec, dtype="bfloat16")
    backend = tiny.backend(spec, parameters="bfloat16", offload_optimizer=offload)
    began = {name: one.clone() for name, one in backend._masters.masters.items()}
    metrics = backend.update(tiny.rows(), grpo, tiny.plan(minibatches=2)).metrics
    plain = tiny.backend(spec).update(tiny.rows(), grpo, tiny.plan(minibatches=2)).metrics
    assert metrics["loss"] == pytest.approx(plain["loss"], abs=0.02)
    parameters, masters = dict(backend._network.model.named_parameters()), backend._masters.masters
    assert {one.dtype for one in parameters.values()} == {torch.bfloat16}
    assert {one.dtype for one in masters.values()} == {torch.float32}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in masters.values()), "masters are not rounded"
    assert all(not torch.equal(one, began[name]) for name, one in masters.items())
    assert all(one.grad is None for one in (*parameters.values(), *masters.values()))
    for name, tensor in backend.served_tensors().items():
        assert tensor.dtype == "BF16"
        assert bytes(tensor.data) == parameters[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    saved = tiny.whole_state(backend, tmp_path / "saved")
    bad = [dataclasses.replace(row, advantages=np.full_like(row.advantages, np.nan)) for row in tiny.rows()]
    assert backend.update(bad, grpo, tiny.plan(minibatches=2)).skipped
    for number, settings in enumerate([{}, {"parameters": "bfloat16"}]):
        other = tiny.backend(spec, **settings)
        other.load(tmp_path / "saved")
        assert tiny.whole_state(other, tmp_path / str(number)) == saved
    for found, here in zip(other.logprobs(tiny.rows()), backend.logprobs(tiny.rows()), strict=True):
        np.testing.assert_array_equal(found, here)


@pytest.mark.slow
def test_gradients_of_rounded_parameters_are_added_up_in_float32(spec, grpo):
    """Of many micro-batches as of one, where sums in bfloat16 would lose most digits."""
    norms = []
    for tokens in (14, 16384):
        backend = tiny.backend(spec, parameters="bfloat16")
        metrics = backend.update(tiny.rows(48), grpo, tiny.plan(tokens_per_microbatch=tokens)).metrics
        norms.append((metrics["microbatches"], metrics["grad_norm"]))
    assert norms[0][0] > 20 > norms[1][0]
    assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-2)


def test_gradients_of_frequent_tokens_are_added_up_in_float32(spec, grpo):
    """A token that stands at hundreds of places of one micro-batch has the gradient that it has in float32."""

    def often(token_ids):
        return np.where(np.arange(len(token_ids)) % 2, token_ids, 5).astype(np.int32)

    rows = [dataclasses.replace(row, token_ids=often(row.token_ids)) for row in tiny.rows(400, longest=16)]
    found = []
    for which in ("float32", "bfloat16"):
        backend = tiny.backend(spec, parameters=which, autocast="bfloat16")
        backend.update(rows, grpo, tiny.plan(max_grad_norm=0.0))
        moments = dict(backend._masters.moments())
        found.append(moments["exp_avg/model.embed_tokens.weight"][5])  # a tenth of the first gradient
    assert (found[1] - found[0]).norm() / found[0].norm() < 0.03


@pytest.mark.parametrize(("wished", "device", "autocast", "rounded"), [
    ("auto", "cpu", "auto", False), ("auto", "cuda", "auto", True), ("auto", "cuda", "none", False),
    ("auto", "cpu", "bfloat16", True), ("float32", "cuda", "auto", False), ("bfloat16", "cpu", "none", True),
])  # fmt: skip
def test_where_parameters_are_rounded(spec, wished, device, autocast, rounded):
    config = TorchBackend.Config(parameters=wished, autocast=autocast)
    assert rounds_parameters(config, spec, device) is rounded
    assert not rounds_parameters(config, dataclasses.replace(spec, lora=LoraSection()), device)


def test_a_reference_is_rounded_as_the_policy_that_begins_as_its_equal(spec):
    backend = tiny.backend(spec, parameters="bfloat16")
    for one, other in zip(backend.logprobs(tiny.rows()), backend.reference_logprobs(tiny.rows(), 16384), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_parameter_costs(spec, grpo):
    """Bytes of its weight, its master and its moments between two steps; in float32 the weight is the master."""
    found = {}
    for which in ("float32", "bfloat16"):
        backend = tiny.backend(spec, parameters=which)
        backend.update(tiny.rows(), grpo, tiny.plan())
        parameters = list(backend._network.model.parameters())
        own = {one.data_ptr(): one.nbytes for one in (*parameters, *backend._masters.masters.values())}
        moments = sum(one.nbytes for name, one in backend._masters.moments() if not name.startswith("step/"))
        number = sum(one.numel() for one in parameters)
        found[which] = (sum(own.values()) / number, moments / number)
    assert found == {"float32": (4, 8), "bfloat16": (6, 8)}


@pytest.mark.gpu
def test_a_gpu_computes_with_bfloat16_and_goes_on_from_a_cpu(spec, grpo, tmp_path):
    """The default there; loss and norm within 3 % of float32 on the same device."""
    spec = dataclasses.replace(spec, device="cuda", dtype="bfloat16")
    rounded, plain = tiny.backend(spec), tiny.backend(spec, parameters="float32", autocast="none")
    assert {one.dtype for one in rounded._network.model.parameters()} == {torch.bfloat16}
    found = [one.update(tiny.rows(), grpo, tiny.plan()).metrics for one in (rounded, plain)]
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=0.03, abs=3e-3)
    saved = tiny.whole_state(rounded, tmp_path / "saved")
    rounded.load(tmp_path / "saved")
    assert tiny.whole_state(rounded, tmp_path / "again") == saved
