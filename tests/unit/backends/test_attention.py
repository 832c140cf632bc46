"""The attention of packed rows: exact for each row by itself, whatever the dtype that it is asked in."""

import itertools
from dataclasses import replace

import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.torch import attention
from rftstream.backends.torch.attention import SHORT, attend, has_varlen_kernel, run_lengths
from rftstream.core.packing import path_to
from tests.suite.each import each
from tests.unit import tiny

HEADS, GROUPS, WIDTH = 4, 2, 16


def arrays(lengths, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, sum(lengths), WIDTH, generator=made).to(dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def by_definition(query, key, value, lengths, window=None, *, seen_lengths=None):
    """float64 [1, P, H, D]. `seen_lengths`: keys of each row, the last of which are its own tokens."""
    query, key, value = (one.double() for one in (query, key, value))
    key, value = (one.repeat_interleave(HEADS // GROUPS, dim=1) for one in (key, value))
    outputs, begin, seen_begin = [], 0, 0
    for length, seen_length in zip(lengths, seen_lengths or lengths, strict=True):
        q = query[:, :, begin : begin + length]
        k, v = (one[:, :, seen_begin : seen_begin + seen_length] for one in (key, value))
        places = torch.arange(seen_length)
        distance = places[-length:, None] - places[None]
        seen = (distance >= 0) & (distance < (window or seen_length))
        scores = (q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
        begin, seen_begin = begin + length, seen_begin + seen_length
    return torch.cat(outputs, dim=2).transpose(1, 2)


def tree_by_definition(query, key, value, lengths, parents, window=None):
    """The same for runs that go on from others."""
    begins = [0, *itertools.accumulate(lengths)]
    places = [
        torch.cat([torch.arange(begins[one], begins[one + 1]) for one in path_to(run, parents)])
        for run in range(len(lengths))
    ]
    key, value = (one[:, :, torch.cat(places)] for one in (key, value))
    return by_definition(query, key, value, lengths, window, seen_lengths=list(map(len, places)))


@each("window", [None, 3])
@each("lengths", [[5, 1, 9], [SHORT, SHORT + 1]])
def test_each_row_by_itself(lengths, window):
    given = arrays(lengths, torch.float32)
    output, _ = attend(None, *given, run_lengths(lengths), sliding_window=window)
    torch.testing.assert_close(output.double(), by_definition(*given, lengths, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_for_each_length_gives_the_bits_of_a_call_for_each_row(monkeypatch, dtype, window):
    """So a batch that was recorded before trains the same weights again."""
    lengths = [5, 7, 1, 5, 6, 5, 7, 7, 5, 6, 6, 5, 1, 7, 5, 6]
    found = []
    calls = count_calls(monkeypatch)
    for attend_all in (attention.attend_by_run, attention.attend):
        given, calls[0] = arrays(lengths, dtype), 0
        if attend_all is attention.attend:
            output, _ = attend_all(None, *given, run_lengths(lengths), sliding_window=window)
        else:
            rows = tuple(lengths), (attention.ROOT,) * len(lengths)
            output = attend_all(*given, *rows, sliding_window=window)
        output.float().square().sum().backward()
        found.append(([output, *(one.grad for one in given)], calls[0]))
    (by_row, num_rows), (by_length, num_lengths) = found
    assert (num_rows, num_lengths) == (len(lengths), len(set(lengths)))
    assert all(map(torch.equal, by_row, by_length))


TREE = [5, 3, 2, 7, 4, 3], [-1, 0, 1, 0, -1, 4]
SMALL_TREE = [3, *[2] * 9, *[1] * 9], [-1, *[0] * 9, *range(1, 10)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tree", [TREE, SMALL_TREE], ids=["a call for each run", "a call for each length"])
def test_a_run_sees_its_path_and_itself(monkeypatch, tree, window):
    """Forward, and backward to each token that is seen."""
    monkeypatch.setattr(attention, "PIECE", 3)
    given = arrays(tree[0], torch.float64)
    calls = count_calls(monkeypatch)
    output, _ = attend(None, *given, run_lengths(*tree), sliding_window=window)
    assert calls[0] == (3 if tree is SMALL_TREE else 6 + 3), "a run of 7 takes three pieces"
    torch.testing.assert_close(output, tree_by_definition(*given, *tree, window), atol=1e-12, rtol=1e-12)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    (output * weights).sum().backward()
    found = [one.grad for one in given]
    again = [one.detach().requires_grad_() for one in given]
    (tree_by_definition(*again, *tree, window) * weights).sum().backward()
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other.grad, atol=1e-12, rtol=1e-12)


def test_large_rows_are_not_copied_together(monkeypatch):
    calls, lengths = count_calls(monkeypatch), [attention.SMALL // (HEADS * WIDTH) + 1] * 8
    attend(None, *arrays(lengths, torch.float32), run_lengths(lengths))
    assert calls[0] == len(lengths)


def count_calls(monkeypatch):
    """Number of calls of the attention of rows, counted in a list of one."""
    attend_row, calls = attention._attend_run, [0]

    def counted(*arguments, **settings):
        calls[0] += 1
        return attend_row(*arguments, **settings)

    monkeypatch.setattr(attention, "_attend_run", counted)
    return calls


def test_short_rows_lose_nothing_to_bfloat16_on_the_way():
    """The output is rounded once, and gradients come back in the dtype of what they are of."""
    lengths = [7, 30]
    given = arrays(lengths, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attend(None, *given, run_lengths(lengths))
    assert output.dtype == torch.bfloat16
    exact = by_definition(*given, lengths)
    torch.testing.assert_close(output.double(), exact, atol=1e-6, rtol=2**-8)
    output.float().sum().backward()
    assert all(one.grad.dtype == torch.bfloat16 and one.grad.isfinite().all() for one in given)


def test_double_precision_stays_what_it_is():
    lengths = [4, 6]
    given = arrays(lengths, torch.float64)
    output, _ = attend(None, *given, run_lengths(lengths))
    torch.testing.assert_close(output, by_definition(*given, lengths), atol=1e-12, rtol=1e-12)


# ---------------------------------------------------------------------------- one kernel for all rows


def kernel_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch documents of `varlen_attn`, by definition. [P, H, D]; a window is of tokens before and after."""
    assert enable_gqa
    before, after = window_size
    lengths, seen_lengths = (one.diff().tolist() for one in (cu_seq_q, cu_seq_k))
    assert (max_q, max_k, after) == (max(lengths), max(seen_lengths), 0)
    window = None if before == -1 else before + 1
    given = (one.transpose(0, 1)[None] * factor for one, factor in
             ((query, scale * WIDTH**0.5), (key, 1.0), (value, 1.0)))  # fmt: skip
    return by_definition(*given, lengths, window, seen_lengths=seen_lengths)[0].to(query.dtype)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_kernel_is_given_all_rows_at_once(monkeypatch, window):
    """In the form that the loop over rows gives back."""
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_stand_in)
    lengths = [5, 1, 9]
    given = arrays(lengths, torch.float32)
    output, _ = attend(None, *given, run_lengths(lengths), scaling=0.3, sliding_window=window)
    monkeypatch.undo()
    alone, _ = attend(None, *given, run_lengths(lengths), scaling=0.3, sliding_window=window)
    assert output.shape == alone.shape
    torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("aligns_starts", [False, True])
def test_a_kernel_that_takes_the_first_keys_for_those_of_the_queries_is_not_used_for_trees(monkeypatch, aligns_starts):
    """The one of torch lets the last query see the last key."""
    calls = []

    def kernel(*arguments, **settings):
        calls.append(arguments)
        return kernel_stand_in(*arguments, **settings)

    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: True)
    monkeypatch.setattr(attention, "_aligns_starts", lambda device: aligns_starts)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    given = arrays(TREE[0], torch.float32)
    output, _ = attend(None, *given, run_lengths(*TREE), scaling=WIDTH**-0.5, sliding_window=4)
    torch.testing.assert_close(output.double(), tree_by_definition(*given, *TREE, 4), atol=1e-5, rtol=1e-5)
    assert bool(calls) is not aligns_starts


def test_a_cpu_has_no_such_kernel():
    query, _, value = arrays([3], torch.bfloat16)
    assert not has_varlen_kernel(query, value)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [[22] * 32, [1, 511, 64, 130, 22]])
def test_the_kernel_gives_what_the_loop_gives(monkeypatch, lengths, window):
    """Forward and backward, on the same device, within 1/128 of the largest value: both round to bfloat16. The output
    is also compared with the definition in float64."""
    outputs, gradients = [], []
    exact = by_definition(*arrays(lengths, torch.bfloat16), lengths, window)
    for kernel in (True, False):
        given = [one.detach().cuda().requires_grad_() for one in arrays(lengths, torch.bfloat16)]
        assert has_varlen_kernel(given[0], given[2])
        if not kernel:
            monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: False)
        output, _ = attend(None, *given, run_lengths(lengths), sliding_window=window)
        weights = torch.linspace(-1, 1, output.numel(), device="cuda").reshape(output.shape)
        (output.float() * weights).sum().backward()
        outputs.append(output.detach().cpu())
        gradients.append([one.grad.cpu() for one in given])
    assert outputs[0].dtype == torch.bfloat16
    for one in outputs:
        torch.testing.assert_close(one.double(), exact, atol=2**-7, rtol=2**-7)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2**-7 * float(other.abs().max()), rtol=2**-7)


@pytest.mark.gpu
def test_under_autocast_the_kernel_takes_float32_too():
    lengths = [30, 7, 64]
    given = [one.detach().cuda().requires_grad_() for one in arrays(lengths, torch.float32)]
    assert not has_varlen_kernel(given[0], given[2])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert has_varlen_kernel(given[0], given[2])
        output, _ = attend(None, *given, run_lengths(lengths))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(one.grad.dtype == torch.float32 and one.grad.isfinite().all() for one in given)
    torch.testing.assert_close(output.cpu().double(), by_definition(*arrays(lengths, torch.float32), lengths),
                               atol=2**-6, rtol=2**-6)  # fmt: skip


@pytest.mark.gpu
def test_packed_rows_learn_on_a_gpu_what_padded_rows_learn(tmp_path):
    """Through the backend, in bfloat16: the same loss and norm of gradients, within 3 %."""
    spec = replace(tiny.make(tmp_path, dtype="bfloat16"), device="cuda")
    grpo, found = Grpo(Grpo.Config(correction="none")), []
    for packing in (True, False):
        backend = tiny.backend(spec, packing=packing)
        found.append(backend.update(tiny.rows(24), grpo, tiny.plan()).metrics)
        backend.close()
    for name in ("loss", "grad_norm", "entropy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=3e-2, abs=3e-3)
