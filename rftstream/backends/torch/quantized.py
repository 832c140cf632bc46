"""Linear layers whose frozen weights are held in four bits, beside adapters that are trained (QLoRA, arXiv 2305.14314).

The model's folder is rounded to what four bits hold (`models.folders.rounded`). So these layers compute, bit for bit,
what layers with the folder's weights do; each weight is there as a whole only during its own product."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from rftstream.models.folders import rounded

log = logging.getLogger(__name__)


def hold_in_four_bits(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers of a loaded model, one after the other, and move the model to a device. `dtype`: that
    of the weights in the model's folder."""
    for name, layer in rounded.linear_layers(model).items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FourBitLinear(layer, dtype, device, name))
        layer.weight = None
    model.to(device)


class FourBitLinear(nn.Linear):
    """A linear layer with frozen weights in four bits."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device, name: str) -> None:
        """`layer`: with the weights, which stay unchanged. `name`: for messages."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        weight, self._dtype = layer.weight.detach().to(device, dtype), dtype
        packed, self._state = rounded.in_four_bits(weight)
        self.weight = nn.Parameter(packed, requires_grad=False)
        for part in ("absmax", "code"):  # buffers, so that they move with the model
            self.register_buffer(part, getattr(self._state, part), persistent=False)
        if not torch.equal(self.whole_weight(), weight):
            log.warning("%s: four bits do not give the weights of the model's folder again on %s", name, device)

    def whole_weight(self) -> Tensor:
        """Return the weights [out, in], in the dtype of the model's folder."""
        return rounded.whole(self.weight, self._state, self._dtype).view(self.out_features, self.in_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product, in the dtype of matrix products."""
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        product: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
        return nn.functional.linear(inputs, layer.whole_weight().to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.whole_weight().to(gradient.dtype), None
