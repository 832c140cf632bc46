"""Rows packed into one sequence: each is computed as it is by itself, in models of many families."""

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rftstream.policies.hf import attention
from rftstream.policies.hf.attention import attend
from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.packed import MAX_HOLES, PackedRows
from tests.suite.each import each


def sliding(window):
    return lambda batch, head, token, column: (column <= token) & (column > token - window)


@each("window", [100, 5])
@each("seed", range(4))
def test_packed_rows_are_attended_to_as_each_by_itself(seed, window):
    random = np.random.default_rng(seed)
    num_slots, length, size = 24, 40, 8
    slots_B = random.permutation(num_slots)[: int(random.integers(1, num_slots))]
    counts_B = np.where(random.random(len(slots_B)) < 0.7, 1, random.integers(1, 6, size=len(slots_B)))
    starts_B = random.integers(0, length - 6, size=len(slots_B))
    packed = PackedRows(slots_B, starts_B, counts_B, torch.device("cpu"))
    key, value = (torch.from_numpy(random.standard_normal((num_slots, 2, length, size))).float() for _ in range(2))
    query = torch.from_numpy(random.standard_normal((1, 6, int(counts_B.sum()), size))).float()
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    ours, _ = attend(module, query, key, value, packed.mask(sliding(window), torch.float32), scaling=0.3)
    for number, last in enumerate(packed.last_B.tolist()):
        count, start, slot = int(counts_B[number]), int(starts_B[number]), int(slots_B[number])
        tokens = slice(last + 1 - count, last + 1)
        assert packed.slots_N[tokens].tolist() == [slot] * count
        assert packed.positions_N[tokens].tolist() == list(range(start, start + count))
        keys, values = (room[slot][None, :, : start + count] for room in (key, value))
        sees = sliding(window)(0, 0, torch.arange(start, start + count)[:, None], torch.arange(start + count)[None])
        theirs, _ = sdpa_attention_forward(module, query[:, :, tokens], keys, values, sees[None, None], scaling=0.3)
        torch.testing.assert_close(ours[:, tokens], theirs, atol=2e-6, rtol=0)


def test_rows_far_apart_are_attended_to_apart():
    slots_B = np.asarray([0, 1 + MAX_HOLES, 30, 29])
    packed = PackedRows(slots_B, np.asarray([3, 9, 50, 2]), np.ones(4, int), torch.device("cpu"))
    assert packed.order_B.tolist() == [0, 1, 3, 2]
    assert [part.slots for part in packed._parts] == [slice(0, 2 + MAX_HOLES), slice(29, 31)]
    assert [part.width for part in packed._parts] == [10, 51]


PLAIN = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": 1,
         "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
FAMILIES = {
    "Llama": GROUPED,
    "Qwen3": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Gemma3Text": {**GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    "GPT2": {"vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "OPT": {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "DeepseekV3": {
        **PLAIN, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_models_compute_packed_rows_as_each_by_itself(family):
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register()[0]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    plain.load_state_dict(model.state_dict())
    rows = [random.integers(3, 40, size=length) for length in (20, 9, 15, 30, 12)]
    counts = np.asarray([1, 4, 1, 7, 1])
    starts = np.asarray([len(row) for row in rows]) - counts
    cache, slots = SlotCache(max_slots=8), []
    for row, start in zip(rows, starts.tolist(), strict=True):
        computed = DynamicCache()
        model(input_ids=torch.from_numpy(row[None, :start]), past_key_values=computed, use_cache=True)
        slots += cache.put([(layer.keys, layer.values) for layer in computed.layers], [0], [start])
    packed = PackedRows(np.asarray(slots), starts, counts, torch.device("cpu"))
    cache.write(packed.slots_N, packed.positions_N)
    token_ids = np.concatenate([rows[row][starts[row] :] for row in packed.order_B])
    logits_BV = model(
        input_ids=torch.from_numpy(token_ids)[None], position_ids=torch.from_numpy(packed.positions_N)[None],
        attention_mask=packed, past_key_values=cache.for_model, use_cache=True, logits_to_keep=packed.last_B,
    ).logits[0]  # fmt: skip
    for row, logits_V in zip(rows, logits_BV, strict=True):
        expected_V = plain(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits_V, expected_V, atol=1e-5, rtol=0)
