"""A model's config at a small size: the same class and switches, every kind of layer, windows of a few tokens.

How a model uses attention, windows, sinks and states depends on its class and switches, not on its sizes. So a copy
that runs in milliseconds shows how the whole model computes, on rows longer than its windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 32
HEADS = 4
VOCABULARY = 64
WINDOW = 6
"""Tokens in every window, chunk and block that a config names."""
POSITIONS = 128
MAX_LAYERS = 8

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "backbone_hidden_size", "attention_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "dim_ff", "dff"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size", "d_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "n_dense_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 16),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "d_head", "kv_channels", "swa_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("attention_head_size", "index_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "model_max_length"), POSITIONS),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "num_layers_per_stack"), 2),
    "index_n_heads": 16,  # with fewer, most scores are 0, and the choice of the largest is arbitrary
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("num_codebooks", "hidden_size_per_layer_input", "ple_embed_dim", "hc_lowrank"), 8),
}
"""Attribute of a config -> its small value in the copy."""

_WINDOW_NAMES = """
sliding_window attention_chunk_size window_size attention_window_size sliding_window_size local_attention
keep_window_size index_topk floor_scale
"""
WINDOWS = tuple(_WINDOW_NAMES.split())
CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size", "index_block_size")
"""Blocks over which sums are accumulated. They are powers of two, since some models require that."""
CHUNK = 8
_LAYER_NAMES = """
num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks num_encoder_layers
num_decoder_layers
"""
LAYERS = tuple(_LAYER_NAMES.split())
GROUPED = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
_NUMBER_NAMES = """
hybrid_layer_ids full_attn_idxs moe_layers mlp_only_layers cross_attention_layers attn_layer_indices
"""
NUMBERS = tuple(_NUMBER_NAMES.split())
"""Attributes that are lists of layer numbers."""
AT_MOST = {
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "index_topk_blocks", "o_groups"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
}
"""Numbers that are capped in the copy."""
CAPS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attn_logit_softcap",
    "attention_logit_cap",
    "logits_soft_cap",
    "attention_softcap",
)
"""Soft caps of logits and scores. The copy has low caps, so that its small weights reach them."""
CAP = 2.0
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"head_dim": 16},
    "longcat_flash": {"head_dim": 4},
}
"""Kind of model -> further attributes with small values, which depend on others."""
_NOT_COPIED_NAMES = """
id2label label2id transformers_version architectures model_type _name_or_path output_attentions
"""
NOT_COPIED = tuple(_NOT_COPIED_NAMES.split())


def tiny_config(config: Any) -> Any:
    """Return the small copy of a config of transformers. ValueError, TypeError and the like if the config does not
    accept such sizes."""
    values = {name: value for name, value in config.to_dict().items() if name not in NOT_COPIED}
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            values[name] = tiny_config(inner)
    _keep_layers(values)
    whole = dict(values)
    for name, size in SIZES.items():
        if _is_size(value := values.get(name)):
            values[name] = size
        elif isinstance(value, list) and all(map(_is_size, value)):
            values[name] = [size] * len(value)
    values |= {name: WINDOW for name in WINDOWS if _is_size(values.get(name))}
    values |= {name: CHUNK for name in CHUNKS if _is_size(values.get(name))}
    values |= {name: CAP for name in CAPS if values.get(name)}
    values |= {name: min(whole[name], most) for name, most in AT_MOST.items() if _is_size(whole.get(name))}
    values |= {name: HEADS // group for name in GROUPED if (group := _group(whole, name)) is not None}
    if _is_size(whole.get("qk_rope_head_dim")):
        if _is_size(whole.get("qk_head_dim")):
            values["qk_head_dim"] = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]
        if whole.get("head_dim") == whole["qk_rope_head_dim"]:
            values["head_dim"] = values["qk_rope_head_dim"]
    for name, value in values.items():
        if name.endswith("token_id") and (isinstance(value, list) or (isinstance(value, int) and value >= VOCABULARY)):
            values[name] = 0
    values |= FAMILIES.get(config.model_type, {})
    if isinstance(rope := values.get("rope_parameters"), dict):
        values["rope_parameters"] = _small_rope(rope, _head_dim(values) / max(_head_dim(whole), 1))
    return type(config)(**values)


def names_window(config: Any) -> bool:
    """Return whether a config names a window or a chunk."""
    return any(_is_size(getattr(config.get_text_config(), name, None)) for name in WINDOWS)


def _head_dim(values: Mapping[str, Any]) -> int:
    """Return the width of a head."""
    heads = next((values[name] for name in ("num_attention_heads", "n_head") if _is_size(values.get(name))), 1)
    return int(values.get("head_dim") or values.get("hidden_size", 0) // heads)


def _small_rope(rope: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return rotary positions for narrower heads: lists of frequencies are cut, and their sections are scaled."""
    found: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            found[name] = _small_rope(value, scale)
        elif name == "mrope_section" and isinstance(value, list):
            total, parts = max(round(sum(value) * scale), 1), len(value)
            found[name] = [(number + 1) * total // parts - number * total // parts for number in range(parts)]
        elif isinstance(value, list):
            found[name] = value[: max(round(len(value) * scale), 1)]
        else:
            found[name] = value
    return found


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _group(whole: Mapping[str, Any], name: str) -> int | None:
    """Return how many heads of the copy share keys and values: all, some or none, as in the whole model."""
    heads, shared = whole.get(GROUPED[name]), whole.get(name)
    if not _is_size(shared) or not _is_size(heads):
        return None
    return 1 if shared == heads else HEADS if shared == 1 else 2


def _keep_layers(values: dict[str, Any]) -> None:
    """Cut a config down to two layers of each kind."""
    depth = next((values[name] for name in LAYERS if _is_size(values.get(name))), 0)
    if depth < 2:
        return
    numbers = {name: values[name] for name in NUMBERS if isinstance(values.get(name), list)}
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == depth and name not in numbers
    }
    tables = {
        name: {int(key): one for key, one in value.items()}
        for name, value in values.items()
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value) and name not in NOT_COPIED
    }
    shared = values.get("num_kv_shared_layers") or 0
    of_kind: dict[str, list[int]] = {}
    for number in range(depth):
        kind = [*(one[number] for one in lists.values()), *(table.get(number) for table in tables.values())]
        kind += [number >= depth - shared, *(number in one for one in numbers.values())]
        of_kind.setdefault(str(kind), []).append(number)
    first, second = ([numbers[place] for numbers in of_kind.values() if len(numbers) > place] for place in (0, 1))
    kept = sorted([*first, *second][:MAX_LAYERS])
    values |= {name: [one[number] for number in kept] for name, one in lists.items()}
    values |= {name: [new for new, old in enumerate(kept) if old in one] for name, one in numbers.items()}
    values |= {name: {str(new): one[old] for new, old in enumerate(kept) if old in one} for name, one in tables.items()}
    if shared:
        values["num_kv_shared_layers"] = sum(number >= depth - shared for number in kept)
    values |= {name: len(kept) for name in LAYERS if _is_size(values.get(name))}
