"""Tiny models with random weights of families that see in different ways, made from transformers' config classes."""

import functools
import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rftstream.models.spec import ModelSpec

END = "<eos>"
CHARACTERS = "0123456789+-*=\nabcdefghijklmnopqrstuvwxyzHI. "
WIDTH = 32
MEAN = [0.5, 0.5, 0.5]


def made(kind, folder, *, seed=0):
    """A model folder of a family, as `save_pretrained` writes it, with a processor and a chat template."""
    import torch  # here and not above: this takes seconds, also of those who only ask which families there are
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    special, config, processor, image = FAMILIES[kind]()
    ids = _write_tokenizer(folder, special, processor)
    config = {name: ids[value] if isinstance(value, str) and value in ids else value for name, value in config.items()}
    torch.manual_seed(seed)
    parsed = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForImageTextToText.from_config(parsed)
    for name, one in model.named_parameters():  # as far from uniform as a trained one
        if one.ndim >= 2 and "embed" not in name:
            torch.nn.init.normal_(one, std=one[0].numel() ** -0.5)
    model.float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor["image_processor"]))
    (folder / "processor_config.json").write_text(json.dumps(processor["processor"]))
    parts = "{% if part['type'] == 'image' %}" + image + "{% else %}{{ part['text'] }}{% endif %}"
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message['role'] == 'user' %}H{% endif %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}" + parts + "{% endfor %}{% endif %}"
        "{% if message['role'] == 'user' %}I{% else %}" + END + "{% endif %}{% endfor %}"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[END], "pad_token_id": ids[END]}))
    return ModelSpec(name=kind, folder=folder, dtype="float32", context=400)


def _write_tokenizer(folder, special, processor):
    special = (END, *special)
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": END, "eos_token": END,
                "clean_up_tokenization_spaces": False, **processor.get("tokenizer", {})}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary


def _text(**more):
    return {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 512, "vocab_size": 128, "pad_token_id": 0,
            "eos_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True, **more}  # fmt: skip


def _qwen(kind):
    """Images of any size, with as many tokens as that takes; positions of three dimensions."""
    special = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = _text(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2}
    elif kind == "qwen3_5":  # half of its layers keep a state instead of keys and values
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": WIDTH, "num_position_embeddings": 16}
        text |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "head_dim": 32,
                 "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
                                     "mrope_interleaved": True, "partial_rotary_factor": 0.25}}  # fmt: skip
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": WIDTH, "window_size": 16,
                   "fullatt_block_indexes": [1]}  # fmt: skip
    config = {"model_type": kind, "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
              "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
              "vision_config": vision, "tie_word_embeddings": True,
              "text_config": text}  # fmt: skip
    image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
             "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
             "image_mean": MEAN, "image_std": MEAN}  # fmt: skip
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_5": "Qwen3VLProcessor"}[kind]
    processor = {"image_processor": image, "processor": {"processor_class": name}}
    return special, config, processor, "<|vision_start|><|image_pad|><|vision_end|>"


def _idefics3():
    """Large images are cut into tiles, between which there is text."""
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    config = {"model_type": "idefics3", "pad_token_id": 0, "image_token_id": "<image>", "scale_factor": 2,
              "tie_word_embeddings": True,
              "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "patch_size": 4,
                                "num_attention_heads": 2, "image_size": 16},
              "text_config": _text(model_type="llama")}  # fmt: skip
    image = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32},
             "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, "do_resize": True,
             "image_mean": MEAN, "image_std": MEAN}  # fmt: skip
    processor = {"image_processor": image, "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4}}
    return special, config, processor, "<image>"


def _gemma3():
    """Tokens of an image see each other, whichever comes first; some layers see a window alone."""
    special = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    config = {"model_type": "gemma3", "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
              "eoi_token_index": "<end_of_image>", "mm_tokens_per_image": 4, "tie_word_embeddings": True,
              "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "patch_size": 4,
                                "num_attention_heads": 2, "image_size": 16, "model_type": "siglip_vision_model",
                                "vision_use_head": False},
              "text_config": _text(model_type="gemma3_text", head_dim=16, sliding_window=24, num_hidden_layers=2,
                                   layer_types=["sliding_attention", "full_attention"],
                                   query_pre_attn_scalar=16)}  # fmt: skip
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16},
             "image_mean": MEAN, "image_std": MEAN}  # fmt: skip
    tokenizer = {"extra_special_tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                                          "eoi_token": "<end_of_image>"}}  # fmt: skip
    processor = {"image_processor": image, "tokenizer": tokenizer,
                 "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4}}  # fmt: skip
    return special, config, processor, "<start_of_image>"


FAMILIES = {
    "qwen2_vl": functools.partial(_qwen, "qwen2_vl"),
    "qwen2_5_vl": functools.partial(_qwen, "qwen2_5_vl"),
    "qwen3_5": functools.partial(_qwen, "qwen3_5"),
    "idefics3": _idefics3,
    "gemma3": _gemma3,
}
