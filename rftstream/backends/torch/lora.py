"""Adapters on a model, by PEFT: only low-rank matrices beside its linear layers are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rftstream.backends.torch.quantized import FourBitLinear
from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError, pip_install
from rftstream.models.spec import ModelSpec
from rftstream.weights.adapters import PREFIX, whole_tensors, write_adapter
from rftstream.weights.checkpoint_names import CheckpointNames
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import write_tensors

ADAPTER = "adapter"
"""Folder in an exported model that holds the adapters alone."""


def require() -> None:
    """Raise ConfigError if the package peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        command = pip_install("rftstream[lora]")
        raise ConfigError(f"model.lora: the package peft is not installed; {command} where the trainer runs") from None


def add_adapters(
    model: Any, spec: ModelSpec, names: CheckpointNames, *, without: str | None = None
) -> dict[str, nn.Parameter]:
    """Add adapters drawn by torch's generator, and freeze all other parameters. Return the adapters' parameters by
    their names in adapter files. `names`: those of the model. `without`: the name of a module that gets no adapters."""
    require()
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    lora = spec.lora
    assert lora is not None
    layers = [name for name in _targets(model, spec) if without is None or not name.startswith(f"{without}.")]
    model.requires_grad_(False)
    holder = nn.Module()  # without a config, so that PEFT does not put adapters on a mixture's experts, too
    holder.policy = model
    inject_adapter_in_model(
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            target_modules=[f"policy.{name}" for name in layers],
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        ),
        holder,
    )
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert all(".lora_" in name for name in trained)
    return {_name_in_file(name, names): one for name, one in trained.items()}


def _name_in_file(name: str, names: CheckpointNames) -> str:
    """Return the name of an adapter's matrix, `LAYER.lora_A.default.weight`, in adapter files."""
    layer, _, matrix = name.partition(".lora_")
    stem = names.adapted(f"{layer}.weight").removesuffix(".weight")
    return f"{PREFIX}{stem}.lora_{matrix.replace('.default.', '.')}"


def hold_frozen(model: Any, dtype: torch.dtype) -> None:
    """Convert the matrices that have adapters to this dtype. If products are computed in it anyway, that halves their
    memory."""
    for layer in _adapted(model):
        if not isinstance(layer.get_base_layer(), FourBitLinear):
            layer.get_base_layer().to(dtype)


def _targets(model: Any, spec: ModelSpec) -> list[str]:
    """Return the names of the layers that get adapters. ConfigError if one cannot have them."""
    from transformers.pytorch_utils import Conv1D

    assert spec.lora is not None
    head = model.get_output_embeddings()
    if isinstance(spec.lora.targets, str):
        modules = model.named_modules()
        return [name for name, one in modules if isinstance(one, nn.Linear | Conv1D) and one is not head]
    layers: list[str] = []
    for target in spec.lora.targets:
        found = {name: one for name, one in model.named_modules() if name == target or name.endswith(f".{target}")}
        if not found:
            linear = {
                name.rpartition(".")[2]
                for name, one in model.named_modules()
                if type(one) in (nn.Linear, FourBitLinear, Conv1D)
            }
            raise ConfigError(
                f"model.lora.targets: {spec.name} has no layer {target!r}; {suggest(target, sorted(linear))}"
            )
        for name, one in found.items():
            if one is head or type(one) not in (nn.Linear, FourBitLinear, Conv1D):
                what = "the head" if one is head else f"of the kind {type(one).__name__}"
                raise ConfigError(f"model.lora.targets: {name} is {what}, expected a linear layer within the model")
        layers += found
    return layers


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Compute without the adapters inside this context."""
    layers = list(_adapted(model))
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextlib.contextmanager
def adapters_as(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with other adapters inside this context, for passes without gradients."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def write_merged(folder: Path, spec: ModelSpec, adapters: Mapping[str, RawTensor], names: Iterable[str]) -> None:
    """Write the merged weights `names` as a model, and the adapters separately."""
    whole = whole_tensors(spec, adapters, names, where=str(folder))
    write_tensors(folder / "model.safetensors", whole, {"format": "pt"})
    (folder / ADAPTER).mkdir()
    write_adapter(folder / ADAPTER, spec, adapters)


def _adapted(model: Any) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
