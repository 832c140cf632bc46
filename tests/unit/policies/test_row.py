"""A few rows are decoded by row.c as by the modules of the model, up to the order of sums."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rftstream.errors import WeightsError
from rftstream.policies.hf import attention, row
from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.packed import PackedRows
from rftstream.policies.hf.row import RowDecoder
from rftstream.weights.deltas import kernels
from tests.suite.each import each
from tests.unit import tiny

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 37,
    "num_hidden_layers": 3, "pad_token_id": 0,
}  # fmt: skip
TOLERANCE = 0.1
"""Of logits, keys and values between -4 and 4, which bfloat16 has in steps of up to 0.03; three layers add up."""


def made(kind=LlamaForCausalLM, config=LlamaConfig, dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **settings}, attn_implementation=attention.register()[0])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.data.uniform_(0.5, 1.5)
    return model.to(dtype)


def columns(model, length=70):
    """A cache with four rows of so many columns in its four slots."""
    torch.manual_seed(1)
    layers, groups = model.config.num_hidden_layers, model.config.num_key_value_heads
    states = [tuple(torch.randn(4, groups, length, 16).bfloat16() for _ in range(2)) for _ in range(layers)]
    cache = SlotCache(4)
    assert cache.put(states, range(4), [length] * 4) == [0, 1, 2, 3]
    return cache


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "config", "settings"), [
    (LlamaForCausalLM, LlamaConfig, {}),
    (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 40}),
    (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    (MistralForCausalLM, MistralConfig, {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 16}),
    (Qwen2ForCausalLM, Qwen2Config, {}),
])  # fmt: skip
@torch.inference_mode()
def test_logits_keys_and_values_are_those_of_the_modules(kind, config, settings):
    model = made(kind, config, **settings)
    decoder = RowDecoder.of(model, threads=1)
    assert decoder is not None
    mine, theirs = columns(model), columns(model)
    lengths_S = np.asarray([70, 61, 0, 3])
    for slots in ([1], [2, 0], [3, 1, 0], [0, 3, 2, 1], [1]):
        rows = rows_of(slots, lengths_S)
        for cache in (mine, theirs):
            cache.write(rows.slots_N, rows.positions_N)
        token_ids_N = np.arange(5, 5 + len(slots))
        expected_NV = model(
            input_ids=torch.from_numpy(token_ids_N)[None], position_ids=torch.from_numpy(rows.positions_N)[None],
            attention_mask=rows, past_key_values=theirs.for_model, use_cache=True,
        ).logits[0]  # fmt: skip
        found_BV = decoder.logits(token_ids_N, rows.positions_N, rows, mine.for_model)
        assert found_BV.dtype == torch.bfloat16 and expected_NV.float().std() > 0.3
        torch.testing.assert_close(found_BV, expected_NV[rows.last_B], atol=TOLERANCE, rtol=0.01)
        lengths_S[slots] += 1
        for slot, length in enumerate(lengths_S.tolist()):
            for ours, others in zip(mine.row(slot, length), theirs.row(slot, length), strict=True):
                for states, their_states in zip(ours, others, strict=True):
                    torch.testing.assert_close(states, their_states, atol=TOLERANCE, rtol=0.01)


def rows_of(slots, lengths_S):
    """The next token of the rows in these slots."""
    return PackedRows(np.asarray(slots), lengths_S[slots], np.ones(len(slots), np.int64), torch.device("cpu"))


def next_of_one(model):
    """A cache, and the next token of the row in its slot 1."""
    cache, rows = columns(model), rows_of([1], np.asarray([0, 70]))
    cache.write(rows.slots_N, rows.positions_N)
    return cache.for_model, (np.asarray([1]), rows.positions_N, rows)


@torch.inference_mode()
def test_values_that_are_not_numbers_reach_the_logits():
    model = made()
    cache, given = next_of_one(model)
    cache.layers[1].rooms[0][1, 0, 3] = torch.nan
    assert RowDecoder(model).logits(*given, cache).isnan().any()


@torch.inference_mode()
def test_new_weights_are_used():
    model = made()
    decoder = RowDecoder(model)
    logits = []
    for _ in range(2):
        cache, given = next_of_one(model)
        logits.append(decoder.logits(*given, cache))
        model.lm_head.weight.copy_(-model.lm_head.weight)
    assert torch.equal(logits[0], -logits[1])


@each(("kind", "config", "settings"), [
    (LlamaForCausalLM, LlamaConfig, {"dtype": torch.float32}),
    (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu"}),
    (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 8}),
    (MistralForCausalLM, MistralConfig, {"sliding_window": 8, "head_dim": 16}),
    (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
])  # fmt: skip
def test_other_models_are_left_to_their_modules(kind, config, settings):
    assert not row.suits(made(kind, config, **settings))


def test_without_a_compiler_and_with_many_threads_modules_decode(monkeypatch, caplog):
    assert RowDecoder.of(made(), threads=row.MAX_THREADS + 1) is None

    def built(*given):
        raise WeightsError("no compiler")

    monkeypatch.setattr(kernels, "built", built)
    row._library.cache_clear()
    try:
        assert RowDecoder.of(made(), threads=1) is None and "no compiler" in caplog.text
    finally:
        row._library.cache_clear()


@pytest.mark.slow
def test_the_policy_decodes_its_last_rows_so(tmp_path, monkeypatch):
    spec = tiny.make(tmp_path, dtype="bfloat16", width=64)
    backend = tiny.backend(spec)
    policy, modules = (tiny.policy(spec, backend.served_tensors()) for _ in range(2))
    decoded = []
    ask = policy._model._row.logits
    monkeypatch.setattr(policy._model._row, "logits", lambda *given: decoded.append(len(given[0])) or ask(*given))
    modules._model._row = None
    lengths = [20, 5, 7, 9, 7, 20]
    requests = [tiny.request(n, (4, 5 + n), max_tokens=length, min_tokens=length) for n, length in enumerate(lengths)]
    for request in requests:
        policy.submit(request)
        modules.submit(request)
    done, expected = tiny.drain(policy), tiny.drain(modules)
    assert decoded == [3] * 2 + [2] * 11
    num_same = 0
    for name, one in done.items():
        same = (expected[name].token_ids == one.token_ids).cumprod().astype(bool)
        assert len(one.token_ids) == lengths[int(name[1:])]
        num_same += int(same.sum())
        np.testing.assert_allclose(expected[name].behavior_logprobs[same], one.behavior_logprobs[same], atol=TOLERANCE)
    assert num_same > 20  # of 68: a number near the edge between two tokens makes another one of the last bits
