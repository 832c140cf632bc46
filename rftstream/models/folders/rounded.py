"""Model folders whose linear layers hold only values that four bits can tell apart (QLoRA, arXiv 2305.14314).

The trainer of such a run holds these layers in four bits. Everybody else reads the rounded folder as any other one, so
samplers, merged weights and exports have exactly the numbers that the trainer computes with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftstream.errors import ConfigError, pip_install
from rftstream.models.folders.files import read_json, whole_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from rftstream.models.spec import ModelSpec

NF4 = "nf4"
BLOCK_SIZE = 64
"""Values that share a scale."""


def require(setting: str) -> None:
    """Raise ConfigError, which names the setting that needs it, if the package bitsandbytes is not installed."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        command = pip_install("rftstream[quantize]")
        raise ConfigError(f"{setting}: the package bitsandbytes is not installed; {command}") from None


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the layers of a model that four bits hold: all linear ones but the head. ConfigError if there are none."""
    from torch import nn

    head = model.get_output_embeddings()
    found = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}
    if not found:
        raise ConfigError(f"model.quantize: {type(model).__name__} has no linear layers; leave the setting out")
    return found


def round_folder(spec: ModelSpec, target: Path) -> None:
    """Write the rounded form of the model in `spec.folder` into `target`, which appears when it is complete."""
    if (target / "config.json").is_file():
        return
    require("model.quantize")
    with whole_folder(target, sign="config.json", setting="model.quantize") as folder:
        _write(spec, folder)


def _write(spec: ModelSpec, target: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from rftstream.models.folders.outlines import outline_of
    from rftstream.models.vision.seeing import model_class

    outline, dtype = outline_of(model_class(spec.folder), spec.folder), getattr(torch, spec.dtype)
    wanted = {f"{name}.weight" for name in linear_layers(outline)}
    for path in sorted(spec.folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            for name in tensors.keys() & wanted:
                tensors[name] = rounded(tensors[name].to(dtype))
            wanted -= tensors.keys()
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
    if wanted:
        raise ConfigError(
            f"model.quantize: {spec.folder} has no weight {min(wanted)!r}, which transformers expects there; load the "
            "model by transformers, save it, and use that folder"
        )
    write_json(target / "config.json", {**read_json(target / "config.json"), "dtype": spec.dtype})


def rounded(weight: Tensor) -> Tensor:
    """Return the values that four bits give for these, in their dtype. Rounded values are not changed any more."""
    return whole(*in_four_bits(weight), weight.dtype).view(weight.shape)


def in_four_bits(weight: Tensor) -> tuple[Tensor, Any]:
    """Return the packed values, uint8, and bitsandbytes' state with the scales. It gets one long row of float32: on
    CPUs bitsandbytes 0.50 takes wrong scales for rows of some lengths."""
    from bitsandbytes.functional import quantize_4bit

    packed: tuple[Tensor, Any] = quantize_4bit(
        weight.float().flatten(), blocksize=BLOCK_SIZE, quant_type=NF4, compress_statistics=False
    )
    return packed


def whole(packed: Tensor, state: Any, dtype: Any) -> Tensor:
    """Return the values of a weight in four bits as one row, in the dtype of its folder."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state).to(dtype)
