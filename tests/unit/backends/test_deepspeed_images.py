"""Training on images in several processes: what the one-process backend makes of them, adapters included."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed import backend as deepspeed_backend
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.deepspeed.wire import image_bytes, pack, rows_in, unpack
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config.sections import LoraSection
from rftstream.errors import BackendError, ConfigError
from tests.unit import tiny
from tests.unit.backends.kept_ranks import TIMEOUT_S
from tests.unit.backends.test_images import make_rows

KL = Grpo(Grpo.Config(kl_coef=0.1, correction="none"))
LR = 1e-3


MODEL = {"seed": 5, "vision": True, "context": 128}


@pytest.fixture(scope="module")
def rows(spec):
    return make_rows(spec)


def opened(cls, spec, **config):
    settings = cls.Config(**config)
    backend = cls(settings, model=spec, optimizer=OptimizerSettings(), seed=0, images=tiny.images(spec))
    backend.open()
    return backend


def trained(backend, rows, folder):
    """Metrics of two batches, whose micro-batches do not all show images, and the files after them."""
    batches = [
        (rows, tiny.plan(lr=LR, tokens_per_microbatch=70)),
        (rows[3:], tiny.plan(lr=LR, tokens_per_microbatch=40)),
    ]
    logprobs = backend.logprobs(rows, 70) + backend.reference_logprobs(rows, 70)
    metrics = [backend.update(some, KL, plan).metrics for some, plan in batches]
    folder.mkdir()
    backend.save(folder)
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("masters", "optimizer")}
    return logprobs, metrics, files


def agree(ours, theirs):
    for found, expected in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for found, expected in zip(ours[1], theirs[1], strict=True):
        for name in ("loss", "grad_norm", "kl", "num_tokens"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    for name, expected in theirs[2]["optimizer"].items():  # moments hold the gradients
        found = ours[2]["optimizer"][name]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max() + 1e-7, err_msg=name)
    for name, expected in theirs[2]["masters"].items():
        if name.endswith("k_proj.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam makes steps of the usual size
        np.testing.assert_allclose(ours[2]["masters"][name], expected, rtol=0, atol=0.06 * LR, err_msg=name)
    seen = [name for name in theirs[2]["optimizer"] if name.startswith("exp_avg/") and "vision_tower" in name]
    assert any(np.abs(ours[2]["optimizer"][name]).max() > 0 for name in seen)


@pytest.fixture(scope="module")
def expected(spec, rows, tmp_path_factory):
    """What the torch backend makes of a model, by whether it has adapters."""
    return functools.cache(
        lambda adapters: trained(
            opened(TorchBackend, adapted(spec, adapters)), rows, tmp_path_factory.mktemp("expected") / "files"
        )
    )


def adapted(spec, adapters):
    if not adapters:
        return spec
    pytest.importorskip("peft")
    return dataclasses.replace(spec, lora=LoraSection(rank=4, alpha=8.0))


@pytest.fixture
def opened_twice(kept, monkeypatch):
    """Opens a backend in the kept two processes, and closes it."""
    backends = []

    def make(spec, **config):
        with monkeypatch.context() as patch:
            patch.setattr(deepspeed_backend, "Ranks", lambda *args, **settings: kept())
            backends.append(opened(DeepSpeedBackend, spec, timeout_s=TIMEOUT_S, processes=2, **config))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("adapters", "config"), [
    (False, {"stage": 0}),
    (False, {"stage": 2, "packing": False}),
    (False, {"stage": 3, "gradient_checkpointing": True}),
    (True, {"stage": 2}),
    (True, {"stage": 3}),
])  # fmt: skip
def test_images_are_trained_on_as_the_torch_backend_does(
    spec, rows, opened_twice, expected, config, adapters, tmp_path
):  # fmt: skip
    """Though a rank has no image in some passes."""
    linear = torch.nn.functional.linear
    backend = opened_twice(adapted(spec, adapters), **config)
    agree(trained(backend, rows, tmp_path / "found"), expected(adapters))
    backend.close()
    assert torch.nn.functional.linear is linear, "ZeRO 3 puts its own in its place"


@pytest.mark.slow
def test_ranks_whose_passes_have_their_gradients_in_another_order_are_noticed(spec, rows, opened_twice, monkeypatch):
    """As they had when one of them alone had computed with ZeRO 3 before, which replaces `linear` in its process."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    backend = opened_twice(spec, stage=2, packing=False)
    with pytest.raises(BackendError, match=r"different orders.*set backends.deepspeed.stage to 0 or 3"):
        backend.update(rows, KL, tiny.plan(lr=LR, tokens_per_microbatch=70))


def test_rows_and_the_bytes_of_their_images_travel(spec, rows):
    media = unpack(pack(image_bytes(rows, tiny.images(spec))))
    assert media.keys() == {span.image.digest for row in rows for span in row.images}
    for row in rows:
        (again,) = rows_in(unpack(pack([row])))
        assert again.images == row.images
        np.testing.assert_array_equal(again.token_ids, row.token_ids)
    with pytest.raises(ConfigError, match="which the model is not shown"):
        image_bytes(rows, None)
