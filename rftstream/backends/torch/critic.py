"""The critic: a network with one output at each token, beside the policy's, with its own masters and optimizer.

It starts as the trunk of the policy's model with a head that outputs 0, or as a reward model. Shapes: B rows of a
micro-batch, T padded tokens, N unmasked tokens, D width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rftstream.algorithms.base import Algorithm, CriticAlgorithm
from rftstream.backends.passes import Minibatch, Passes
from rftstream.backends.torch.inputs import Inputs
from rftstream.backends.torch.network import Network, NetworkSettings
from rftstream.backends.torch.paths import TrainerPath, load, path_of
from rftstream.errors import ConfigError
from rftstream.models import exactness
from rftstream.models.classifiers import HEADS
from rftstream.models.folders.files import read_json


class ValueModel(nn.Module):
    """A trunk and a head with one output, in the form that `Network` takes. `load_critic` makes it."""

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @property
    def base_model(self) -> Any:
        """The trunk, by the name that transformers gives it."""
        return self.trunk

    @property
    def config(self) -> Any:
        """The trunk's config."""
        return self.trunk.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.weight.device

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, by the name that transformers gives it."""
        return self.head

    def forward(self, **inputs: Any) -> Any:
        """Compute trunk and head."""
        output = self.trunk(**inputs)
        output.logits = self.head(output.last_hidden_state)
        return output

    @property
    def rftstream_path(self) -> TrainerPath:
        """The way in which the trunk is computed."""
        return replace(path_of(self.trunk), has_plain_head=True)


def load_critic(folder: Path, device: torch.device, *, vocabulary: int) -> ValueModel:
    """Load a critic in float32, without dropout. `vocabulary` is the policy's.

    ConfigError if the model cannot be a critic: it does not have exactly one output, has other tokens, or is no
    decoder."""
    trunk, head = _parts_of(folder, device)
    model = ValueModel(trunk, head).eval()
    known = int(trunk.config.get_text_config().vocab_size)
    if known < vocabulary:
        raise ConfigError(
            f"critic: {folder}: knows {known} tokens, expected the {vocabulary} of the policy; give a model with its "
            "tokenizer"
        )
    return model


def _parts_of(folder: Path, device: torch.device) -> tuple[Any, nn.Linear]:
    """Return trunk and head."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = str((read_json(folder / "config.json").get("architectures") or [""])[0])
    loader: Any = AutoModel
    if kind.endswith("ForSequenceClassification"):
        loader = AutoModelForSequenceClassification
    elif kind.endswith("ForTokenClassification"):
        loader = AutoModelForTokenClassification
    part = exactness.whole if loader is AutoModel else operator.attrgetter("base_model")
    try:
        model = load(loader, folder, device, part=part)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"critic: {folder}: cannot be read as a model: {error}; give another folder") from None
    if loader is AutoModel:
        head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return model, head
    found = next((one for name in HEADS if isinstance(one := getattr(model, name, None), nn.Linear)), None)
    if found is None or found.out_features != 1:
        outputs = "no linear head" if found is None else f"{found.out_features} outputs"
        raise ConfigError(f"critic: {folder}: a {kind} with {outputs}, expected a reward model with one")
    return model.base_model, found


class ValueNetwork(Network):
    """The critic's network: from a micro-batch to values."""

    model: ValueModel

    def __init__(self, model: ValueModel, settings: NetworkSettings) -> None:
        super().__init__(model, settings)

    def values(self, inputs: Inputs) -> Tensor:
        """Return the values of the text before each unmasked token: float32 [B, T], 0 at masked positions."""
        head = self.model.head
        with self._autocast():
            hidden_ND = self._hidden(inputs).flatten(0, 1)[inputs.sources_N]
        values_N = nn.functional.linear(hidden_ND.to(head.weight.dtype), head.weight, head.bias)[:, 0]
        zeros_BT = torch.zeros(inputs.rows.loss_mask_BT.shape, device=values_N.device, dtype=values_N.dtype)
        return zeros_BT.index_put((inputs.rows_N, inputs.places_N), values_N)


class CriticPasses(Passes):
    """The forward and backward passes of one batch through the critic, in as many steps as the policy takes."""

    _network: ValueNetwork

    def accumulate(
        self, minibatch: Minibatch, algorithm: Algorithm, backward: Callable[[Tensor], object] = Tensor.backward
    ) -> float:
        """Compute the value loss of one step, accumulate its gradients, and return the loss."""
        total = torch.zeros((), device=self._device)
        for inputs in minibatch.inputs:
            values_BT = self._network.values(inputs)
            loss, metrics = cast(CriticAlgorithm, algorithm).value_loss(values_BT, inputs.rows, minibatch.denominators)
            backward(loss)
            total += loss.detach()
            self._add(metrics)
            self._flops += self._network.flops(inputs, backward=True)
        self.num_tokens += minibatch.num_tokens
        self._losses.append(float(total))
        return self._losses[-1]

    def metrics(self, algorithm: Algorithm) -> dict[str, float]:
        """Return the critic's metrics of all steps so far."""
        means = {name: float(value) / max(self.num_tokens, 1.0) for name, value in self._sums.items()}
        return {"value_loss": sum(self._losses) / max(len(self._losses), 1), "tflop": self._flops / 1e12, **means}
