"""DeepSpeed's engine as a network for `Passes`, and the import of DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rftstream.backends.deepspeed.sequence import SplitNetwork
from rftstream.backends.torch.inputs import Inputs
from rftstream.backends.torch.network import Network


class EngineModule(nn.Module):
    """The module that DeepSpeed wraps. It maps inputs to logprobs or values, so that all weights are used inside its
    forward pass."""

    def __init__(self, model: nn.Module, compute: Callable[..., Any]) -> None:
        """`compute`: computes the network's outputs from its inputs."""
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, **arguments: Any) -> Any:
        """Return the network's outputs for the inputs."""
        return self._compute(**arguments)


class EngineNetwork:
    """A network for `Passes` that computes with DeepSpeed's engine: a policy or a critic."""

    def __init__(self, engine: Any, network: Network | SplitNetwork, *, of_critic: bool) -> None:
        self._engine, self._of_critic = engine, of_critic
        self.packs, self.shares, self.flops = network.packs, network.shares, network.flops
        self.routers, self.routed = network.routers, network.routed

    def logprobs(self, inputs: Inputs, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies, both [B, T]."""
        return self._engine(inputs=inputs, entropy_gradient=entropy_gradient)  # type: ignore[no-any-return]

    def values(self, inputs: Inputs) -> Tensor:
        """Return values [B, T]."""
        return self._engine(inputs=inputs)  # type: ignore[no-any-return]

    def idle(self, inputs: Inputs, *, entropy_gradient: bool) -> Tensor:
        """Return a loss of zero that went through the same outputs as the losses of other ranks.

        ZeRO 3 counts the outputs that have a gradient. A rank with another count would wait for ever."""
        if self._of_critic:
            return self.values(inputs).sum() * 0.0
        logprobs_BT, entropy_BT = self.logprobs(inputs, entropy_gradient=entropy_gradient)
        return (logprobs_BT.sum() + entropy_BT.sum()) * 0.0


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a kind of device ("cpu" or "cuda"), without the parts that it would import and compile
    needlessly."""
    os.environ["DS_ACCELERATOR"] = device  # otherwise it takes a GPU if there is one
    mlflow, sys.modules["mlflow"] = sys.modules.get("mlflow"), None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    finally:  # its tuner would import the package if it is installed, which takes longer than everything else together
        sys.modules.pop("mlflow")
        if mlflow is not None:
            sys.modules["mlflow"] = mlflow
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    _import_muon()
    # DeepSpeed would compile its own kernel first, and a rank that waits in it for a dead process waits for ever; gloo
    # does not.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _import_muon() -> None:
    """Import an optimizer that ZeRO refers to, even if another one is used. Its functions stay uncompiled: otherwise
    each process would import torch's compiler for them, which takes longer than DeepSpeed itself."""
    from deepspeed.runtime import compiler

    compiled, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled
