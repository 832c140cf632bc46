"""A tiny model that talks like a family: text, thoughts, calls of tools with booleans. Nothing is trained.

Its tokenizer is a BPE of what the family says, so that pieces are whole phrases and merge with what stands beside them.
Its weights say which token follows which, as counted in examples, and one random layer makes that depend on everything
before. So what it says is now and then wrong, split otherwise than an encoder would, or cut: as with a real one.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rftstream.contracts.tasks import ChatMessage
from rftstream.models.chat_template import ChatTemplate
from rftstream.weights.snapshot import RawTensor
from tests.unit.models.template_styles import STYLES, Call, Said

WORDS = ("json", "p", "ars", "er", " the", " weather", "\n", "ü", "中", "1", "23", ".", " a", " tool", "s", "th", "e")
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in given.items()}}}}
    for name, given in (("look", {"flag": "boolean"}), ("add", {"text": "string", "flag": "boolean"}))
)  # fmt: skip
EXAMPLES = 300
PIECES = 520
"""Tokens of the tokenizer, beside those that the style adds."""
NOISE_WIDTH, HEADS, HEAD_WIDTH, INNER = 24, 2, 8, 32
"""Width of the model beside one for each token; of its layer."""
LAYER_STD = 0.004
"""Of the weights that write what the layer found. Larger ones drown what the last token says."""
USUAL, UNSEEN = 0.1, 2e-5
"""Weights, in pairs of the examples: of any token after any other, as usual as it is in all; of a pair that no example
has."""

Weights = dict[str, np.ndarray]


class TalkingModel:
    """The model of a style, in a folder that `model.path` may name."""

    def __init__(self, style: str, folder: Path) -> None:
        self.folder = folder
        self._style = STYLES[style]
        self._name = style
        self._template = ChatTemplate(self._style.source, model=style, special=self._style.special, kwargs={})
        draw = random.Random(style)
        examples = [self._example(draw) for _ in range(EXAMPLES)]
        self._tokenizer = self._trained([said for _, said, _ in examples])
        self.size = self._tokenizer.get_vocab_size()
        self.weights = self._made(np.random.default_rng(0), self._follows(examples, draw))
        self._write()

    def version(self, number: int) -> dict[str, RawTensor]:
        """The weights of version 0, or others near them."""
        noise = np.random.default_rng(number)
        share = 0.02 if number else 0.0
        near = {
            name: (value * (1 + share * noise.standard_normal(value.shape))).astype(np.float32)
            for name, value in self.weights.items()
        }
        return {name: RawTensor("F32", value.shape, value.tobytes()) for name, value in near.items()}

    # ------------------------------------------------------------------------------------------ what it says

    def _example(self, draw: random.Random) -> tuple[str, str, str]:
        """A prompt, what is said, and how it stops."""
        style = self._style
        offers = style.calls and draw.random() < 0.8
        thought = draw_text(draw) if style.reasons and draw.random() < 0.5 else ""
        calls = [_call(draw) for _ in range(1 if self._name in ("llama3", "harmony") else draw.choice((1, 1, 2)))]
        is_call = offers and draw.random() < 0.7
        content = "" if is_call and draw.random() < 0.7 else draw_text(draw)
        said, stop = style.says(Said(content=content, reasoning=thought, calls=tuple(calls) if is_call else ()))
        return self._template.render([ChatMessage(role="user", content=draw_text(draw))]), said, stop

    def _trained(self, texts: Sequence[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        # pieces may reach over words and lines
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        style = self._style
        trainer = trainers.BpeTrainer(
            vocab_size=PIECES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        marks = "|".join(map(re.escape, (*style.control, *style.marks)))  # no piece reaches over these
        tokenizer.train_from_iterator([part for text in texts for part in re.split(marks, text)], trainer)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in style.control])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in style.marks])
        return tokenizer

    def _follows(self, examples: Sequence[tuple[str, str, str]], draw: random.Random) -> np.ndarray:
        """Logits [V, V] of the token that comes after a token."""
        counts_VV = np.zeros((self.size, self.size))
        for prompt, said, stop in examples:
            pieces = [said] if draw.random() < 0.7 else _split(said, draw)
            ids = [*self._encode(prompt)[-1:], *(token for piece in pieces for token in self._encode(piece))]
            ids += self._encode(stop)
            np.add.at(counts_VV, (ids[:-1], ids[1:]), 1)
        counts_VV += USUAL * counts_VV.sum(axis=0) / counts_VV.sum() + UNSEEN
        logits_VV: np.ndarray = np.log(counts_VV / counts_VV.sum(axis=1, keepdims=True))
        return logits_VV

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    # ------------------------------------------------------------------------------------------ its files

    def _made(self, random: np.random.Generator, follows_VV: np.ndarray) -> Weights:
        """One number of the hidden state for each token, which says what the last token is; the layer writes into the
        others alone."""
        size, noise = self.size, slice(self.size, None)
        num_noise = NOISE_WIDTH + size % HEADS  # the heads have to divide the width
        width = size + num_noise

        def normal(*shape: int, std: float) -> np.ndarray:
            return (random.standard_normal(shape) * std).astype(np.float32)

        embedding = np.concatenate([np.eye(size, dtype=np.float32), normal(size, num_noise, std=0.2)], axis=1)
        head = normal(size, width, std=0.0)
        # the final norm makes the one of the last token about sqrt(width / 3), if the layer writes little
        head[:, :size] = follows_VV.T / math.sqrt(width / 3)
        head[:, noise] = normal(size, num_noise, std=0.05)
        layer = "model.layers.0."
        inner = HEADS * HEAD_WIDTH
        weights = {
            "model.embed_tokens.weight": embedding,
            f"{layer}input_layernorm.weight": np.ones(width, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(width, np.float32),
            "model.norm.weight": np.ones(width, np.float32),
            "lm_head.weight": head,
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{layer}self_attn.{name}.weight"] = normal(inner, width, std=0.3)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}mlp.{name}.weight"] = normal(INNER, width, std=0.2)
        for name, columns in (("self_attn.o_proj", inner), ("mlp.down_proj", INNER)):
            weights[f"{layer}{name}.weight"] = normal(width, columns, std=0.0)
            weights[f"{layer}{name}.weight"][noise] = normal(num_noise, columns, std=LAYER_STD)
        return weights

    def _write(self) -> None:
        folder, style = self.folder, self._style
        folder.mkdir(parents=True)
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._tokenizer.save(str(folder / "tokenizer.json"))
        stops = [self._tokenizer.token_to_id(text) for text in style.stops]
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": self.size,
            "hidden_size": self.weights["lm_head.weight"].shape[1], "intermediate_size": INNER, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_WIDTH,
            "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
            "bos_token_id": None, "eos_token_id": stops,
        }  # fmt: skip
        for name, values in {
            "config": config,
            "tokenizer_config": {"eos_token": style.stops[-1], **style.special},
            "generation_config": {"eos_token_id": stops},
        }.items():
            (folder / f"{name}.json").write_text(json.dumps(values))
        (folder / "chat_template.jinja").write_text(style.source)


def draw_text(draw: random.Random, most: int = 5) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, most))).strip() or "x"


def _call(draw: random.Random) -> Call:
    flag = draw.random() < 0.5
    return ("look", {"flag": flag}) if draw.random() < 0.5 else ("add", {"flag": flag, "text": draw_text(draw, 2)})


def _split(text: str, draw: random.Random) -> list[str]:
    places = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(2))})
    return [text[start:end] for start, end in itertools.pairwise(places)]
