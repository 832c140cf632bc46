"""The size of a model, from its config and the headers of its weights. Nothing of the model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rftstream.config.sections import LoraSection
from rftstream.models.folders.files import read_json
from rftstream.models.folders.folder import tensor_headers

SERVED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder, from its config and the headers of its weights. `of` makes it."""

    parameters: int
    trained: int
    """Parameters that are trained: those of the adapters, if the run trains adapters."""
    adapted: int
    """Parameters of the matrices that have adapters."""
    layers: int
    width: int
    inner: int
    """Width of the MLP."""
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    vocabulary: int

    @staticmethod
    def of(folder: Path, lora: LoraSection | None) -> ModelSizes:
        """Read the sizes of the model in a folder."""
        config = read_json(folder / "config.json")
        config = config.get("text_config", config)
        shapes = _shapes(folder)
        parameters = sum(math.prod(shape) for shape in shapes.values())
        adapted = [] if lora is None else [shape for name, shape in shapes.items() if _has_adapter(name, shape, lora)]
        rank = 0 if lora is None else lora.rank
        heads = int(config.get("num_attention_heads") or 1)
        width = int(config.get("hidden_size") or 0)
        head_width = int(config.get("head_dim") or width // heads)
        return ModelSizes(
            parameters=parameters,
            trained=parameters if lora is None else sum(rank * (rows + columns) for rows, columns in adapted),
            adapted=sum(math.prod(shape) for shape in adapted),
            layers=int(config.get("num_hidden_layers") or 0),
            width=width,
            inner=int(config.get("intermediate_size") or 4 * width),
            queries=heads * head_width,
            keys=int(config.get("num_key_value_heads") or heads) * head_width,
            vocabulary=int(config.get("vocab_size") or 0),
        )

    def activation_bytes(self, *, half: bool, recomputed: bool) -> int:
        """Return the bytes that the backward pass needs for each token.

        They are, for every layer, two norms in float32 (their input, and it normalised). In the type of matrix products
        they are the inputs of all matrices; queries, keys, values and output of attention; and the MLP's gate before
        and after its activation, its other half and their product. With `recomputed` they are the input of every layer,
        and one layer whole.
        """
        of_products = 3 * self.width + 2 * self.queries + 2 * self.keys + 4 * self.inner
        layer = 4 * (4 * self.width) + (2 if half else 4) * of_products
        return 4 * self.width * self.layers + layer if recomputed else layer * self.layers

    def cache_bytes(self, dtype: str) -> int:
        """Return the bytes of keys and values of a token."""
        return 2 * self.keys * self.layers * SERVED_BYTES[dtype]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the folder's safetensors files; empty if there are none."""
    return {
        name: tuple(tensor["shape"])
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in tensor_headers(file).items()
        if name != "__metadata__"
    }


def _has_adapter(name: str, shape: tuple[int, ...], lora: LoraSection) -> bool:
    module = name.removesuffix(".weight")
    if len(shape) != 2 or module == name:
        return False
    if lora.targets == "all-linear":
        return not module.endswith(("lm_head", "embed_tokens", "wte", "wpe"))
    return any(module == target or module.endswith(f".{target}") for target in lora.targets)
