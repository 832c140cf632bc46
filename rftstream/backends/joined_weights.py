"""The weights that a joined training loop hands in and gets: between the names of a loaded model and those of its
checkpoint, under which versions are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.fake import FakeBackend
from rftstream.desk import AnswerRefused
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import FAKE
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import SERVED, as_tensor, raw

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before every name."""


class JoinedWeights(Protocol):
    """Names, shapes and version 0 of a model's weights. JoinedBackend makes one when it is opened."""

    initial: Mapping[str, RawTensor]
    """Version 0, as it is served."""
    dtype: torch.dtype
    """The dtype in which it is served."""

    def served(self, weights: Mapping[str, Any]) -> dict[str, RawTensor]:
        """Return a copy of a loop's weights, as they are served. AnswerRefused if they are not those of the model."""

    def state(self, served: Mapping[str, RawTensor]) -> dict[str, Tensor]:
        """Return a version's weights by the names of the loaded model."""


def weights_of(model: ModelSpec, seed: int) -> JoinedWeights:
    """Return the weights of a run's model. ConfigError for a model that no joined loop can train."""
    if model.lora is not None or model.as_classifier:
        what = "adapters (model.lora)" if model.lora is not None else "a classifier"
        raise ConfigError(f"trainer.backend: a joined loop trains whole models, found {what}; use the backend 'torch'")
    return FakeWeights(model, seed) if model.name == FAKE else ModelWeights(model)


class FakeWeights:
    """The weights of the model `fake`, which have the same names everywhere."""

    def __init__(self, model: ModelSpec, seed: int, config: FakeBackend.Config = FakeBackend.Config()) -> None:  # noqa: B008
        backend = FakeBackend(config, model=model, optimizer=OptimizerSettings(), seed=seed)
        backend.open()
        self.initial: Mapping[str, RawTensor] = backend.served_tensors()
        self._shapes = {name: one.shape for name, one in self.initial.items()}
        self.dtype = SERVED[model.dtype]

    def served(self, weights: Mapping[str, Any]) -> dict[str, RawTensor]:
        given = _tensors(weights)
        _check(given, self._shapes, self._shapes.keys())
        return {name: _served(name, given[name], self.dtype) for name in self._shapes}

    def state(self, served: Mapping[str, RawTensor]) -> dict[str, Tensor]:
        return {name: as_tensor(one) for name, one in served.items()}


class ModelWeights:
    """The weights of a model of transformers."""

    def __init__(self, model: ModelSpec) -> None:
        from rftstream.models.folders.folder import loading
        from rftstream.models.vision.seeing import model_class
        from rftstream.weights.checkpoint_names import names_of

        self.dtype = SERVED[model.dtype]
        with loading(model):
            loaded = model_class(model.folder).from_pretrained(model.folder, dtype=self.dtype)
        self._names = names_of(loaded, model.folder)
        parameters = dict(loaded.named_parameters())
        self._shapes = {name: tuple(one.shape) for name, one in parameters.items()}
        known = {id(one): name for name, one in parameters.items()}
        state = dict(loaded.state_dict(keep_vars=True))
        self._places = {key: known[id(one)] for key, one in state.items() if id(one) in known}
        """Name in the loaded model's `state_dict` -> name of its parameter. Tied weights have several."""
        self._buffers = {key: one for key, one in state.items() if id(one) not in known}
        self.initial: Mapping[str, RawTensor] = self._by_checkpoint(parameters)

    def served(self, weights: Mapping[str, Any]) -> dict[str, RawTensor]:
        given = _tensors(weights)
        if self._shapes.keys() <= given.keys():
            _check(given, self._shapes, {*self._places, *self._buffers})
            for key, name in self._places.items():
                if key != name and key in given and not torch.equal(given[key], given[name]):
                    raise AnswerRefused(
                        f"weights: {key!r} and {name!r} differ, expected the same values: the run's model ties them"
                    )
            return self._by_checkpoint({name: given[name].contiguous() for name in self._shapes})
        shapes = {name: joined.shape for name, joined in self._names.tensors.items()}
        if shapes.keys() <= given.keys():
            _check(given, shapes, {*shapes, *self._names.kept})
            return {name: _served(name, given[name], self.dtype) for name in shapes} | self._names.kept_tensors
        _check(given, self._shapes, {*self._places, *self._buffers})
        raise AssertionError("a name is missing")

    def state(self, served: Mapping[str, RawTensor]) -> dict[str, Tensor]:
        parameters = {name: torch.empty(shape, dtype=self.dtype) for name, shape in self._shapes.items()}
        for name, joined in self._names.tensors.items():
            joined.write(parameters, as_tensor(served[name]))
        return {key: parameters[name] for key, name in self._places.items()} | self._buffers

    def _by_checkpoint(self, parameters: Mapping[str, Tensor]) -> dict[str, RawTensor]:
        read = self._names.read(parameters)
        return {name: _served(name, read[name], self.dtype) for name in read} | self._names.kept_tensors


def _tensors(weights: Any) -> dict[str, Tensor]:
    """Return a loop's weights as tensors, without the prefixes of wrappers."""
    if not isinstance(weights, Mapping) or not weights:
        raise AnswerRefused(f"weights: got {type(weights).__name__}, expected tensors by name, as `state_dict()`")
    found = dict(weights)
    for prefix in WRAPPERS:
        if all(str(name).startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): one for name, one in found.items()}
    for name, one in found.items():
        if hasattr(one, "full_tensor"):
            raise AnswerRefused(
                f"weights: {name!r} is a shard (DTensor), expected whole tensors; gather them on all ranks, for "
                "example by torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
            )
        if not isinstance(one, Tensor):
            try:
                found[name] = torch.as_tensor(one)
            except (TypeError, ValueError, RuntimeError):
                raise AnswerRefused(f"weights: {name!r} is a {type(one).__name__}, expected a tensor") from None
    return found


def _check(given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], known: Any) -> None:
    """Raise AnswerRefused unless these are the model's weights."""
    missing, odd = sorted(shapes.keys() - given.keys()), sorted(given.keys() - set(known))
    if missing or odd:
        parts = [
            f"{text} {len(names)} ({', '.join(map(repr, names[:3]))}{', ...' if names[3:] else ''})"
            for text, names in (("lack", missing), ("have other", odd))
            if names
        ]
        raise AnswerRefused(
            f"weights: {' and '.join(parts)} of the model's {len(shapes)} names, expected its `state_dict()`; is it "
            "another model's?"
        )
    for name, shape in shapes.items():
        if tuple(given[name].shape) != shape:
            raise AnswerRefused(f"weights: {name!r} has the shape {tuple(given[name].shape)}, expected {shape}")


def _served(name: str, value: Tensor, dtype: torch.dtype) -> RawTensor:
    if value.is_meta or value.layout is not torch.strided or value.is_complex():
        kind = f"{value.dtype} of {value.layout} on {value.device}".replace("torch.", "")
        raise AnswerRefused(f"weights: {name!r} is {kind}, expected a dense tensor of numbers in memory")
    copied = value.detach().to(device="cpu", dtype=dtype, copy=True)
    if not torch.isfinite(copied).all():
        raise AnswerRefused(
            f"weights: {name!r} has values that are not finite, expected none; give the batch up by `skip(batch)`, and "
            "take back the step"
        )
    return raw(copied)
