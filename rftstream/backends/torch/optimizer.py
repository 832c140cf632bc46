"""AdamW over float32 masters: the parameters themselves, or copies of parameters that are elsewhere or are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.training import Trained
from rftstream.errors import ConfigError
from rftstream.models.offload import tensors_of

IN_8_BITS = "8bit"
"""How moments are held if not in float32."""

State = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Masters and moments, by name."""


class Masters(Trained):
    """The float32 weights of a network, with their optimizer. `TorchBackend` makes it for each network that it trains.

    Rounded parameters pass each gradient to their masters at once. So gradients of micro-batches are added up in
    float32, and only one parameter at a time holds a gradient in its own dtype."""

    def __init__(
        self,
        network: Any,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        *,
        offload: bool,
        dtype: torch.dtype = torch.float32,
        moments: str = "float32",
    ) -> None:
        """`parameters`: in float32. `offload`: masters and moments are in main memory, and the optimizer steps there;
        the device holds only the parameters, which are copied to it after each step. `dtype`: the type to which
        parameters are rounded from the masters. `moments`: how they are held, float32 or 8bit."""
        self.network, self._parameters = network, parameters
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._rounded = dtype != torch.float32
        self._apart = offload or self._rounded
        self.masters: dict[str, Tensor] = dict(parameters)
        if self._apart:
            self.masters = {
                name: one.detach().to("cpu" if offload else one.device, copy=True) for name, one in parameters.items()
            }
        if self._rounded:
            for name, parameter in parameters.items():
                parameter.data = parameter.data.to(dtype)
                if parameter.requires_grad:
                    hook = _hand_over_to(self.masters[name])
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._optimizer = adamw(list(self.masters.values()), settings, moments)
        self._in_8_bits = moments == IN_8_BITS

    def norm(self, lr: float, max_grad_norm: float) -> float:
        """Return the norm of all gradients together."""
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def step(self, lr: float, *, scale: float = 1.0) -> None:
        """Take a step with the gradients times `scale`, then drop them."""
        if scale != 1.0:
            torch._foreach_mul_(self._gradients(), scale)
        if self._apart and not self._rounded:
            for name, parameter in self._parameters.items():
                self.masters[name].grad = None if parameter.grad is None else parameter.grad.to("cpu")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.drop_gradients()
        if self._apart:
            self._copy_to_device()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.masters[name].grad = None

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `KIND/NAME` and the tensor of each moment."""
        for name, master in self.masters.items():
            for kind, value in self._optimizer.state.get(master, {}).items():
                yield f"{kind}/{name}", value if isinstance(value, Tensor) else torch.tensor(float(value))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the network's weights, masters, moments and existing gradients, wherever they are."""
        yield from tensors_of(self.network.model)
        for master in self.masters.values():
            yield master
            if master.grad is not None:
                yield master.grad
        for _, value in self.moments():
            yield value

    def copy(self) -> State:
        """Return a copy of masters and moments, for `put`."""
        return (
            {name: master.detach().clone() for name, master in self.masters.items()},
            {key: value.clone() for key, value in self.moments()},
        )

    def undo(self, before: State | None) -> None:
        """Drop the gradients, and restore what `copy` returned."""
        self.drop_gradients()
        if before is not None:
            self.put(*before)

    @torch.no_grad()
    def put(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Replace masters and moments. ConfigError if these moments are held in another way."""
        if moments and self._in_8_bits != any(key.startswith("state1/") for key in moments):
            found, wanted = ("float32", IN_8_BITS) if self._in_8_bits else (IN_8_BITS, "float32")
            raise ConfigError(
                f"backends.torch.moments: the checkpoint has moments in {found}, expected {wanted}; set it to {found!r}"
            )
        for name, master in self.masters.items():
            master.copy_(masters[name])
        if self._apart:
            self._copy_to_device()
        self._optimizer.state.clear()
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            counts = self._in_8_bits and kind == "step"  # bitsandbytes counts in a plain number
            self._optimizer.state[self.masters[name]][kind] = int(value) if counts else value

    def _gradients(self) -> list[Tensor]:
        holders = self.masters if self._rounded else self._parameters
        return [holder.grad for holder in holders.values() if holder.grad is not None]

    @torch.no_grad()
    def _copy_to_device(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])


def _hand_over_to(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to its master's, and drops it."""

    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None, "it was computed just now"
        gradient = parameter.grad.to(master.device, torch.float32)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hand_over


def adamw(masters: list[Tensor], settings: OptimizerSettings, moments: str = "float32") -> torch.optim.Optimizer:
    """Return AdamW for these masters. Matrices get weight decay, vectors (norms, biases) do not. The optimizer is
    fused: it takes one pass over memory. `moments`: 8bit for bitsandbytes' optimizer, which holds those of larger
    tensors in blocks of 256 values with 8 bits each (arXiv 2110.02861)."""
    groups = [
        {"params": [master for master in masters if master.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [master for master in masters if master.ndim < 2], "weight_decay": 0.0},
    ]
    given = [group for group in groups if group["params"]]
    if moments == IN_8_BITS:
        from bitsandbytes import optim

        kind: Any = getattr(optim, "AdamW8bit")  # noqa: B009  its module exports no types
        optimizer: torch.optim.Optimizer = kind(given, lr=0.0, betas=settings.betas, eps=settings.eps)
        return optimizer
    return torch.optim.AdamW(given, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
