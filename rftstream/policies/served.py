"""The dtypes and shapes of a model's served weights, and the check of a version's tensors against them."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.errors import WeightsError
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import RawTensor

Parameters = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> safetensors' dtype, and shape."""


def served_parameters(model: ModelSpec) -> tuple[Parameters, int]:
    """Return the dtypes and shapes of the tensors in a version of the model, and the size of its vocabulary. No memory
    is allocated for weights."""
    import torch
    from transformers import AutoConfig

    from rftstream.models.vision.seeing import model_class
    from rftstream.weights.checkpoint_names import names_of

    config = AutoConfig.from_pretrained(model.folder)
    with torch.device("meta"):
        shell = model_class(model.folder).from_config(config)
    return names_of(shell, model.folder).layout(model.dtype), config.get_text_config().vocab_size


def check_tensors(tensors: Mapping[str, RawTensor], parameters: Parameters, *, where: str) -> None:
    """Raise WeightsError unless the tensors are exactly those of the model."""
    if odd := sorted(tensors.keys() ^ parameters.keys()):
        side = "is missing" if odd[0] in parameters else "is not of this model"
        raise WeightsError(f"{where}: {odd[0]!r} {side} ({len(odd)} names differ); is it another model's?")
    for name, (dtype, shape) in parameters.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.shape != shape:
            raise WeightsError(
                f"{where}: {name} is {tensor.dtype} {tensor.shape}, expected {dtype} {shape}; is it another model's?"
            )
