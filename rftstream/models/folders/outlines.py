"""Models without weights, as transformers would load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rftstream.errors import ConfigError


def outline_of(loader: Any, folder: Path) -> Any:
    """Return a model without weights, as a class of transformers loads it from a folder. ConfigError for an encoder
    model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.path: {folder}: {config.model_type} is an encoder with a decoder, expected a decoder alone, which "
            "predicts a text from its beginning; use a causal language model"
        )
    with torch.device("meta"):
        return loader.from_config(config)
