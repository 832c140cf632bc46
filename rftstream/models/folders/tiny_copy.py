"""A model's config at a small size: the same class and switches, every kind of layer, windows of a few tokens.

How a model uses attention, windows, sinks and states depends on its class and switches, not on its sizes. So a copy
that runs in milliseconds shows how the whole model computes, on rows longer than its windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 64
MAX_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How small a config becomes."""

    width: int = 32
    heads: int = 4
    vocabulary: int = VOCABULARY
    positions: int = 128
    layers: int = 2
    """Layers of each kind."""
    window: int | None = 6
    """Tokens in every window, chunk and block that a config names; None: as many as before."""
    cap: float | None = 2.0
    """Soft caps. A copy has low ones, so that its small weights reach them; None: as they were."""

    def of(self, name: str) -> int | None:
        """Return the small value of a config's attribute; None if the attribute stays."""
        kind = KINDS.get(name)
        if kind is None or isinstance(kind, int):
            return kind
        found: int = {
            "width": self.width,
            "hidden": 3 * self.width // 2,
            "narrow": self.width // 2,
            "heads": self.heads,
            "head": self.width // self.heads,
            "half head": self.width // self.heads // 2,
            "vocabulary": self.vocabulary,
            "positions": self.positions,
        }[kind]
        return found


COPY = Sizes()

KINDS: Mapping[str, str | int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), "width"),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), "width"),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "backbone_hidden_size", "attention_dim"), "width"),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "dim_ff"), "hidden"),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size", "d_ff"), "hidden"),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "n_dense_ff", "dff"), "hidden"),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), "narrow"),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size"), "narrow"),
    **dict.fromkeys(("shared_intermediate_size",), "narrow"),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), "heads"),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), "heads"),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), "heads"),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), "heads"),
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "d_head", "kv_channels", "swa_head_dim"), "head"),
    **dict.fromkeys(("attention_head_size", "index_head_dim", "v_head_dim", "qk_nope_head_dim"), "head"),
    "global_head_dim": "head",
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), "half head"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank"), "narrow"),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"), "vocabulary"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), "positions"),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "model_max_length"), "positions"),
    "context_length": "positions",
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), "head"),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "num_layers_per_stack"), 2),
    "index_n_heads": 16,  # with fewer, most scores are 0, and the choice of the largest is arbitrary
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), "narrow"),
    **dict.fromkeys(("num_codebooks", "hidden_size_per_layer_input", "ple_embed_dim", "hc_lowrank"), 8),
}
"""Attribute of a config -> its small value, or which of the sizes it is."""

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
"""Soft caps of logits and scores."""


def _of_family(family: str, sizes: Sizes) -> dict[str, int | float]:
    """Return further attributes with small values, which depend on others."""
    width, head = sizes.width, sizes.width // sizes.heads
    families: dict[str, dict[str, int | float]] = {
        "rwkv": {"attention_hidden_size": width},
        "xlstm": {"qk_dim_factor": 2.0, "v_dim_factor": 2.0},  # its cache rounds both dimensions to multiples of 64
        "zamba": {"attention_hidden_size": 2 * width, "attention_head_dim": 2 * head},
        "zamba2": {"attention_hidden_size": 2 * width, "attention_head_dim": 2 * head},
        "falcon_h1": {"mamba_d_ssm": 2 * width},
        "mamba2": {"head_dim": 2 * head},
        "longcat_flash": {"head_dim": head // 2},
    }
    return families.get(family, {})


_NOT_COPIED_NAMES = """
id2label label2id transformers_version architectures model_type _name_or_path output_attentions
"""
NOT_COPIED = tuple(_NOT_COPIED_NAMES.split())


def tiny_config(config: Any, sizes: Sizes = COPY) -> Any:
    """Return the small copy of a config of transformers. ValueError, TypeError and the like if the config does not
    accept such sizes."""
    values = {name: value for name, value in config.to_dict().items() if name not in NOT_COPIED}
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            values[name] = tiny_config(inner, sizes)
    _keep_layers(values, sizes.layers)
    whole = dict(values)
    for name in KINDS:
        if _is_size(value := values.get(name)):
            values[name] = sizes.of(name)
        elif isinstance(value, list) and all(map(_is_size, value)):
            values[name] = [sizes.of(name)] * len(value)
    if sizes.window is not None:
        values |= {name: sizes.window for name in WINDOWS if _is_size(values.get(name))}
    values |= {name: CHUNK for name in CHUNKS if _is_size(values.get(name))}
    if sizes.cap is not None:
        values |= {name: sizes.cap for name in CAPS if values.get(name)}
    values |= {name: min(whole[name], most) for name, most in AT_MOST.items() if _is_size(whole.get(name))}
    heads = sizes.heads
    values |= {name: heads // group for name in GROUPED if (group := _group(whole, name, heads)) is not None}
    if _is_size(whole.get("qk_rope_head_dim")):
        if _is_size(whole.get("qk_head_dim")):
            values["qk_head_dim"] = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]
        if whole.get("head_dim") == whole["qk_rope_head_dim"]:
            values["head_dim"] = values["qk_rope_head_dim"]
    for name, value in values.items():
        too_large = isinstance(value, int) and value >= sizes.vocabulary
        if name.endswith("token_id") and (isinstance(value, list) or too_large):
            values[name] = 0
    values |= _of_family(config.model_type, sizes)
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


def _group(whole: Mapping[str, Any], name: str, num_heads: int) -> int | None:
    """Return how many heads of the copy share keys and values: all, some or none, as in the whole model."""
    heads, shared = whole.get(GROUPED[name]), whole.get(name)
    if not _is_size(shared) or not _is_size(heads):
        return None
    return 1 if shared == heads else num_heads if shared == 1 else 2


def _keep_layers(values: dict[str, Any], number_of_each: int) -> None:
    """Cut a config down to some layers of each kind."""
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
    places = range(number_of_each)
    some = [numbers[place] for place in places for numbers in of_kind.values() if len(numbers) > place]
    kept = sorted(some[: max(MAX_LAYERS, number_of_each)])
    values |= {name: [one[number] for number in kept] for name, one in lists.items()}
    values |= {name: [new for new, old in enumerate(kept) if old in one] for name, one in numbers.items()}
    values |= {name: {str(new): one[old] for new, old in enumerate(kept) if old in one} for name, one in tables.items()}
    if shared:
        values["num_kv_shared_layers"] = sum(number >= depth - shared for number in kept)
    values |= {name: len(kept) for name in LAYERS if _is_size(values.get(name))}
