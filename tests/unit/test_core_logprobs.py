from __future__ import annotations

import math

import pytest
import torch

from rftstream.core.logprobs import chunked_token_logprobs, token_logprobs


def test_numbers_by_hand():
    logits_NV = torch.tensor([[0.0, math.log(3.0)], [2 * math.log(3.0), 0.0]], dtype=torch.float64)
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([1, 0]), torch.tensor([1.0, 2.0]))
    assert logprobs_N.tolist() == pytest.approx([math.log(0.75)] * 2)
    assert entropy_N.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25)] * 2)


def test_impossible_tokens_leave_the_entropy_finite():
    logprobs_N, entropy_N = token_logprobs(torch.tensor([[0.0, -math.inf]]), torch.tensor([0]), torch.tensor([1.0]))
    assert (logprobs_N.tolist(), entropy_N.tolist()) == ([0.0], [0.0])


def test_half_precision_logits_are_taken_to_float32():
    logits_NV = torch.randn(4, 9).bfloat16()
    logprobs_N, _ = token_logprobs(logits_NV, torch.arange(4), torch.ones(4))
    assert logprobs_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N, logits_NV.float().log_softmax(-1)[torch.arange(4), torch.arange(4)])


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    temperatures_N = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, torch.tensor([0, 4, 2]), temperatures_N), logits_NV)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_chunks_change_nothing(chunk_tokens, entropy_gradient):
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    weight_VD = torch.randn(11, 4, dtype=torch.float64, generator=generator)
    token_ids_N, temperatures_N = torch.arange(7), torch.linspace(0.5, 2, 7, dtype=torch.float64)
    results = []
    for chunk in (100, chunk_tokens):
        leaf_ND, leaf_VD = hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        logprobs_N, entropy_N = chunked_token_logprobs(
            leaf_ND, lambda hidden, leaf=leaf_VD: hidden @ leaf.T, token_ids_N, temperatures_N, chunk_tokens=chunk,
            entropy_gradient=entropy_gradient,
        )  # fmt: skip
        assert entropy_N.requires_grad is entropy_gradient
        (logprobs_N.square().sum() + (entropy_N.sum() if entropy_gradient else 0)).backward()
        results.append((logprobs_N.detach(), entropy_N.detach(), leaf_ND.grad, leaf_VD.grad))
    torch.testing.assert_close(results[0], results[1])


def test_odd_shapes_are_refused():
    with pytest.raises(ValueError, match="token_logprobs"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    with pytest.raises(TypeError, match="int64"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), torch.ones(2))
    with pytest.raises(ValueError, match="chunked"):
        chunked_token_logprobs(torch.zeros(2, 3), lambda x: x, torch.zeros(3, dtype=torch.int64), torch.ones(3),
                               chunk_tokens=4)  # fmt: skip
