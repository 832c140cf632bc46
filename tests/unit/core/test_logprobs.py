import math

import pytest
import torch

from rftstream.core import logprobs
from rftstream.core.logprobs import token_logprobs
from tests.suite.each import each

ANY = 1000


def plain(hidden_ND, weight_VD, token_ids_N, temperatures_N=None, bias_V=None):
    """As it is written in books, all logits at once."""
    logits_NV = hidden_ND if weight_VD is None else torch.nn.functional.linear(hidden_ND, weight_VD, bias_V)
    scaled_NV = logits_NV if temperatures_N is None else logits_NV / temperatures_N[:, None]
    log_NV = scaled_NV.log_softmax(dim=-1)
    return log_NV.gather(1, token_ids_N[:, None])[:, 0], -(log_NV.exp() * log_NV).sum(dim=-1)


def arrays(num=7, width=4, vocabulary=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    token_ids_N = torch.randint(vocabulary, (num,), generator=generator)
    return normal(num, width), normal(vocabulary, width), normal(vocabulary), token_ids_N


def test_numbers_by_hand():
    logits_NV = torch.tensor([[0.0, math.log(3.0)], [2 * math.log(3.0), 0.0]], dtype=torch.float64)
    temperatures_N = torch.tensor([1.0, 2.0])
    logprobs_N, entropy_N = token_logprobs(logits_NV, None, torch.tensor([1, 0]), temperatures_N, chunk_tokens=ANY)
    assert logprobs_N.tolist() == pytest.approx([math.log(0.75)] * 2)
    assert entropy_N.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25)] * 2)


def test_impossible_tokens_leave_entropy_and_gradients_finite():
    logits_NV = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    found = token_logprobs(logits_NV, None, torch.tensor([0]), chunk_tokens=ANY, entropy_gradient=True)
    assert [one.tolist() for one in found] == [[0.0], [0.0]]
    (found[0] + found[1]).sum().backward()
    assert logits_NV.grad.tolist() == [[0.0, 0.0]]
    assert token_logprobs(logits_NV, None, torch.tensor([1]), chunk_tokens=ANY)[0].tolist() == [-math.inf]


def test_a_nan_is_not_hidden():
    found = token_logprobs(torch.tensor([[0.0, math.nan]]), None, torch.tensor([0]), chunk_tokens=ANY)
    assert all(math.isnan(one.item()) for one in found)


def test_half_precision_logits_are_taken_to_float32():
    logits_NV = torch.randn(4, 9).bfloat16()
    logprobs_N, _ = token_logprobs(logits_NV, None, torch.arange(4), chunk_tokens=3)
    assert logprobs_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N, logits_NV.float().log_softmax(-1)[torch.arange(4), torch.arange(4)])


def test_a_head_in_half_precision_gives_gradients_of_full_precision():
    hidden_ND, weight_VD, bias_V, token_ids_N = arrays(dtype=torch.float32)
    found = token_logprobs(hidden_ND, weight_VD, token_ids_N, bias_V=bias_V, chunk_tokens=3, dtype=torch.bfloat16)
    leaves = (hidden_ND, weight_VD, bias_V)
    gradients = torch.autograd.grad(found[0].sum(), leaves)
    assert [one.dtype for one in gradients] == [torch.float32] * 3
    expected = torch.autograd.grad(plain(hidden_ND, weight_VD, token_ids_N, None, bias_V)[0].sum(), leaves)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@each("chunk_tokens", [2, 3])
@each("tempered", [True, False])
def test_gradients(chunk_tokens, tempered):
    hidden_ND, weight_VD, bias_V, token_ids_N = arrays(num=5, width=3, vocabulary=6)
    temperatures_N = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.7], dtype=torch.float64) if tempered else None

    def both(hidden_ND, weight_VD, bias_V):
        return token_logprobs(hidden_ND, weight_VD, token_ids_N, temperatures_N, bias_V=bias_V,
                              chunk_tokens=chunk_tokens, entropy_gradient=True)  # fmt: skip

    assert torch.autograd.gradcheck(both, (hidden_ND, weight_VD, bias_V))
    assert torch.autograd.gradcheck(lambda *some: both(*some)[0], (hidden_ND, weight_VD, bias_V))
    assert torch.autograd.gradcheck(lambda *some: both(*some)[1], (hidden_ND, weight_VD, bias_V))


def test_gradients_of_logits():
    _, logits_NV, _, _ = arrays(num=1, width=5, vocabulary=3)
    temperatures_N = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def both(logits_NV):
        return token_logprobs(logits_NV, None, torch.tensor([0, 4, 2]), temperatures_N, chunk_tokens=2,
                              entropy_gradient=True)  # fmt: skip

    assert torch.autograd.gradcheck(both, logits_NV)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, ANY])
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_chunks_and_blocks_change_nothing(chunk_tokens, block_bytes, monkeypatch):
    monkeypatch.setitem(logprobs.BLOCK_BYTES, "cpu", block_bytes)
    hidden_ND, weight_VD, bias_V, token_ids_N = arrays()
    temperatures_N = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    expected = plain(hidden_ND, weight_VD, token_ids_N, temperatures_N, bias_V)
    leaves = (hidden_ND, weight_VD, bias_V)
    for weight in (0.0, 0.3):
        found = token_logprobs(hidden_ND, weight_VD, token_ids_N, temperatures_N, bias_V=bias_V,
                               chunk_tokens=chunk_tokens, entropy_gradient=weight > 0)  # fmt: skip
        torch.testing.assert_close(found, expected)
        assert found[1].requires_grad is (weight > 0)
        losses = [one[0].square().sum() + weight * one[1].sum() for one in (found, expected)]
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses)
        torch.testing.assert_close(first, second)
        again = torch.autograd.grad(losses[0], leaves)  # what was kept of the first pass is used up by then
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    leaves = list(arrays()[:2])
    leaves[frozen] = leaves[frozen].detach()
    found, _ = token_logprobs(*leaves, arrays()[3], chunk_tokens=3)
    found.sum().backward()
    expected = arrays()[:2]
    plain(*expected, arrays()[3])[0].sum().backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, expected[1 - frozen].grad)


def test_no_tokens():
    hidden_ND, weight_VD, _, _ = arrays()
    found = token_logprobs(hidden_ND[:0], weight_VD, torch.zeros(0, dtype=torch.int64), chunk_tokens=3)
    assert [one.shape for one in found] == [(0,), (0,)]
    found[0].sum().backward()


def test_odd_shapes_are_refused():
    tokens_N = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="token_logprobs"):
        token_logprobs(torch.zeros(2, 3), None, torch.zeros(3, dtype=torch.int64), chunk_tokens=4)
    with pytest.raises(ValueError, match="temperatures"):
        token_logprobs(torch.zeros(2, 3), None, tokens_N, torch.ones(3), chunk_tokens=4)
    with pytest.raises(ValueError, match="chunks"):
        token_logprobs(torch.zeros(2, 3), None, tokens_N, chunk_tokens=0)
    with pytest.raises(TypeError, match="int64"):
        token_logprobs(torch.zeros(2, 3), None, tokens_N.int(), chunk_tokens=4)
