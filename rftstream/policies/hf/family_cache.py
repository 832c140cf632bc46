"""transformers' own caches of models that keep states: gated delta nets, Mamba, short convolutions, linear attention.

Such a cache holds keys and values of the attention layers, if there are any, and states of a fixed size. Each family
keeps its states in other places; they are found as the tensors that a pass left there. Their first dimension is the
row.

Shapes: U rows of a pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

NAMES = ("past_key_values", "cache_params", "state")
"""Names of a cache among a model's arguments and outputs."""
OF_MODULES = ("conv1d_state", "recurrent_states")
"""Attributes of modules with a state, in the family that has no cache for it (RecurrentGemma)."""
NO_WINDOW = 1 << 30


class Fixed(tuple[Tensor, ...]):
    """The states of all layers that have no keys and values, each [U, ...]."""

    __slots__ = ()


LayerStates = Sequence[tuple[Tensor, ...]]
"""Keys and values [U, H, L, D] of each layer with attention, from a forward pass over prompts; at last `Fixed`, if the
model keeps states."""


class FamilyCache:
    """A cache as a pass over prompts left it. `HfModel` takes the states out of it. The first one then serves all
    passes over slots: `SlotCache` puts slots in the place of its keys and values, and states into its places."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.cache = cache
        layers = getattr(cache, "layers", ())
        self._attention: list[Any] = [
            layer for layer in layers if isinstance(layer, DynamicLayer) and layer.keys is not None
        ]
        self._places = [*_places(cache)]
        for module in model.modules():
            self._places += [(vars(module), name) for name in OF_MODULES if isinstance(vars(module).get(name), Tensor)]

    @property
    def has_attention(self) -> bool:
        """Whether any layer has keys and values."""
        return bool(self._attention)

    def take(self) -> LayerStates:
        """Take all keys, values and states out of the cache."""
        pairs: list[tuple[Tensor, ...]] = [(layer.keys, layer.values) for layer in self._attention]
        for layer in self._attention:
            layer.keys = layer.values = None
        return [*pairs, self.take_states()]

    def take_states(self) -> Fixed:
        """Take the states out of the cache."""
        found = Fixed(holder[key] for holder, key in self._places)
        for holder, key in self._places:
            holder[key] = None
        return found

    def give_states(self, states: Fixed) -> None:
        """Put states into the cache, for the next pass."""
        for (holder, key), state in zip(self._places, states, strict=True):
            holder[key] = state

    def bind(self, layers: Sequence[DynamicLayer]) -> Any:
        """Let the cache write keys and values into slots from now on. Return it."""
        for layer, of_slots in zip(self._attention, layers, strict=True):
            for name in ("update", "get_seq_length", "get_mask_sizes"):
                setattr(layer, name, getattr(of_slots, name))
        return self.cache


class _WholeCache(DynamicCache):
    """An empty cache that also keeps what is outside windows. A model asks for its sizes before it fills it."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, also if no layer has keys."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns and the first one."""
        return query_length, 0


def name_of_cache(model: Any) -> str | None:
    """Return the name of the argument that takes a model's cache; None if there is none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in taken), None)


def empty_cache(model: Any) -> Any:
    """Return a cache for a pass over prompts; None if the model makes one of its family's own class."""
    code = sys.modules[type(model).__module__]
    own = [one for one in vars(code).values() if inspect.isclass(one) and one.__module__ == code.__name__]
    if name_of_cache(model) == "state" or any(kind.__name__.endswith("Cache") for kind in own):
        return None
    cache = _WholeCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "sliding_window"):
            layer.sliding_window = NO_WINDOW
    return cache


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where a cache holds tensors other than keys and values: a dictionary or list, and a key of it."""
    holder = holder if isinstance(holder, dict | list) else vars(holder)
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, Tensor):
            if value.is_floating_point() and key not in ("keys", "values"):
                yield holder, key
        elif isinstance(value, tuple):  # whose elements could not be replaced
            holder[key] = list(value)
            yield from _places(holder[key])
        elif isinstance(value, dict | list | CacheLayerMixin | LinearAttentionCacheLayerMixin):
            yield from _places(value)
