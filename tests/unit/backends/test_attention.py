"""The attention of packed rows: exact for each row by itself, whatever the dtype that it is asked in."""

from __future__ import annotations

import pytest
import torch

from rftstream.backends.torch.attention import SHORT, attend, row_lengths

HEADS, GROUPS, WIDTH = 4, 2, 16


def arrays(lengths, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, sum(lengths), WIDTH, generator=made).to(dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def by_definition(query, key, value, lengths, window=None):
    """float64 [1, P, H, D]."""
    query, key, value = (one.detach().double() for one in (query, key, value))
    key, value = (one.repeat_interleave(HEADS // GROUPS, dim=1) for one in (key, value))
    outputs, begin = [], 0
    for length in lengths:
        q, k, v = (one[:, :, begin : begin + length] for one in (query, key, value))
        places = torch.arange(length)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) & (distance < (window or length))
        scores = (q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
        begin += length
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5, 1, 9], [SHORT, SHORT + 1]])
def test_each_row_by_itself(lengths, window):
    given = arrays(lengths, torch.float32)
    output, _ = attend(None, *given, row_lengths(lengths), sliding_window=window)
    torch.testing.assert_close(output.double(), by_definition(*given, lengths, window), atol=1e-5, rtol=1e-5)


def test_short_rows_lose_nothing_to_bfloat16_on_the_way():
    """The output is rounded once, and gradients come back in the dtype of what they are of."""
    lengths = [7, 30]
    given = arrays(lengths, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attend(None, *given, row_lengths(lengths))
    assert output.dtype == torch.bfloat16
    exact = by_definition(*given, lengths)
    torch.testing.assert_close(output.double(), exact, atol=1e-6, rtol=2**-8)
    output.float().sum().backward()
    assert all(one.grad.dtype == torch.bfloat16 and one.grad.isfinite().all() for one in given)


def test_double_precision_stays_what_it_is():
    lengths = [4, 6]
    given = arrays(lengths, torch.float64)
    output, _ = attend(None, *given, row_lengths(lengths))
    torch.testing.assert_close(output, by_definition(*given, lengths), atol=1e-12, rtol=1e-12)
