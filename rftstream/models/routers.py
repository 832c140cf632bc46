"""The routers of a mixture of experts: which experts each token takes in a forward pass, how sure the router is, and
the experts that a sampler recorded, forced on the tokens again.

transformers names the routers of each family (`_can_record_outputs`) and where their logits are in the output. The
chosen experts are the integers of the output; where a router gives none, they are those of the largest logits.

Shapes: N tokens in the order of the flat input, E experts, K experts of a token.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rftstream.contracts.beside import Beside
from rftstream.errors import ConfigError

_TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True, slots=True)
class Routed:
    """One call of a router."""

    logits_NE: Tensor
    """With their gradient."""
    chosen_NK: Tensor
    """int64, in the order in which the router names them."""


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """A router of a model, as `Routers` holds it."""

    name: str
    """The module's name in the model."""
    module: nn.Module
    place: int
    """Index of the logits in the module's output, if that is a tuple."""
    num_chosen: int
    """Experts of a token."""

    def read(self, output: Any) -> Routed:
        """Return what the router gave, from its module's output."""
        parts = output if isinstance(output, tuple) else (output,)
        found: Tensor = output[self.place] if isinstance(output, tuple) else output
        logits_NE = found.flatten(0, -2)
        whole = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.int64 and part.dim() > 1]
        if whole:
            return Routed(logits_NE, whole[0].flatten(0, -2))
        # without a graph: layers that are recomputed in the backward pass are not watched then
        return Routed(logits_NE, logits_NE.detach().topk(self.num_chosen, dim=-1).indices)


class Routers:
    """The routers of a model, in the order of its modules. `of` makes it.

    with routers.watched() as calls:
        model(input_ids=token_ids)
    calls[0][0].chosen_NK   # of the first router, in its first call
    """

    def __init__(self, routers: tuple[ExpertRouter, ...], *, has_loss: bool) -> None:
        self.routers = routers
        self.has_loss = has_loss
        """Whether transformers has a load-balancing loss for the family."""

    @staticmethod
    def of(model: Any) -> Routers | None:
        """Return a model's routers; None if there are none. `model`: as transformers made it, also without weights."""
        config = model.config.get_text_config()
        names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
        num_chosen = next((number for name in names if isinstance(number := getattr(config, name, None), int)), 1)
        found = tuple(
            ExpertRouter(name, module, place, int(getattr(module, "top_k", None) or num_chosen))
            for name, module, place in _routers_in(model)
        )
        if not found:
            return None
        return Routers(found, has_loss=hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"))

    def layer_numbers(self) -> tuple[int, ...]:
        """Return the number of each router's layer in the model, in order. ConfigError if a name has none, or two have
        one, so that what another engine says of its layers cannot be told apart."""
        found = tuple(int(part) for router in self.routers for part in router.name.split(".") if part.isdecimal())
        if len(found) != len(self.routers) or len(set(found)) != len(found):
            names = ", ".join(router.name for router in self.routers[:2])
            raise ConfigError(f"trainer.routing: routers {names} ... have no layer each; use policy 'hf', or set 'own'")
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[list[Routed]]]:
        """Yield a list with the calls of each router, which forward passes inside this context fill."""
        calls: list[list[Routed]] = [[] for _ in self.routers]
        with contextlib.ExitStack() as stack:
            for router, own in zip(self.routers, calls, strict=True):
                stack.callback(router.module.register_forward_hook(_keep_in(own, router)).remove)
            yield calls


def check_sees_all(together: int) -> None:
    """Raise ConfigError if a rank's routers see a part of the tokens, since `together` ranks compute a sequence."""
    if together > 1:
        raise ConfigError(
            f"trainer.router_aux_coef: the load of the experts is that of all tokens, and {together} ranks see a part "
            "of them each; set backends.deepspeed.sequence_parallel to 1, or remove the setting"
        )


def check_balanced(routers: Routers | None) -> None:
    """Raise ConfigError unless transformers has a load-balancing loss for these routers."""
    if routers is None:
        raise ConfigError(
            "trainer.router_aux_coef: the model has no routers, expected a mixture of experts; remove the setting"
        )
    if not routers.has_loss:
        raise ConfigError(
            "trainer.router_aux_coef: transformers has no load-balancing loss for the model, whose experts are "
            "balanced by a bias or not at all; remove the setting"
        )


def _keep_in(calls: list[Routed], router: ExpertRouter) -> Any:
    return lambda module, inputs, output: calls.append(router.read(output))


def _routers_in(model: Any) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield name, module and place of the logits of each router, as transformers records them."""
    from transformers import PreTrainedModel

    found: dict[str, tuple[nn.Module, int]] = {}
    for outer in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        recorders = (outer._can_record_outputs or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, (list, tuple)) else (recorders,):
            for name, module in model.named_modules():
                end = f".{recorder.layer_name}" if recorder.layer_name else ""
                if isinstance(module, recorder.target_class) and f".{name}".endswith(end):
                    found[name] = module, recorder.index
    for name, (module, place) in found.items():
        if not any(other.startswith(f"{name}.") for other in found):  # an attention that hands its router's logits on
            yield name, module, place


@dataclass(slots=True)
class _Layer:
    """A router, with the `topk` by which it chooses."""

    name: str
    start: int = 0
    """Place of its experts among those of all layers."""
    num_chosen: int = 0
    num_experts: int = 0
    rank: int = 2
    """Dimensions of the scores that it chooses from."""

    def asks(self, scores: Tensor, found: Any) -> bool:
        """Return whether this `topk` is the router's choice."""
        return _form(scores, found) == (self.num_experts, self.num_chosen, self.rank)


def not_replayed(where: str, model: Any) -> ConfigError:
    """Return the error for a setting `where` that asks for a mixture of experts."""
    return ConfigError(f"{where}: {type(model).__name__} is no mixture of experts; leave the setting out")


class Routing:
    """The choices of all routers of a model. `of` makes it; from then on each forward pass of the model asks it.

    Each router chooses by a `topk` over its experts, and computes the gates from the scores of what it chose. So only
    the result of that call is replaced. Gates, their normalisation and their gradients are those of the model's own
    code. K counts the experts of a token in all layers together.

    with routing.recorded() as experts:
        model(input_ids=token_ids)
    experts()   # int64 [N, K]

    What is forced holds until other experts are. Passes that recompute activations force what the first one did, if
    they run in the contexts of `recompute`."""

    def __init__(self, layers: tuple[_Layer, ...]) -> None:
        self.layers = layers
        self._own: dict[str, Tensor] | None = None
        """Choices of each layer in the pass that is being recorded."""
        self._forced: tuple[Tensor, Tensor] | None = None
        """The forced experts [N, K], and on which tokens [N, 1]."""
        self.counts: list[Tensor] = []
        """For each layer of each pass, int64 [2]: tokens on which experts were forced, and those of them that would
        have chosen others. The caller clears it."""

    @staticmethod
    def of(model: Any, *, where: str) -> Routing:
        """Return the routing of a model, whose passes ask it from now on. ConfigError, which names the setting `where`,
        if the model is no mixture, or if its experts cannot be forced, which is tried."""
        routers = Routers.of(model)
        if routers is None:
            raise not_replayed(where, model)
        names = {router.name for router in routers.routers}
        layers = tuple(_Layer(name) for name, _ in model.named_modules() if name in names)
        places = _find_choices(model, layers)
        if missing := [layer.name for layer, place in zip(layers, places, strict=True) if place is None]:
            raise ConfigError(
                f"{where}: {type(model).__name__} does not choose experts by a topk in {missing[0]}"
                f"{f' and {len(missing) - 1} others' if missing[1:] else ''}, so they cannot be replayed; set 'own'"
            )
        for layer, before in zip(layers[1:], layers, strict=False):
            layer.start = before.start + before.num_chosen
        routing = Routing(layers)
        for layer, place in zip(layers, places, strict=True):
            assert place is not None
            _wrap(place, partial(routing._mode, layer))
        return routing

    @property
    def num_chosen(self) -> int:
        """Experts of a token in all layers together."""
        return self.layers[-1].start + self.layers[-1].num_chosen

    @property
    def dtype(self) -> Any:
        """Dtype in which experts travel."""
        return np.uint8 if max(layer.num_experts for layer in self.layers) <= 256 else np.uint16

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns the experts [N, K] of the forward pass inside this context."""
        self._own = own = dict[str, Tensor]()
        try:
            yield lambda: torch.cat([own[layer.name] for layer in self.layers], dim=1)
        finally:
            self._own = None

    def force(self, experts: Beside | None, device: torch.device) -> None:
        """Force these experts on the tokens of all passes from now on; a token without any chooses by itself. None:
        force none. ValueError if another model recorded them."""
        self._forced = None
        if experts is None or not len(experts.values):
            return
        has_N = experts.counts_T > 0
        if (experts.counts_T[has_N] != self.num_chosen).any():
            raise ValueError(f"got {experts.counts_T.max()} experts of a token, expected {self.num_chosen}")
        forced_NK = np.zeros((len(has_N), self.num_chosen), np.int64)
        forced_NK[has_N] = experts.values.reshape(-1, self.num_chosen)
        self._forced = torch.from_numpy(forced_NK).to(device), torch.from_numpy(has_N[:, None]).to(device)

    def recompute(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts of a layer's pass, and of the one that recomputes its activations."""
        return contextlib.nullcontext(), self._again(self._forced)

    @contextlib.contextmanager
    def _again(self, forced: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        before = self._forced, self.counts
        self._forced, self.counts = forced, []
        try:
            yield
        finally:  # torch leaves by an exception once it has what it needs
            self._forced, self.counts = before

    def _mode(self, layer: _Layer) -> contextlib.AbstractContextManager[Any]:
        if self._own is None and self._forced is None:
            return contextlib.nullcontext()
        return _OnTopk(lambda scores, found: self._chosen(layer, scores, found) if layer.asks(scores, found) else found)

    def _chosen(self, layer: _Layer, scores: Tensor, own: Any) -> Any:
        own_Nk = own.indices.flatten(0, -2)
        if self._own is not None:
            self._own[layer.name] = own_Nk
        if self._forced is None:
            return own
        forced_NK, has_N1 = self._forced
        forced_Nk = forced_NK[:, layer.start : layer.start + layer.num_chosen]
        if len(forced_Nk) != len(own_Nk):
            raise ValueError(f"{layer.name}: got experts of {len(forced_Nk)} tokens for {len(own_Nk)} tokens")
        differs_N1 = (forced_Nk.sort(dim=1).values != own_Nk.sort(dim=1).values).any(1, keepdim=True)
        self.counts.append(torch.stack([has_N1.sum(), (differs_N1 & has_N1).sum()]))
        chosen = torch.where(has_N1, forced_Nk, own_Nk).view_as(own.indices)
        return type(own)((scores.gather(-1, chosen), chosen))


class _OnTopk(TorchFunctionMode):
    """Lets `choose` replace the result of each `topk` inside this context."""

    def __init__(self, choose: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOPK:
            return found
        return self._choose(args[0] if args else kwargs["input"], found)


def _form(scores: Tensor, found: Any) -> tuple[int, int, int]:
    return scores.shape[-1], found.indices.shape[-1], scores.dim()


def _find_choices(model: Any, layers: Sequence[_Layer]) -> list[nn.Module | None]:
    """Find by which `topk` each router chooses: the last one over most experts, in the router's module or in that
    around it. Return these modules; None for a router without one."""
    token_ids = torch.arange(3, device=model.device)[None]
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def watch(name: str) -> _OnTopk:
        def keep(scores: Tensor, found: Any) -> Any:
            if scores[..., 0].numel() == token_ids.numel():
                seen.setdefault(name, []).append(_form(scores, found))
            return found

        return _OnTopk(keep)

    around = [layer.name.rpartition(".")[0] for layer in layers]
    names = dict.fromkeys((*around, *(layer.name for layer in layers)))
    inner = [(module, _wrap(module, partial(watch, name))) for name in names for module in [model.get_submodule(name)]]
    with torch.no_grad():
        model(input_ids=token_ids, use_cache=False)
    for module, forward in inner:
        module.forward = forward
    places: list[nn.Module | None] = []
    for layer, outer in zip(layers, around, strict=True):
        name = layer.name if layer.name in seen or around.count(outer) > 1 else outer
        forms = seen.get(name, [])
        if forms:
            most = max(num_experts for num_experts, _, _ in forms)
            layer.num_experts, layer.num_chosen, layer.rank = [form for form in forms if form[0] == most][-1]
        places.append(model.get_submodule(name) if forms else None)
    return places


def _wrap(module: nn.Module, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    """Let each forward pass of a module run inside a context. Return its forward method from before."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    module.forward = forward
    return inner
