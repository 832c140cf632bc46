"""A row that is alone is decoded by row.c as by the modules of the model, up to the order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rftstream.errors import WeightsError
from rftstream.policies import attention, row
from rftstream.policies.cache import SlotCache
from rftstream.policies.packed import PackedRows
from rftstream.policies.row import RowDecoder
from rftstream.weights import kernels
from tests.unit import tiny

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 37,
    "num_hidden_layers": 3, "pad_token_id": 0,
}  # fmt: skip
TOLERANCE = 0.1
"""Of logits, keys and values between -4 and 4, which bfloat16 has in steps of up to 0.03; three layers add up."""


def made(kind=LlamaForCausalLM, config=LlamaConfig, dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **settings}, attn_implementation=attention.register())).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.data.uniform_(0.5, 1.5)
    return model.to(dtype)


def columns(model, length):
    """A cache with two rows of so many columns in two slots."""
    layers, groups = model.config.num_hidden_layers, model.config.num_key_value_heads
    states = [tuple(torch.randn(2, groups, length, 16).bfloat16() for _ in range(2)) for _ in range(layers)]
    cache = SlotCache(4)
    assert cache.put(states, [0, 1], [length, length]) == [0, 1]
    return cache


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
    mine, theirs = (columns_of(model) for _ in range(2))
    for token in (5, 36, 0):
        length = mine[1]
        rows = PackedRows(np.asarray([1]), np.asarray([length]), np.asarray([1]), torch.device("cpu"))
        for cache, _ in (mine, theirs):
            cache.write(rows.slots_N, rows.positions_N)
        expected = model(
            input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[length]]), attention_mask=rows,
            past_key_values=theirs[0].for_model, use_cache=True,
        ).logits[0]  # fmt: skip
        found = decoder.logits(token, length, 1, length, mine[0].for_model)
        assert found.dtype == torch.bfloat16 and expected.float().std() > 0.3
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0.01)
        for (keys, values), (their_keys, their_values) in zip(
            mine[0].row(1, length + 1), theirs[0].row(1, length + 1), strict=True
        ):
            torch.testing.assert_close(keys, their_keys, atol=TOLERANCE, rtol=0.01)
            torch.testing.assert_close(values, their_values, atol=TOLERANCE, rtol=0.01)
        mine, theirs = (mine[0], length + 1), (theirs[0], length + 1)


def columns_of(model, length=70):
    torch.manual_seed(1)
    return columns(model, length), length


@torch.inference_mode()
def test_values_that_are_not_numbers_reach_the_logits():
    model = made()
    cache, length = columns_of(model)
    cache.write(np.asarray([1]), np.asarray([length]))
    cache.for_model.layers[1].rooms[0][1, 0, 3] = torch.nan
    assert RowDecoder(model).logits(1, length, 1, length, cache.for_model).isnan().any()


def test_new_weights_are_used():
    model = made()
    decoder = RowDecoder(model)
    logits = []
    with torch.inference_mode():
        for _ in range(2):
            cache, length = columns_of(model)
            cache.write(np.asarray([0]), np.asarray([length]))
            logits.append(decoder.logits(1, length, 0, length, cache.for_model))
            model.lm_head.weight.copy_(-model.lm_head.weight)
    assert torch.equal(logits[0], -logits[1])


@pytest.mark.parametrize(("kind", "config", "settings"), [
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


def test_the_policy_decodes_the_last_row_so(tmp_path, monkeypatch):
    spec = tiny.make(tmp_path, dtype="bfloat16", width=64)
    backend = tiny.backend(spec)
    policy = tiny.policy(spec, backend.served_tensors())
    alone = []
    ask = policy._model._row.logits
    monkeypatch.setattr(policy._model._row, "logits", lambda *given: alone.append(given) or ask(*given))
    long, short = tiny.request(0, max_tokens=20, min_tokens=20), tiny.request(1, max_tokens=5, min_tokens=5)
    policy.submit(long)
    policy.submit(short)
    done = tiny.drain(policy)
    assert [len(done[name].token_ids) for name in ("r0", "r1")] == [20, 5] and len(alone) == 15
    modules = tiny.policy(spec, backend.served_tensors())
    modules._model._row = None
    for request in (long, short):
        modules.submit(request)
    expected = tiny.drain(modules)["r0"]
    same = (expected.token_ids == done["r0"].token_ids).cumprod().astype(bool)
    assert same.sum() > 5
    np.testing.assert_allclose(expected.behavior_logprobs[same], done["r0"].behavior_logprobs[same], atol=TOLERANCE)
