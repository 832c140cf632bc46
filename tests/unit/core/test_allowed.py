import numpy as np
import pytest
import torch

from rftstream.core import logprobs
from rftstream.core.allowed import encode_listed, encode_sets, read_sets
from rftstream.core.logprobs import token_logprobs
from tests.suite.each import each


def masks(vocabulary, shares, seed=0):
    generator = torch.Generator().manual_seed(seed)
    allowed_NV = torch.rand(len(shares), vocabulary, generator=generator) < torch.tensor(shares)[:, None]
    token_ids_N = torch.randint(vocabulary, (len(shares),), generator=generator)
    allowed_NV[torch.arange(len(shares)), token_ids_N] = True
    return allowed_NV, token_ids_N


@each(
    ("ids", "written"),
    [
        ({5, 6, 9}, [5, 2, 2, 1]),
        ({299}, [0xAB, 0x02]),
        (set(range(300)) - {299}, [0, 0xAB, 0x02]),
        (set(range(300)), []),
        (set(range(0, 300, 2)), [0x55] * 37 + [0x05]),
    ],
)
def test_bytes_by_hand(ids, written):
    allowed_1V = torch.zeros(1, 300, dtype=torch.bool)
    allowed_1V[0, list(ids)] = True
    assert list(encode_sets(allowed_1V)[0]) == written


@each("vocabulary", [1, 8, 17, 130, 50_000])
def test_sets_come_back_as_they_were(vocabulary):
    allowed_NV, token_ids_N = masks(vocabulary, [0.0, 1e-3, 0.03, 0.5, 0.97, 1.0, 1.0, 0.0])
    written = encode_sets(allowed_NV)
    assert max(map(len, written)) <= -(-vocabulary // 8)
    rows_L, ids_L = allowed_NV.nonzero().flip(0).numpy().T
    assert encode_listed(rows_L, ids_L, len(allowed_NV), vocabulary) == written
    sets = read_sets(written, token_ids_N.numpy(), vocabulary)
    if vocabulary == 1:  # nothing was left out
        assert sets is None
        return
    for rows in (slice(0, 8), slice(3, 5)):
        forbidden_kV = sets.forbidden(rows, allowed_NV[rows].shape, torch.device("cpu"))
        assert torch.equal(~forbidden_kV, allowed_NV[rows])
    assert sets.forbidden(slice(5, 7), allowed_NV[5:7].shape, torch.device("cpu")) is None
    outside_N = token_ids_N.clone()
    outside_N[0] = (token_ids_N[0] + 1) % vocabulary
    with pytest.raises(ValueError, match=rf"got token {outside_N[0]} outside of the set that it was sampled from"):
        read_sets(written, outside_N.numpy(), vocabulary)


def test_odd_sets_are_refused():
    with pytest.raises(ValueError, match="one without any token"):
        encode_sets(torch.tensor([[True, False], [False, False]]))
    with pytest.raises(ValueError, match=r"the id 16, expected ids below 12"):
        read_sets([bytes([16])], np.zeros(1, np.int64), 12)


def plain(hidden_ND, weight_VD, bias_V, token_ids_N, temperatures_N, allowed_NV):
    """As it is written in books, all logits at once."""
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias_V) / temperatures_N[:, None]
    log_NV = logits_NV.masked_fill(~allowed_NV, -torch.inf).log_softmax(dim=-1)
    summed_NV = torch.where(allowed_NV, log_NV.exp() * log_NV.masked_fill(~allowed_NV, 0.0), 0.0)
    return log_NV.gather(1, token_ids_N[:, None])[:, 0], -summed_NV.sum(dim=-1)


@pytest.mark.parametrize(("chunk_tokens", "block_bytes"), [(1000, 1 << 20), (3, 1 << 20), (4, 90)])
def test_logprobs_and_gradients_over_sets_are_those_of_a_masked_softmax(chunk_tokens, block_bytes, monkeypatch):
    monkeypatch.setitem(logprobs.BLOCK_BYTES, "cpu", block_bytes)
    allowed_NV, token_ids_N = masks(11, [0.0, 0.2, 0.5, 1.0, 0.9, 0.2, 1.0, 1.0])
    sets = read_sets(encode_sets(allowed_NV), token_ids_N.numpy(), 11)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((8, 4), (11, 4), (11,))]
    temperatures_N, weights_2N = torch.linspace(0.5, 2.0, 8).double(), torch.randn(2, 8, generator=generator).double()
    results = []
    for is_ours in (True, False):
        hidden_ND, weight_VD, bias_V = inputs = [one.clone().requires_grad_() for one in given]
        if is_ours:
            found = token_logprobs(
                hidden_ND, weight_VD, token_ids_N, temperatures_N, bias_V=bias_V, allowed=sets,
                chunk_tokens=chunk_tokens, entropy_gradient=True,
            )  # fmt: skip
        else:
            found = plain(hidden_ND, weight_VD, bias_V, token_ids_N, temperatures_N, allowed_NV)
        (torch.stack(found) * weights_2N).sum().backward()
        results.append([*found, *(one.grad for one in inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
