"""The routers of a mixture of experts: which experts each token takes in a forward pass, and how sure the router is.

transformers names the routers of each family (`_can_record_outputs`) and where their logits are in the output. The
chosen experts are the integers of the output; where a router gives none, they are those of the largest logits.

Shapes: N tokens in the order of the flat input, E experts, K experts of a token.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rftstream.errors import ConfigError


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
        return Routed(logits_NE, logits_NE.topk(self.num_chosen, dim=-1).indices)


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

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[list[Routed]]]:
        """Yield a list with the calls of each router, which forward passes inside this context fill."""
        calls: list[list[Routed]] = [[] for _ in self.routers]
        with contextlib.ExitStack() as stack:
            for router, own in zip(self.routers, calls, strict=True):
                stack.callback(router.module.register_forward_hook(_keep_in(own, router)).remove)
            yield calls


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
