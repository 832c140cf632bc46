"""Folders of sequence classifiers: labels, context and padding, read from the config before anything is loaded.

This module imports neither torch nor transformers, so that `check` can inspect a reward model quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError
from rftstream.models.folders.files import digest_folder, read_json

CLASSIFIER = "ForSequenceClassification"
"""Suffix of the class names of transformers' sequence classifiers."""
TOKEN_CLASSIFIER = "ForTokenClassification"
"""Suffix of the class names of transformers' token classifiers."""
HEADS = ("score", "classifier")
"""Names that transformers gives to the head of models for classification."""
RENDERING_FILE = "rftstream_reward_model.json"
"""File beside the weights of a reward model that was trained here. It says how its texts ended: `{"rendering":
"turn"}`."""
NO_LIMIT = 1 << 24
"""Lengths from here on mean "no limit": tokenizers write absurdly large numbers for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClassifier:
    """A classifier that each scoring process keeps loaded, if it has the memory. Equal classifiers are loaded once."""

    folder: Path
    device: str
    dtype: str
    batch_size: int
    """Number of texts in one forward pass."""
    limit: int | None
    """Largest number of tokens in a text; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierFolder:
    """A sequence classifier on disk. `read_classifier` makes it."""

    folder: Path
    labels: tuple[str, ...]
    """Names of the outputs, in order."""
    context: int | None
    """Largest number of tokens that the model takes; None if its files do not say."""
    loader: str = "AutoModelForSequenceClassification"
    """The class of transformers that loads it."""
    rendering: str
    """How conversations end: `template`, as the chat template writes them, or `turn`, with the token that ends the last
    turn."""

    def place_of(self, label: int | str | None, where: str) -> int:
        """Return the index of a label among the outputs. ConfigError, whose message begins with `where`, if there is no
        such label, or if no label is named and there are several."""
        count, names = len(self.labels), ", ".join(self.labels)
        if label is None:
            if count != 1:
                raise ConfigError(
                    f"{where}.label: {self.folder} has {count} labels ({names}), expected one; set `label` to the name "
                    "or the number of the one that is the reward"
                )
            return 0
        if isinstance(label, str):
            if label not in self.labels:
                raise ConfigError(f"{where}.label: {self.folder} has no label {label!r}, known: {names}")
            return self.labels.index(label)
        if not 0 <= label < count:
            raise ConfigError(f"{where}.label: got {label}, expected below {count}, the labels of {self.folder}")
        return label

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of all files of the folder: weights, config, tokenizer and template."""
        return digest_folder(self.folder)


def read_classifier(folder: Path, where: str, *, of_tokens: bool = False) -> ClassifierFolder:
    """Return what a folder's files say about its classifier. With `of_tokens` the classifier may be a token classifier.

    ConfigError, whose message begins with `where`, if the folder does not exist, is no classifier, or has no weights
    that can be read without running code."""
    config = read_json(folder / "config.json")
    if not config:
        raise ConfigError(
            f"{where}: {folder}: found no config.json, expected a Hugging Face model folder; `hf download NAME "
            "--local-dir FOLDER` fetches one from the hub"
        )
    kind = str((config.get("architectures") or ["a model of no kind"])[0])
    is_of_tokens = of_tokens and kind.endswith(TOKEN_CLASSIFIER)
    if not kind.endswith(CLASSIFIER) and not is_of_tokens:
        raise ConfigError(
            f"{where}: {folder} is a {kind}, which has no classifier head, expected a ...{CLASSIFIER}; train one with "
            'algorithm = "reward_model", or name another folder'
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{where}: {folder}: has no weights, expected *.safetensors in it")
    limits = (
        config.get("max_position_embeddings"),
        read_json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < NO_LIMIT]
    rendering = read_json(folder / RENDERING_FILE).get("rendering", "template")
    return ClassifierFolder(
        folder=folder,
        labels=_labels(config),
        context=min(known, default=None),
        loader=f"AutoModel{TOKEN_CLASSIFIER if is_of_tokens else CLASSIFIER}",
        rendering=str(rendering),
    )


def as_classifier(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a model's config as the config of a classifier with one output. ConfigError, whose message begins with
    `where`, if the model has a head with several outputs.

    Padding marks where a text ends. A model without a padding token uses its end-of-text token, as other trainers
    do."""
    kind = str((config.get("architectures") or [""])[0])
    one_label = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    if kind.endswith(CLASSIFIER):
        if (count := len(_labels(dict(config)))) != 1:
            raise ConfigError(f"{where}: has a head with {count} labels, expected one; begin with another model")
        one_label = {}
    for ending in ("ForCausalLM", "LMHeadModel", "Model"):
        if kind.endswith(ending):
            kind = kind.removesuffix(ending) + CLASSIFIER
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    padding = config.get("pad_token_id")
    if not kind or (padding is None and end is None):
        raise ConfigError(f"{where}: names no architecture, or neither padding nor end, expected both in config.json")
    plain = {key: value for key, value in config.items() if key != "num_labels"}
    return {**plain, "architectures": [kind], **one_label, "pad_token_id": end if padding is None else padding}


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels; transformers' own names if the config has none."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2)))
