"""Special tokens wherever a folder keeps them: the same ids as `AutoTokenizer`, and the same token ends a turn."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.rendering import HfRenderer
from rftstream.models.spec import ModelSpec
from rftstream.models.tokenizer import Tokenizer as ReadTokenizer
from rftstream.models.tokenizer import open_tokenizer
from tests.unit.models.styled import CORPUS, trained_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}{% if image_token %}{{ image_token }}{% endif %}{{ eos_token }}"
)
CHAT = [ChatMessage(role="user", content="The <tool_call> 中文 <|im_end|> <s> a</s> <tok><pad> {x}")]
IM = ("<|im_start|>", "<|im_end|>")
FAST = "PreTrainedTokenizerFast"


def token(text: str, **more: Any) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **more}


def decoder(base: int, *texts: str, **more: Any) -> dict[str, Any]:
    return {str(base + place): token(text, special=True, **more) for place, text in enumerate(texts)}


MAP_ALONE = "added_tokens.json, and the map says what is special"
BASE = 700
"""Number of tokens of the trained tokenizer; the next one that is added gets this id."""
CASES: dict[str, dict[str, Any]] = {
    # what tokenizer.json has beside its pieces, and what each file has
    "all in tokenizer_config": {"config": {"bos_token": "<s>", "eos_token": "</s>"}, "added": ["<s>", "</s>", *IM]},
    "maps as tokens": {
        "config": {name: {"__type": "AddedToken", **token(text)} for name, text in
                   (("bos_token", "<s>"), ("eos_token", "</s>"))}, "added": ["<s>", "</s>"]},
    "only the special map": {"map": {"bos_token": "<s>", "eos_token": token("</s>")}, "added": ["<s>", "</s>", *IM]},
    "the map against the settings": {"config": {"bos_token": "<s>", "eos_token": "</s>"},
                                     "map": {"eos_token": "<|im_end|>"}, "added": ["<s>", "</s>", *IM]},
    "the map is not read beside a decoder": {
        "config": {"eos_token": "</s>", "added_tokens_decoder": decoder(BASE, "</s>", *IM)},
        "map": {"bos_token": "<s>", "eos_token": "<|im_end|>"}, "added": ["</s>", *IM]},
    "added_tokens.json": {"config": {"eos_token": "<|im_end|>"}, "ids": {"<|im_start|>": BASE, "<|im_end|>": BASE + 1}},
    MAP_ALONE: {"map": {"eos_token": "<|im_end|>", "additional_special_tokens": [*IM]},
                "ids": {"<|im_start|>": BASE, "<|im_end|>": BASE + 1, "<tool_call>": BASE + 2}},
    "a decoder alone": {"config": {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder(BASE, *IM)}},
    "a decoder with marks that are not special": {
        "config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {
            **decoder(BASE, *IM), str(BASE + 2): token("<tool_call>", special=False)}}},
    "a decoder that makes a token special": {
        "config": {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder(BASE, *IM)}, "plain": [*IM]},
    "additional special tokens": {"config": {"eos_token": "<|im_end|>", "additional_special_tokens": [*IM, "<tok>"]}},
    "extra special tokens": {"config": {"eos_token": "<|im_end|>", "extra_special_tokens": [*IM, "<tok>"]}},
    "extra before additional": {"config": {"eos_token": "</s>", "extra_special_tokens": ["<tok>"],
                                           "additional_special_tokens": [*IM]}, "added": ["</s>"]},
    "extra by name": {"config": {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<tok>"}},
                      "added": ["</s>"]},
    "a name of its own": {"config": {"eos_token": "</s>", "image_token": "<tok>"}, "added": ["</s>"]},
    "a named piece": {"config": {"eos_token": "</s>", "pad_token": "{"}, "added": ["</s>"]},
    "no bos": {"config": {"bos_token": None, "eos_token": "</s>", "unk_token": None}, "added": ["</s>"]},
    "a text may not have tokens": {"config": {"eos_token": "</s>", "split_special_tokens": True},
                                   "added": ["</s>", *IM]},
    "nothing but the file": {"added": [*IM]},
    "strips": {"config": {"eos_token": "</s>",
                          "added_tokens_decoder": decoder(BASE, "</s>", lstrip=True, rstrip=True)}},
    "the class has an end": {"config": {"tokenizer_class": "GPT2Tokenizer"}, "added": ["<|endoftext|>", *IM],
                             "type": "gpt2"},
    "the class of the model": {"config": {"tokenizer_class": None}, "added": ["<|endoftext|>"], "type": "gpt_neox"},
    "the class, but not its bos": {"config": {"tokenizer_class": "GPT2Tokenizer", "bos_token": None},
                                   "added": ["<|endoftext|>"], "type": "gpt2"},
}  # fmt: skip


def made(folder: Path, case: dict[str, Any]) -> ModelSpec:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(trained_tokenizer())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in case.get("added", ())])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in case.get("plain", ())])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": FAST, "chat_template": TEMPLATE, **case.get("config", {})}
    files = {"tokenizer_config.json": {key: one for key, one in settings.items() if key != "tokenizer_class" or one},
             "config.json": {"model_type": case.get("type", "llama")},
             "special_tokens_map.json": case.get("map"), "added_tokens.json": case.get("ids")}  # fmt: skip
    for name, values in files.items():
        if values is not None:
            (folder / name).write_text(json.dumps(values))
    return ModelSpec(name="m", folder=folder, dtype="float32", context=None)


def agree(spec: ModelSpec) -> tuple[HfRenderer, Any, tuple[int, ...]]:
    """The renderer and transformers' tokenizer of a folder, and the ids that both give."""
    from transformers import AutoTokenizer

    renderer, known = HfRenderer(spec), AutoTokenizer.from_pretrained(spec.folder)
    plain = [{"role": one.role, "content": one.content} for one in CHAT]
    expected = tuple(known.apply_chat_template(plain)["input_ids"])  # type: ignore[index,arg-type]
    assert renderer.render(CHAT) == expected
    assert renderer.stop_token_ids == {known.eos_token_id} - {None}
    return renderer, known, expected


@pytest.mark.parametrize("name", CASES)
def test_ids_and_ends_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    renderer, known, expected = agree(made(tmp_path, CASES[name]))
    if name != MAP_ALONE:  # there transformers has special tokens that it does not take for special ones
        assert renderer.decode(expected) == known.decode(expected, skip_special_tokens=True)


CLASSES = {
    # type of the model -> class of its tokenizer, whether its pieces mark spaces (SentencePiece), what it is given
    "qwen2": ("Qwen2Tokenizer", False, {}),
    "qwen3": ("Qwen2Tokenizer", False, {"eos_token": "<|im_end|>", "extra_special_tokens": [*IM]}),
    "llama": ("LlamaTokenizer", True, {}), "mistral": ("LlamaTokenizer", True, {}),
    "gemma2": ("GemmaTokenizer", True, {}), "cohere": ("CohereTokenizer", False, {}),
    "gpt2": ("GPT2Tokenizer", False, {}), "gpt_neox": ("GPTNeoXTokenizer", False, {}),
}  # fmt: skip


@functools.cache
def pieces(with_spaces: bool) -> dict[str, Any]:
    """Vocabulary and merges, of bytes or of SentencePiece's kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not with_spaces:
        model = json.loads(trained_tokenizer())["model"]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        names = ["<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>", "<mask>", *(f"<0x{one:02X}>" for one in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False)
        tokenizer.train_from_iterator([CORPUS], trainer)
        model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


@pytest.mark.parametrize("left_out", ["nothing", "names", "all"])
@pytest.mark.parametrize("kind", CLASSES)
def test_folders_that_transformers_saved(tmp_path: Path, kind: str, left_out: str) -> None:
    """As they are, and with what an older folder leaves to the class of the tokenizer."""
    import transformers

    name, with_spaces, given = CLASSES[kind]
    getattr(transformers, name)(**pieces(with_spaces), **given).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in saved.items() if left_out == "nothing" or not key.endswith("_token")}
    settings = {**({} if left_out == "all" else kept), "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    agree(ModelSpec(name="m", folder=tmp_path, dtype="float32", context=None))


def test_the_tokens_that_decode_leaves_out() -> None:
    special = {0: "<s>", 7: "</s>", 9: "<far>"}
    tokenizer = ReadTokenizer(
        encode=lambda text: [], encode_whole=lambda text: [], decode=lambda ids: "".join(map(chr, ids)),
        ids={}, named={}, special=special, added=special, size=8, identity=b"",
    )  # fmt: skip
    ids = [-(2**40), -1, 0, 1, 6, 7, 8, 9, 2**40]
    assert tokenizer.left_out(np.asarray(ids)).tolist() == [token >= 8 or token in special for token in ids]
    assert tokenizer.runs([]) == []
    assert tokenizer.runs([1, 2]) == [([1, 2], False)]
    assert tokenizer.runs([1, 0, 7, 2]) == [([1], False), ([0, 7], True), ([2], False)]


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="has no tokenizer"):
        open_tokenizer(ModelSpec(name="m", folder=tmp_path, dtype="float32", context=None))
