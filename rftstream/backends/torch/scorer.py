"""A sequence classifier with one output in place of the policy, which `algorithm = "reward_model"` trains.

It is the critic's value model, read once after each text. Its weights have the names of transformers' own class, so
that published and exported weights are an ordinary classifier. Shapes: B rows, T padded tokens.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.torch.critic import ValueModel, ValueNetwork
from rftstream.backends.torch.inputs import Inputs
from rftstream.backends.torch.network import NetworkSettings
from rftstream.backends.torch.paths import load
from rftstream.errors import ConfigError
from rftstream.models.classifiers import HEADS, as_classifier
from rftstream.models.folders.files import read_json
from rftstream.models.folders.folder import loading
from rftstream.models.spec import ModelSpec
from rftstream.weights.checkpoint_names import CheckpointNames, names_of


def load_scorer(
    spec: ModelSpec, device: torch.device
) -> tuple[ValueModel, Mapping[str, nn.Parameter], CheckpointNames]:
    """Load a classifier with one output in float32, without dropout, and return it with its parameters and their names
    in the checkpoint. A model without a head gets one that outputs 0.

    ConfigError if transformers has no such classifier, or if its output is not that of a linear head on a decoder."""
    from transformers import AutoModelForSequenceClassification
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader: Any = AutoModelForSequenceClassification
    wanted = as_classifier(read_json(spec.folder / "config.json"), where=f"model.path: {spec.folder}")
    with loading(spec), _quiet():
        whole, found = load(
            loader,
            spec.folder,
            device,
            part=operator.attrgetter("base_model"),
            num_labels=1,
            pad_token_id=wanted["pad_token_id"],
            output_loading_info=True,
        )
    if type(whole).__name__ != wanted["architectures"][0]:
        raise ConfigError(
            f"model.path: {spec.folder}: as a classifier it is a {type(whole).__name__}, expected a "
            f"{wanted['architectures'][0]}; use another model"
        )
    head = next((one for name in HEADS if isinstance(one := getattr(whole, name, None), nn.Linear)), None)
    if head is None or head.out_features != 1:
        raise ConfigError(f"model.path: {spec.folder}: has no linear head with one output as a classifier")
    ours = {name for name, one in whole.named_parameters() if one is head.weight or one is head.bias}
    if odd := sorted(set(found["missing_keys"]) - ours):
        raise ConfigError(f"model.path: {spec.folder}: its weights lack {odd[0]}, which the classifier has")
    if found["missing_keys"]:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    model = ValueModel(whole.base_model, head)
    if not _is_plain(whole, model):
        raise ConfigError(
            f"model.path: {spec.folder}: a classifier of its kind does more than a linear head on a decoder, expected "
            "no more; use another model"
        )
    return model, dict(whole.named_parameters()), names_of(whole, spec.folder, added=ours)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from warning that a head is missing: the head is made here, on purpose."""
    from transformers import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.no_grad()
def _is_plain(whole: Any, model: ValueModel) -> bool:
    """Return whether the classifier's output is that of the head at the last token. This is tried."""
    probe_BT = torch.tensor([[5, 3, 4, 2, 1]], device=model.device) % int(model.config.get_text_config().vocab_size)
    kept = model.head.weight.clone()
    model.head.weight.copy_(torch.linspace(-1, 1, kept.numel(), device=kept.device).reshape(kept.shape))
    said, own = whole(input_ids=probe_BT, use_cache=False).logits, model(input_ids=probe_BT, use_cache=False).logits
    model.head.weight.copy_(kept)
    last = int((probe_BT[0] != model.config.get_text_config().pad_token_id).nonzero().max())
    return torch.allclose(said[0, 0], own[0, last, 0], rtol=1e-3, atol=1e-3)


class ScoreNetwork(ValueNetwork):
    """The network of a classifier: from a micro-batch to the score of the text before each unmasked token."""

    def __init__(self, model: ValueModel, settings: NetworkSettings) -> None:
        super().__init__(model, settings)
        self._padding = model.config.get_text_config().pad_token_id

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return the scores as logprobs, and zeros as entropies, float32 [B, T]."""
        scores_BT = self.values(inputs).float()
        return scores_BT, torch.zeros_like(scores_BT)

    def placed(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return the rows with their one unmasked token after the last token that is not padding. transformers reads a
        text's score there; if the end-of-turn token serves as padding, that place is before it."""
        return [self._placed(row) if row.loss_mask.any() else row for row in rows]

    def _placed(self, row: TrainingRow) -> TrainingRow:
        real = np.flatnonzero(row.token_ids[:-1] != self._padding)
        mask_T = np.zeros_like(row.loss_mask)
        mask_T[int(real[-1]) + 1 if len(real) else 1] = 1
        return replace(row, loss_mask=mask_T)
