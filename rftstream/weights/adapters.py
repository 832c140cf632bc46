"""LoRA: versions that consist of adapters, and the full weights that they make with the model that they belong to.

W' = W + alpha / rank * B A, in float32, rounded to the served dtype. W' depends only on the model folder and the
adapters, not on earlier weights. So it does not matter which versions a reader has seen.

Adapters are stored under the names that PEFT uses in its files. `base_model.model.NAME.lora_A.weight` [rank, in] and
`...lora_B.weight` [out, rank] belong to the model's `NAME.weight` [out, in]. Layers of GPT-2's kind hold their matrices
transposed, [in, out]; there B A is transposed, too."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rftstream.errors import ConfigError, WeightsError
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import RawTensor, write_snapshot

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def whole_tensors(
    spec: ModelSpec, tensors: Mapping[str, RawTensor], names: Iterable[str], *, where: str
) -> Mapping[str, RawTensor]:
    """Return all of the model's weights, each computed when it is requested. If the model has no adapters, return
    `tensors` itself.

    WeightsError unless the tensors are adapters of this model."""
    return tensors if spec.lora is None else _Merged(spec, tensors, names, where=where)


def merged_tensors(spec: ModelSpec, tensors: Mapping[str, RawTensor], *, where: str) -> Mapping[str, RawTensor]:
    """Return the weights that have adapters, each computed when it is requested.

    WeightsError unless the tensors are adapters of this model. The resulting tensors need no further check."""
    return _Merged(spec, tensors, None, where=where)


def write_adapter(folder: Path, spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
    """Write an adapter into an existing folder, in the form that PEFT and engines load."""
    assert spec.lora is not None
    targets = spec.lora.targets
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_name(spec.folder),
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": bool(transposed_weights(spec.folder)),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        write_snapshot(file, tensors, {"format": "pt"})


def _base_name(folder: Path) -> str:
    """Return what PEFT loads the model by: its name on the hub, if it was fetched from there, else its folder."""
    fetched = re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+$", (whole := folder.resolve()).as_posix())
    return f"{fetched[1]}/{fetched[2]}" if fetched else str(whole)


class _Merged(Mapping[str, RawTensor]):
    """The weights W', each computed from the model folder and a pair of adapters when it is requested."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, RawTensor], names: Iterable[str] | None, *, where: str
    ) -> None:
        assert spec.lora is not None
        self._spec, self._scale = spec, spec.lora.alpha / spec.lora.rank
        self._pairs = _pairs(tensors, spec.lora.rank, where)
        self._names = dict.fromkeys(sorted(self._pairs if names is None else names))
        self._base = _base(spec)
        self._transposed = transposed_weights(spec.folder)
        for name in {*self._names, *self._pairs}:
            if name not in self._base:
                raise WeightsError(f"{where}: {name!r} is not in {spec.folder}; are they adapters of another model?")
        for name, (a, b) in self._pairs.items():
            made, expected = [b.shape[0], a.shape[1]], self._base[name][1]
            if name in self._transposed:
                made.reverse()
            if made != expected:
                raise WeightsError(
                    f"{where}: adapters of {name} make {made}, expected {expected}; are they of another model?"
                )

    def __getitem__(self, name: str) -> RawTensor:
        import torch
        from safetensors import safe_open

        from rftstream.weights.tensors import SERVED, as_tensor, raw

        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._base[name][0], framework="pt") as opened:
            weight = opened.get_tensor(name)
        pair = self._pairs.get(name)
        if pair is not None:
            a, b = (as_tensor(adapter).to(torch.float32) for adapter in pair)
            weight = weight.to(torch.float32)
            (weight.T if name in self._transposed else weight).addmm_(b, a, alpha=self._scale)
        return raw(weight.to(SERVED[self._spec.dtype]))

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the default of Mapping would compute the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@functools.cache
def transposed_weights(folder: Path) -> frozenset[str]:
    """Return the names of a model's weights that are [in, out]. The shapes of square matrices do not tell."""
    from transformers.pytorch_utils import Conv1D

    from rftstream.models.folders.outlines import outline_of
    from rftstream.models.vision.seeing import model_class

    modules = outline_of(model_class(folder), folder).named_modules()
    return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, Conv1D))


def _pairs(tensors: Mapping[str, RawTensor], rank: int, where: str) -> dict[str, tuple[RawTensor, RawTensor]]:
    """Return weight name in the model -> A and B."""
    stems = {name.removesuffix(suffix) for name in tensors for suffix in SUFFIXES if name.endswith(suffix)}
    whole = {f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES}
    if odd := sorted(tensors.keys() ^ whole):
        problem = "is missing" if odd[0] in whole else "is not one of an adapter"
        raise WeightsError(f"{where}: {odd[0]!r} {problem}, expected pairs of {' and '.join(SUFFIXES)}")
    pairs = {}
    for stem in stems:
        a, b = (tensors[f"{stem}{suffix}"] for suffix in SUFFIXES)
        if not stem.startswith(PREFIX) or len(a.shape) != 2 or len(b.shape) != 2 or {a.shape[0], b.shape[1]} != {rank}:
            raise WeightsError(
                f"{where}: {stem!r} has adapters {list(a.shape)} and {list(b.shape)}, expected a name that begins with "
                f"{PREFIX} and rank {rank}"
            )
        pairs[f"{stem.removeprefix(PREFIX)}.weight"] = (a, b)
    return pairs


def _base(spec: ModelSpec) -> dict[str, tuple[Path, list[int]]]:
    """Return name -> file in the model folder with the weight, and its shape."""
    from safetensors import safe_open

    found: dict[str, tuple[Path, list[int]]] = {}
    for path in sorted(spec.folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            found |= {name: (path, opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if not found:
        raise ConfigError(f"model.lora: {spec.folder} has no safetensors, expected the weights that adapters are for")
    return found
