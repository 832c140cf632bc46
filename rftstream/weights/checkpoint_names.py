"""The names of a model's checkpoint, under which weights are published, and where each of its tensors lies in the
parameters of the loaded model.

transformers changes some models while it loads them: it renames weights, and stacks the matrices of a mixture's experts
into one parameter. vLLM, SGLang and the hub know the checkpoint's names. transformers has the way back
(`core_model_loading.revert_weight_conversion`), which copies. Here the way back is taken once, by tensors without
bytes that remember their place; afterwards each tensor of the checkpoint is a view of a parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rftstream.errors import ConfigError
from rftstream.models.offload import held_tensors
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.weights.snapshot import DTYPES, RawTensor
from rftstream.weights.tensors import raw

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a parameter, by its elements."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_as: tuple[int, ...]
    """The shape in the checkpoint, with as many elements. It differs where the elements have another order."""

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the view of this part, in `shape`."""
        whole = tensors[self.parameter]
        assert whole.is_contiguous(), "as parameters are"
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of the checkpoint: some places, one behind the other along an axis."""

    places: tuple[WeightPart, ...]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        first = list(self.places[0].read_as)
        if len(self.places) > 1:
            first[self.axis] = sum(place.read_as[self.axis] for place in self.places)
        return tuple(first)

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor from these parameters, or from others of their forms. It is a view where that is
        possible."""
        parts = [place.of(tensors).reshape(place.read_as) for place in self.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def write(self, tensors: Mapping[str, Tensor], value: Tensor) -> None:
        """Overwrite the tensor in these parameters."""
        parts = [value]
        if len(self.places) > 1:
            parts = list(torch.split(value, [place.read_as[self.axis] for place in self.places], self.axis))
        with torch.no_grad():
            for place, part in zip(self.places, parts, strict=True):
                place.of(tensors).copy_(part.reshape(place.shape))


class CheckpointNames:
    """The tensors of a model's checkpoint: its parameters, and buffers that no training changes. `names_of` makes
    it."""

    def __init__(self, folder: Path, tensors: Mapping[str, Joined], kept: Mapping[str, Joined]) -> None:
        self.tensors = tensors
        """The parameters, by the checkpoint's names."""
        self.kept = kept
        """The buffers, which versions hold as they are in the model folder: a mixture's corrections, scales."""
        self._folder = folder

    def read(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the parameters' forms (weights, masters) under the checkpoint's names. Each is taken when
        it is requested; it is a view where that is possible."""
        return _Read(self.tensors, tensors)

    def layout(self, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name -> safetensors' dtype and shape of every tensor of a version served in this dtype."""
        served = {name: (DTYPES[dtype], joined.shape) for name, joined in self.tensors.items()}
        return served | {name: (one.dtype, one.shape) for name, one in self.kept_tensors.items()}

    @functools.cached_property
    def kept_tensors(self) -> dict[str, RawTensor]:
        """The buffers from the model folder."""
        return dict(_tensors_in(self._folder, self.kept))

    def place(self, name: str) -> Joined:
        """Return where a tensor lies in the loaded model."""
        return self.tensors.get(name) or self.kept[name]

    def adapted(self, parameter: str) -> str:
        """Return the checkpoint's name of a whole parameter. ConfigError if the checkpoint has it in parts, which have
        no adapters of their own."""
        found = [name for name, one in self.tensors.items() if any(part.parameter == parameter for part in one.places)]
        if len(found) != 1 or len(self.tensors[found[0]].places) != 1:
            raise ConfigError(f"model.lora.targets: {parameter} lies in parts in {self._folder}; leave that layer out")
        return found[0]


class _Read(Mapping[str, Tensor]):
    def __init__(self, places: Mapping[str, Joined], tensors: Mapping[str, Tensor]) -> None:
        self._places, self._tensors = places, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].read(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # the default of Mapping would take the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def names_of(model: Any, folder: Path, *, added: Collection[str] = ()) -> CheckpointNames:
    """Return the names that a model's weights have in its folder. ConfigError if the folder has others.

    `model`: as transformers made it, also without weights. `added`: parameters that the folder need not have. The names
    of models with a vision tower are those of transformers: no engine but ours reads their versions."""
    parameters, held = dict(model.named_parameters()), held_tensors(model)
    plain = {name: Joined((_whole(name, one),)) for name, one in held.items()}
    known = _names_in(folder)
    if not known or parameters.keys() - added <= known or ImageTokens.of(folder) is not None:
        found = plain
    else:
        found = _converted(model, held)
    is_parameter = {name: joined.places[0].parameter in parameters for name, joined in found.items()}
    tensors = {name: joined for name, joined in found.items() if is_parameter[name]}
    kept = {name: joined for name, joined in found.items() if not is_parameter[name] and name in known}
    if found is not plain and (odd := sorted(tensors.keys() - known - set(added))):
        raise ConfigError(
            f"model.path: {folder} has no weight {odd[0]!r}, which transformers expects there; load the model by "
            "transformers, save it, and use that folder"
        )
    return CheckpointNames(folder, tensors, kept)


def _names_in(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in _opened(path).keys()}  # noqa: SIM118


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _tensors_in(folder: Path, names: Collection[str]) -> Iterator[tuple[str, RawTensor]]:
    for path in sorted(folder.glob("*.safetensors")) if names else ():
        with _opened(path) as opened:
            yield from ((name, raw(opened.get_tensor(name))) for name in opened.keys() if name in names)  # noqa: SIM118


def _whole(name: str, tensor: Tensor) -> WeightPart:
    shape = tuple(tensor.shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return WeightPart(name, 0, shape, strides, shape)


def _converted(model: Any, parameters: Mapping[str, Tensor]) -> dict[str, Joined]:
    """Return the checkpoint's tensors by transformers' way back, on tensors without bytes."""
    from transformers.core_model_loading import revert_weight_conversion

    tracing = _Tracing()
    given = {name: torch.empty(one.shape, device="meta") for name, one in parameters.items()}
    for name, one in given.items():
        tracing.found[_key(one)] = Joined((_whole(name, one),))
    with tracing:
        back = revert_weight_conversion(model, given)
    return {name: tracing.joined(one, name) for name, one in back.items()}


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations that move elements, on tensors without bytes, and records where the elements come from. What
    would copy a tensor into another order leaves it where it is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, Joined] = {}
        """By the storage of a tensor: what it holds."""
        self._kept: list[Tensor] = []
        """Keeps storages alive, so that each has a key of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.clone.default:
            return args[0]
        if func is aten._unsafe_view.default:
            try:
                return aten.view.default(*args)
            except (RuntimeError, ValueError):
                return self._new(Joined((replace(self._single(args[0]), read_as=tuple(args[1])),)))
        if func is aten.cat.default:
            parts, axis = args[0], args[1] if len(args) > 1 else 0
            places = [self._single(one) for one in parts]
            return self._new(Joined(tuple(places), axis % parts[0].dim()))
        if func is aten.stack.default:
            axis = (args[1] if len(args) > 1 else 0) % (args[0][0].dim() + 1)
            return self.__torch_dispatch__(aten.cat.default, types, ([one.unsqueeze(axis) for one in args[0]], axis))
        return func(*args, **(kwargs or {}))

    def joined(self, tensor: Tensor, what: str) -> Joined:
        """Return the places of a tensor's elements. ConfigError if they are not known."""
        found = self.found.get(_key(tensor))
        if found is None:
            raise _unknown(what)
        [first, *others] = found.places
        if not others and first.read_as == first.shape:  # a view of a parameter
            shape = tuple(tensor.shape)
            return Joined((WeightPart(first.parameter, int(tensor.storage_offset()), shape, tensor.stride(), shape),))
        if tuple(tensor.shape) != found.shape or not tensor.is_contiguous():
            raise _unknown(what)
        return found

    def _single(self, tensor: Tensor) -> WeightPart:
        """Return the only place of a tensor's elements. ConfigError if there are several."""
        places = self.joined(tensor, "a weight").places
        if len(places) > 1:
            raise _unknown("a weight of several parts")
        return places[0]

    def _new(self, joined: Joined) -> Tensor:
        made = torch.empty(joined.shape, device="meta")
        self.found[_key(made)] = joined
        self._kept.append(made)
        return made


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"model.path: transformers changes {what} while loading, in a way that has no view back")
