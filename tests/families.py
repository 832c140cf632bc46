"""How the families of causal language models that transformers has are computed. tests/unit/models/test_exactness.py
holds each to it, and docs/models.md shows it."""

from __future__ import annotations


def split(text: str) -> set[str]:
    return set(text.split())


CONFIGS = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{family: {"head_dim": 128} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}
"""What the config of a family needs beside its defaults."""
UNMADE = {
    "blt", "cohere_compass_text", "dbrx", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen",
    "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "reformer",
}  # fmt: skip
"""Families that transformers does not make from the defaults of their config, or not without another package."""
REFUSED = {
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "doge", "electra", "ernie",
        "megatron-bert", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm",
        "xlm-roberta", "xlm-roberta-xl", "xlnet",
    ), "sees what comes after a token"),
    **dict.fromkeys(("emu3", "mllama"), "transformers cannot load it"),
    "xmod": "does not compute a text by its tokens alone",
}  # fmt: skip
"""Families that nothing computes -> what is said."""
PACKED = split("""
    afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3
    diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3
    gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna llama longcat_flash mellum minicpm3 minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open stablelm starcoder2 whisper youtu
""")
"""Families whose rows the trainer packs, and that `hf` samples over its own cache. All others are slower."""
WITHOUT_CACHE = {"gemma4_unified", "whisper"}
"""Those of them that `hf` samples without a cache."""
SLOWER = split("""
    axk2 bamba bart bigbird_pegasus blenderbot blenderbot-small bloom codegen deepseek_v32 deepseek_v4 falcon
    falcon_h1 falcon_mamba gemma2 git glm_moe_dsa got_ocr2 gpt_neo gpt_neox_japanese gpt_oss gptj granite_swa
    granitemoe_swa granitemoehybrid hy_v4 inkling_text jamba kimi_linear lfm2 lfm2_moe llama4 llama4_text
    mamba mamba2 marian mbart mimo_v2_flash minimax mpt mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv trocr vaultgemma xglm
    xlstm zamba zamba2 zaya
""")
"""Families whose rows the trainer pads or computes one by one, and that `hf` samples with a pass over the whole row for
each token."""
STATES = split("""
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma xlstm zamba zamba2 zaya
""")
"""Those of them that keep states beside keys and values, or states alone: `hf` samples them in plain batches over their
own cache."""
OWN_ATTENTION = split("gemma2 got_ocr2 gpt_oss granite_swa granitemoe_swa mimo_v2_flash vaultgemma")
"""Those of them whose scores have sinks, soft caps and the like: `hf` packs them with the eager attention of their own
code."""
