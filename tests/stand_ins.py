"""Models and data of the hub, by what `check` looks at: a config, the shapes of tensors, prompts of their length."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from rftstream.config.sections import MakeModel, ModelSection
from rftstream.models.folders.folder import prepare_model

QWEN = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
"""Name -> the sizes that its config.json on the hub has; the embeddings are also the output."""
QUESTION_CHARACTERS = 232
"""Of the longest question, which are its tokens here: with the system prompt 300, about as in GSM8K."""


def make_hub(folder: Path) -> None:
    """Write the models of `QWEN` and GSM8K below a folder, under their names."""
    for name, sizes in QWEN.items():
        make_model(folder / name, sizes)
    question = "How many apples does Ada have? ".ljust(QUESTION_CHARACTERS, "?")
    for split in ("train", "test"):
        file = folder / "openai" / "gsm8k" / "main" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"question": question if split == "train" else f"{question[:-1]}!", "answer": "She has two.\n#### 2"}
        file.write_text((json.dumps(row) + "\n") * 400)


def make_model(folder: Path, sizes: dict[str, int | str]) -> None:
    """Write a folder with a made tokenizer, a config of these sizes, and a file that has all shapes and no weights."""
    characters = "".join(map(chr, range(32, 127))) + "\n"
    spec = prepare_model(ModelSection(make=MakeModel(characters=characters, width=8, layers=1, heads=1)), folder, 0)
    place = Path(spec.folder)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **sizes, "max_position_embeddings": 32768}))
    tensors, end = {}, 0
    for name, shape in shapes_of(sizes).items():
        begin, end = end, end + 2 * int.__mul__(*(*shape, 1)[:2])
        tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    with open(place / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        os.truncate(file.fileno(), file.tell() + end)  # a hole, which takes no disk


def shapes_of(sizes: dict[str, int | str]) -> dict[str, list[int]]:
    """The shapes of a decoder of Qwen with biases or norms of queries and keys."""
    width, inner, head = int(sizes["hidden_size"]), int(sizes["intermediate_size"]), int(sizes["head_dim"])
    queries, keys = int(sizes["num_attention_heads"]) * head, int(sizes["num_key_value_heads"]) * head
    found = {"model.embed_tokens.weight": [int(sizes["vocab_size"]), width], "model.norm.weight": [width]}
    extra = {"q_proj.bias": [queries], "k_proj.bias": [keys], "v_proj.bias": [keys]}
    if sizes["model_type"] == "qwen3":
        extra = {"q_norm.weight": [head], "k_norm.weight": [head]}
    for layer in range(int(sizes["num_hidden_layers"])):
        attention = {
            "q_proj.weight": [queries, width], "k_proj.weight": [keys, width], "v_proj.weight": [keys, width],
            "o_proj.weight": [width, queries], **extra,
        }  # fmt: skip
        mlp = {"gate_proj.weight": [inner, width], "up_proj.weight": [inner, width], "down_proj.weight": [width, inner]}
        found |= {f"model.layers.{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in mlp.items()}
        found |= {f"model.layers.{layer}.{norm}.weight": [width]
                  for norm in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    return found
