"""A sequence classifier in the verifier's own process: conversations become tokens, and many are computed in one
forward pass.

Shapes: B texts of a pass, T tokens of the longest, L labels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError, RewardError
from rftstream.models.classifiers import HEADS, ClassifierFolder
from rftstream.models.devices import check_device
from rftstream.models.rendering import HfRenderer
from rftstream.models.spec import ModelSpec
from rftstream.models.tokenizer import Tokenizer, open_tokenizer
from rftstream.rewards.base import RewardInput

WHERE = "rewards.reward_model"


class ClassifierTexts:
    """Makes a classifier's input tokens: of a conversation with the folder's chat template, or of a plain text.
    `rewards.reward_model` makes it."""

    def __init__(
        self, classifier: ClassifierFolder, *, text: str | None, chat_template: str | None, rendering: str | None
    ) -> None:
        """ConfigError if the folder has no chat template and there is no `text` to use instead."""
        self._folder = classifier.folder
        self._rendering = rendering or classifier.rendering
        self._renderer: HfRenderer | None = None
        if text is None:
            try:
                self._renderer = HfRenderer(_spec(classifier.folder, chat_template))
            except ConfigError as error:
                raise ConfigError(f'{WHERE}: {error}; or set `text`, e.g. "{{prompt}}\\n{{completion}}"') from None

    def of_item(self, item: RewardInput, text: str) -> list[int]:
        """Return the tokens of a rollout. `text`: the filled-in text setting, if there is one. RewardError if the chat
        template or the tokenizer refuses the rollout."""
        if self._renderer is None:
            return list(_tokenizer(self._folder).encode_whole(text))
        messages = [
            ChatMessage(
                role=message["role"], content=message["content"], tool_calls=tuple(message.get("tool_calls", ()))
            )
            for message in item.messages
        ]
        try:
            if self._rendering == "template":
                return list(self._renderer.render_whole(messages))
            while messages and messages[-1].role != "assistant":
                messages.pop()  # the last message is an environment's
            if not messages:
                raise RewardError(
                    "reward_model: the conversation has no turn of the assistant's, expected one to score"
                )
            prompt, said = self._renderer.render_turn(messages)
            return [*prompt, *said]
        except ConfigError as error:
            raise RewardError(f"reward_model: {error}") from None


class LocalClassifier:
    """The classifier in a folder. `rewards.reward_model` makes it, opens it once, and calls it for many texts at a
    time."""

    def __init__(self, classifier: ClassifierFolder, *, device: str, dtype: str, threads: int, batch_size: int) -> None:
        self._classifier = classifier
        self._settings = device, dtype, threads
        self._batch_size = batch_size
        self._model: Any = None

    def open(self) -> None:
        """Load the model. ConfigError if the folder cannot be read as a classifier."""
        self._model = _load(self._classifier.folder, self._classifier.loader, *self._settings)

    def logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the raw outputs for each text, float32 [L]. RewardError as in `in_batches`."""
        return self.in_batches(
            texts, lambda ids_BT, mask_BT: self._model(input_ids=ids_BT, attention_mask=mask_BT).logits
        )

    @property
    def model(self) -> Any:
        """The model; None before it is opened."""
        return self._model

    def in_batches(self, texts: Sequence[Sequence[int]], compute: Callable[[Any, Any], Any]) -> list[np.ndarray]:
        """Return for each text the result of `compute`, which gets ids and attention mask [B, T]: float32 [L], or [T,
        L] without padding. RewardError for an unknown token. Texts of similar lengths are computed together, to need
        little padding."""
        import torch

        if self._model is None:
            self.open()
        config = self._model.config.get_text_config()
        most = max(max(text) for text in texts)
        if most >= config.vocab_size:
            raise RewardError(f"reward_model: knows {config.vocab_size} tokens, got token {most}; another tokenizer?")
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        size = 1 if config.pad_token_id is None else self._batch_size
        result: list[np.ndarray] = [np.zeros(0, np.float32)] * len(texts)
        for begin in range(0, len(order), size):
            places = order[begin : begin + size]
            ids_BT, mask_BT = _padded([texts[place] for place in places], config.pad_token_id or 0)
            device = self._model.device
            with torch.no_grad():
                found_B = compute(torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device))
            for place, found in zip(places, found_B.float().cpu().numpy(), strict=True):
                result[place] = found if found.ndim == 1 else found[: len(texts[place])]
        return result


class StepClassifier:
    """The classifier in a folder, read at several tokens of a text: its output for the text so far. A process reward
    model is such a classifier, of sequences or of tokens. `rewards.reward_model` makes it, opens it once, and calls
    it."""

    def __init__(self, local: LocalClassifier) -> None:
        self._local = local
        self._head: Any = None

    def open(self) -> None:
        """Load the model. ConfigError if its output for the beginning of a text depends on later tokens."""
        import torch

        self._local.open()
        model = self._local.model
        found = (getattr(model, name, None) for name in HEADS)
        self._head = next((one for one in found if isinstance(one, torch.nn.Linear)), None)
        if self._head is None or not self._reads_along():
            raise ConfigError(
                f"{WHERE}.steps: {model.name_or_path}: what it says of a step depends on what comes later, expected a "
                "decoder with a linear head; leave `steps` out, or use another model"
            )

    def logits(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs at each token of each text, float32 [T, L]."""
        if self._head is None:
            self.open()
        return self._local.in_batches([text.tolist() for text in texts], self._along)

    def _along(self, ids_BT: Any, mask_BT: Any) -> Any:
        return self._head(self._local.model.base_model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state)

    def _reads_along(self) -> bool:
        """Return whether the output at a token equals the output for the text up to that token. This is tried."""
        import torch

        one_T, other_T = [1, 2, 3, 1], [1, 2, 3, 2]
        found, others = self._local.in_batches([one_T, other_T], self._along)
        if not np.allclose(found[:3], others[:3], rtol=1e-2, atol=1e-2):
            return False
        with torch.no_grad():
            whole = self._local.model(input_ids=torch.tensor([one_T], device=self._local.model.device)).logits
        whole_L = whole[0, -1] if whole.ndim == 3 else whole[0]
        return bool(np.allclose(found[-1], whole_L.float().cpu().numpy(), rtol=1e-2, atol=1e-2))


def _padded(texts: Sequence[Sequence[int]], padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and attention mask, int64 [B, T], padded on the right."""
    longest = max(map(len, texts))
    ids_BT = np.full((len(texts), longest), padding, np.int64)
    mask_BT = np.zeros((len(texts), longest), np.int64)
    for row, text in enumerate(texts):
        ids_BT[row, : len(text)], mask_BT[row, : len(text)] = text, 1
    return ids_BT, mask_BT


def _spec(folder: Path, chat_template: str | None) -> ModelSpec:
    return ModelSpec(name=folder.name, folder=folder, dtype="float32", context=None, chat_template=chat_template)


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    return open_tokenizer(_spec(folder, None))


def _load(folder: Path, loader_name: str, device: str, dtype: str, threads: int) -> Any:
    """Load a classifier. ConfigError if it cannot be read, or if its head is not in the files: transformers would
    initialise a random one."""
    check_device(device, where=f"{WHERE}.device")
    model, missing = load_model(folder, loader_name, device, dtype, threads, f"{WHERE}.path", "a classifier")
    if missing:
        raise ConfigError(
            f"{WHERE}.path: {folder}: its weights lack {', '.join(missing[:3])}, which would be random numbers; name a "
            "folder that was saved with its classifier head"
        )
    config = model.config.get_text_config()
    if config.pad_token_id is None and isinstance(config.eos_token_id, int):
        config.pad_token_id = config.eos_token_id  # as trainers of reward models do; the token marks where a text ends
    return model


@functools.cache
def load_model(
    folder: Path, loader_name: str, device: str, dtype: str, threads: int, where: str, what: str
) -> tuple[Any, Sequence[str]]:
    """Load a transformers model, once for all tasksets of a process that use it, and return it with the names of
    weights missing in its files. ConfigError, whose message begins with `where`, if it cannot be read as `what`."""
    import torch
    import transformers
    from transformers import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)  # each child has its own work
    loader: Any = getattr(transformers, loader_name)
    wanted = {"dtype": getattr(torch, dtype), "local_files_only": True, "use_safetensors": True}
    try:
        model, found = loader.from_pretrained(folder, output_loading_info=True, **wanted)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{where}: {folder}: cannot be read as {what}: {error}") from None
    return model.to(device).eval(), sorted(found["missing_keys"])
