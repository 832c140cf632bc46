"""Training on images in several processes: what the one-process backend makes of them, adapters included."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.deepspeed.wire import image_bytes, pack, rows_in, unpack
from rftstream.config.sections import LoraSection
from rftstream.errors import BackendError, ConfigError
from tests.unit import tiny
from tests.unit.backends.test_images import make_rows
from tests.unit.backends.with_ranks import LR, make_backend, saved, torch_backend, values_agree

KL = Grpo(Grpo.Config(kl_coef=0.1, correction="none"))
MODEL = {"seed": 5, "vision": True, "context": 128}


@pytest.fixture(scope="module")
def rows(spec):
    return make_rows(spec)


def trained(backend, rows, folder):
    """Metrics of two batches, whose micro-batches do not all show images, and the files after them."""
    batches = [
        (rows, tiny.plan(lr=LR, tokens_per_microbatch=70)),
        (rows[3:], tiny.plan(lr=LR, tokens_per_microbatch=40)),
    ]
    logprobs = backend.logprobs(rows, 70) + backend.reference_logprobs(rows, 70)
    metrics = [backend.update(some, KL, plan).metrics for some, plan in batches]
    return logprobs, metrics, saved(backend, folder)


def agree(ours, theirs):
    values_agree(ours[0], theirs[0])
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
            torch_backend(adapted(spec, adapters), images=tiny.images(spec)),
            rows,
            tmp_path_factory.mktemp("expected") / "files",
        )
    )


def adapted(spec, adapters):
    if not adapters:
        return spec
    pytest.importorskip("peft")
    return dataclasses.replace(spec, lora=LoraSection(rank=4, alpha=8.0))


@pytest.fixture
def opened(open_kept):
    return lambda spec, **config: open_kept(make_backend(spec, images=tiny.images(spec), processes=2, **config))


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
    spec, rows, opened, expected, config, adapters, tmp_path
):  # fmt: skip
    """Though a rank has no image in some passes."""
    linear = torch.nn.functional.linear
    backend = opened(adapted(spec, adapters), **config)
    agree(trained(backend, rows, tmp_path / "found"), expected(adapters))
    backend.close()
    assert torch.nn.functional.linear is linear, "ZeRO 3 puts its own in its place"


@pytest.mark.slow
def test_ranks_whose_passes_have_their_gradients_in_another_order_are_noticed(spec, rows, opened, monkeypatch):
    """As they had when one of them alone had computed with ZeRO 3 before, which replaces `linear` in its process."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    backend = opened(spec, stage=2, packing=False)
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
