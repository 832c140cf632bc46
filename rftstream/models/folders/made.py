"""Models that are made on the spot (`[model.make]`): a small Llama with random weights and one token per character,
plus one for each given word.

This module imports neither torch nor transformers, like `rftstream.models.folders.folder`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.errors import ConfigError
from rftstream.models.folders.files import digest_files, read_json, tokenizer_files, whole_folder, write_json
from rftstream.models.vision import made_vision
from rftstream.models.vision.images import IMAGE_MARK

if TYPE_CHECKING:
    import numpy as np

    from rftstream.config.sections import MakeModel, ModelSection

END = "<eos>"
DEFAULT_FAMILY = "llama"
SPECIAL_TOKENS: Mapping[int, tuple[str, ...]] = {1: ("<pad>", END, "<unk>"), 2: (END,)}
"""Layout of a made model -> its tokens beside the characters, by id. A policy can sample any token that has a logit. So
layout 2 has no padding token (the end token serves instead) and no token for unknown characters (they are refused)."""

MADE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RECIPE = "rftstream.json"
"""File in a made folder that records the settings of the model."""
LAYOUT = max(SPECIAL_TOKENS)
"""Layout of newly made models. It goes up when the same settings would give other weights. Runs keep the layout with
which they began."""


def make_model(make: MakeModel, folder: Path, seed: int) -> str:
    """Make the folder if it does not exist, and return the model's name, which depends on settings and seed."""
    if make.width % make.heads or (make.width // make.heads) % 2:
        raise ConfigError(f"model.make.heads: got {make.heads}, expected a width ({make.width}) of heads x even number")
    if len(set(make.characters)) != len(make.characters) or not make.characters:
        twice = "".join(dict.fromkeys(one for one in make.characters if make.characters.count(one) > 1))
        more = f"; {twice!r} are in it more than once" if twice else ""
        raise ConfigError(f"model.make.characters: got {make.characters!r}, expected each character once{more}")
    if wrong := [word for word in make.words if len(word) < 2 or word in (*SPECIAL_TOKENS[LAYOUT], IMAGE_MARK)]:
        raise ConfigError(f"model.make.words: got {wrong[0]!r}, expected texts of two characters or more")
    if len(set(make.words)) != len(make.words):
        raise ConfigError(f"model.make.words: got {list(make.words)!r}, expected each word once")
    if make.vision and make.family != DEFAULT_FAMILY:
        raise ConfigError(
            f"model.make.vision: got the family {make.family!r}, expected {DEFAULT_FAMILY!r}; leave it out"
        )
    if not (folder / RECIPE).is_file():
        with whole_folder(folder, sign=RECIPE, setting="model.make") as new:
            _write(new, make, seed, LAYOUT)
    found = read_json(folder / RECIPE)
    recipe = _recipe(make, seed, found["layout"] if found.get("layout") in SPECIAL_TOKENS else LAYOUT)
    if found != recipe:
        raise ConfigError(
            f"model.make: {folder} holds a model made from another recipe: {_difference(found, recipe)}; "
            "take back the change, or start a new run"
        )
    return "made-" + hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def make_as_recorded(section: ModelSection, folder: Path, seed: int, digests: Mapping[str, str]) -> None:
    """Make a run's `[model.make]` model if it is not in `folder` yet, in the layout that gives the run's digests."""
    if section.make is None or (folder / RECIPE).is_file():
        return
    for layout in SPECIAL_TOKENS:
        with tempfile.TemporaryDirectory(prefix="rftstream-") as scratch:
            _write_tokenizer(Path(scratch), section.make, layout)
            if digest_files(tokenizer_files(Path(scratch))) != digests.get("tokenizer"):
                continue
        with whole_folder(folder, sign=RECIPE, setting="model.make") as new:
            _write(new, section.make, seed, layout)
        return


def _recipe(make: MakeModel, seed: int, layout: int) -> dict[str, Any]:
    settings = {**dataclasses.asdict(make), "words": list(make.words)}
    if not make.words:  # as before there were any
        del settings["words"]
    if not make.vision:
        del settings["vision"]
    if make.family == DEFAULT_FAMILY:
        del settings["family"]
    return {"make": settings, "seed": seed, "layout": layout}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    then, now = ({**recipe.get("make", {}), **recipe, "make": None} for recipe in (before, after))
    return ", ".join(f"{key} {then.get(key)!r} -> {now.get(key)!r}" for key in now if then.get(key) != now.get(key))


def _write(folder: Path, make: MakeModel, seed: int, layout: int) -> None:
    _write_tokenizer(folder, make, layout)
    if make.family == DEFAULT_FAMILY:
        _write_config(folder, make, layout)
        _write_weights(folder, make, seed, layout)
    else:
        from rftstream.models.folders.made_family import write_family

        write_family(folder, make, seed, vocabulary=_vocabulary_size(make, layout), ids=_ids(layout))
    write_json(folder / RECIPE, _recipe(make, seed, layout))


def _write_tokenizer(folder: Path, make: MakeModel, layout: int) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = SPECIAL_TOKENS[layout]
    pad, unknown = special[0], special[-1] if layout == 1 else None
    special = (*special, *made_vision.SPECIAL_TOKENS) if make.vision else special
    vocabulary = {token: index for index, token in enumerate([*special, *make.words, *make.characters])}
    words = sorted(map(re.escape, make.words), key=len, reverse=True)
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {})))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join([*words, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "eos_token": END,
            **({"unk_token": unknown} if unknown else {}),
            "clean_up_tokenization_spaces": False,
            "model_max_length": make.context,
        },
    )
    template = made_vision.TEMPLATE if make.vision else MADE_TEMPLATE
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_config(folder: Path, make: MakeModel, layout: int) -> None:
    ids = _ids(layout)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": _vocabulary_size(make, layout),
        "hidden_size": make.width,
        "intermediate_size": 2 * make.width,
        "num_hidden_layers": make.layers,
        "num_attention_heads": make.heads,
        "num_key_value_heads": make.heads,
        "max_position_embeddings": make.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **ids,
    }
    if make.vision:
        config = made_vision.config_around(config, make, image_token=len(SPECIAL_TOKENS[layout]))
        made_vision.write_processor(folder)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0})


def _ids(layout: int) -> dict[str, int | None]:
    return {"pad_token_id": 0, "eos_token_id": SPECIAL_TOKENS[layout].index(END), "bos_token_id": None}


def _vocabulary_size(make: MakeModel, layout: int) -> int:
    special = len(SPECIAL_TOKENS[layout]) + (len(made_vision.SPECIAL_TOKENS) if make.vision else 0)
    return special + len(make.words) + len(make.characters)


def _write_weights(folder: Path, make: MakeModel, seed: int, layout: int) -> None:
    from safetensors.numpy import save_file

    vocabulary = _vocabulary_size(make, layout)
    weights = dict(_made_weights(make, seed, vocabulary))
    if make.vision:
        weights = made_vision.weights_around(weights, make, seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _made_weights(make: MakeModel, seed: int, vocabulary: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights. Linear layers are N(0, 1/fan_in); layers that write to the residual stream are smaller by
    sqrt(2 layers). Embeddings (tied with the head) are small, so that the first policy is nearly uniform."""
    import numpy as np

    generator = np.random.default_rng(seed)
    width, hidden = make.width, 2 * make.width

    def normal(rows: int, columns: int, std: float) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    residual = 1 / math.sqrt(2 * make.layers)
    yield "model.embed_tokens.weight", normal(vocabulary, width, 0.02)
    for layer in range(make.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", np.ones(width, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}self_attn.{name}.weight", normal(width, width, width**-0.5)
        yield f"{prefix}self_attn.o_proj.weight", normal(width, width, residual * width**-0.5)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", normal(hidden, width, width**-0.5)
        yield f"{prefix}mlp.down_proj.weight", normal(width, hidden, residual * hidden**-0.5)
    yield "model.norm.weight", np.ones(width, np.float32)
