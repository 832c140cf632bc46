"""Products in narrow types by way of float32: they are those of float32, rounded once."""

import pytest
import torch

from rftstream.policies.hf import linear
from tests.suite.each import each


@pytest.mark.slow
@each("dtype", [torch.bfloat16, torch.float16])
@each("rows", [1, 3, 4, 37])
@each("has_bias", [False, True])
def test_a_widened_layer_rounds_once(dtype, rows, has_bias):
    random = torch.Generator().manual_seed(rows)
    layer = torch.nn.Linear(520, 2 * linear.PIECE // 520 + 7, bias=has_bias)  # two pieces and some
    layer.weight.data = torch.randn(layer.weight.shape, generator=random) / 520**0.5
    layer.to(dtype)
    inputs = torch.randn(2, rows, 520, generator=random).to(dtype)
    exact = torch.nn.functional.linear(
        inputs.double(), layer.weight.double(), layer.bias.double() if has_bias else None
    )
    linear.widen(torch.nn.Sequential(layer))
    with torch.inference_mode():
        found = layer(inputs)
        alone = linear.product(inputs, layer.weight, layer.bias)
    assert found.dtype == alone.dtype == dtype and found.shape == exact.shape
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(alone.double(), exact, rtol=1.01 * half_a_step, atol=2e-6)
    torch.testing.assert_close(found.double(), exact, rtol=2 * half_a_step, atol=2e-2 if rows == 1 else 2e-6)


def test_new_weights_of_a_widened_layer_are_used():
    layer = torch.nn.Linear(8, 5).bfloat16()
    linear.widen(torch.nn.Sequential(layer))
    inputs = torch.ones(6, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(2)
        layer.bias.fill_(1)
        assert layer(inputs).tolist() == [[17.0] * 5] * 6


def test_float32_needs_nothing():
    assert not linear.lacks(torch.float32)
