"""Small new models of any family of transformers, with random weights under the names of the family's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError
from rftstream.models.folders.tiny_copy import Sizes, tiny_config
from rftstream.models.offload import held_tensors

if TYPE_CHECKING:
    from rftstream.config.sections import MakeModel

NEEDED: Mapping[str, Mapping[str, Any]] = {
    **{family: {"layer_types": ["conv", "full_attention"] * 16} for family in ("lfm2", "lfm2_moe")},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}
"""Settings of a family's config whose defaults lack kinds of layers that its models have."""
EMBEDDING_STD = 0.02
"""Standard deviation of embeddings. They are small, so that the first policy is nearly uniform."""


def write_family(folder: Path, make: MakeModel, seed: int, *, vocabulary: int, ids: Mapping[str, int | None]) -> None:
    """Write config and weights of a small model of `make.family`. ConfigError if transformers has no causal language
    model of that name, or cannot make it at these sizes."""
    from transformers import logging as logs
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

    if make.family not in FAMILIES:
        raise ConfigError(
            f"model.make.family: transformers has no causal language model {make.family!r}; "
            f"{suggest(make.family, sorted(FAMILIES))}"
        )
    sizes = Sizes(
        width=make.width,
        heads=make.heads,
        vocabulary=vocabulary,
        positions=make.context,
        layers=make.layers,
        window=None,
        cap=None,
    )
    level = logs.get_verbosity()
    logs.set_verbosity_error()  # type: ignore[no-untyped-call]  # it tells of every number that is not the usual one
    try:
        usual: Any = transformers.CONFIG_MAPPING[make.family](**copy.deepcopy(dict(NEEDED.get(make.family, {}))))
        config = tiny_config(usual, sizes)
        config.update({**ids, "dtype": "float32"})
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            _draw(model)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        transformers.GenerationConfig(**ids, do_sample=True, temperature=1.0).save_pretrained(folder)  # type: ignore[no-untyped-call]
        tensors = revert_weight_conversion(model, held_tensors(model))  # save_pretrained would import deepspeed
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.make.family: transformers does not make a {make.family!r} of width {make.width} with {make.heads} "
            f"heads: {type(error).__name__}: {error}; try other sizes or another family"
        ) from error
    finally:
        logs.set_verbosity(level)


@torch.no_grad()
def _draw(model: Any) -> None:
    """Draw matrices as N(0, 1/fan_in), and embeddings and head small. Norms, decays and biases stay as the family makes
    them."""
    small = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    small += [head for head in [model.get_output_embeddings()] if head is not None]
    embeddings = {id(module.weight) for module in small}
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, EMBEDDING_STD if id(parameter) in embeddings else parameter.shape[-1] ** -0.5)
