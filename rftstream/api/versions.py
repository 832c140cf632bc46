"""A published version of a run, as a model that answers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer, open_renderer
from rftstream.models.vision.seeing import model_class
from rftstream.runs.folder import OpenRun
from rftstream.runs.published import model_of, read_published, write_model_folder

Messages = str | Sequence[Mapping[str, str]]
"""A user's message, or messages with role and content."""


class RunVersion:
    """A version of a run whose weights the store holds. `Run.version` makes it. The model is loaded once, by the first
    method that needs it."""

    def __init__(self, run: OpenRun, number: int | None) -> None:
        """None: the newest. ConfigError if its weights are not held."""
        self._run = run
        self._published = read_published(run)
        chosen = () if number is None else (number,)
        self._announced: WeightsAnnounced = self._published.choose(chosen, where="version")[0]

    @property
    def number(self) -> int:
        """Return the number of trained batches."""
        return self._announced.name.version

    def save(self, folder: str | Path) -> Path:
        """Write it as an ordinary Hugging Face model folder, as `rftstream weights export` does. Return the folder."""
        target = Path(folder)
        write_model_folder(self._published, self._announced, model_of(self._run), target)
        return target

    def load(self, device: str = "cpu") -> tuple[Any, Any]:
        """Return the model and the tokenizer, as transformers loads them."""
        model, tokenizer = self._loaded
        return model.to(device), tokenizer

    def chat(self, messages: Messages, **sampling: float) -> str:
        """Return an answer to a user's message, or to messages. `sampling`: as for `sample`."""
        return self.sample(messages, 1, **sampling)[0]

    def sample(self, prompt: Messages, n: int = 1, **sampling: float) -> list[str]:
        """Return `n` answers. A text gets the system prompt of the run's tasksets, if all have the same; each prompt
        gets the run's template. The settings are those of the run's [sampling]; `sampling` changes temperature, top_p,
        top_k, min_p or max_tokens."""
        import torch

        if unknown := [name for name in sampling if name not in _SETTINGS]:
            raise ConfigError(f"sample: unknown {unknown[0]!r}; known: {', '.join(_SETTINGS)}")
        own = replace(self._run.config.sampling, **sampling)  # type: ignore[arg-type]  # their names are checked
        model, _ = self._loaded
        renderer = self._renderer
        ids = renderer.render(_messages(prompt, self._run.config.shared_system))
        stops = sorted(renderer.stop_token_ids)
        is_greedy = own.temperature == 0
        drawn = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = torch.tensor([ids], device=model.device)
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=int(own.max_tokens),
            do_sample=not is_greedy,
            num_return_sequences=1 if is_greedy else n,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            **({} if is_greedy else drawn),
        )
        texts = [renderer.decode(_until(row[len(ids) :], stops)) for row in found.tolist()]
        answers = [_ended(text, own.stop) for text in texts]
        return answers * n if is_greedy else answers

    @cached_property
    def _renderer(self) -> Renderer:
        return open_renderer(model_of(self._run))

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with tempfile.TemporaryDirectory(prefix="rftstream-version-") as place:
            folder = self.save(Path(place) / "model")
            model = model_class(folder).from_pretrained(folder, dtype="auto").eval()
            return model, AutoTokenizer.from_pretrained(folder)

    def __repr__(self) -> str:
        """Return which version of which run it is."""
        return f"<version {self.number} of {self._run.run_id}>"


_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


def _until(ids: list[int], stops: Sequence[int]) -> list[int]:
    """Return the ids before the first one that ends a completion."""
    return ids[: next((i for i, one in enumerate(ids) if one in stops), len(ids))]


def _ended(text: str, stop: Sequence[str]) -> str:
    """Return the text to the end of the first stop string in it."""
    return text[: min((text.index(one) + len(one) for one in stop if one in text), default=len(text))]


def _messages(prompt: Messages, system: str | None) -> list[ChatMessage]:
    if isinstance(prompt, str):
        first = () if system is None else (ChatMessage(role="system", content=system),)
        return [*first, ChatMessage(role="user", content=prompt)]
    return [ChatMessage(role=one["role"], content=one["content"]) for one in prompt]
