"""One rank's part of a network that DeepSpeed trains, the policy or the critic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import CRITIC, OptimizerSettings
from rftstream.backends.deepspeed.engine import EngineModule, EngineNetwork, import_deepspeed
from rftstream.backends.deepspeed.sequence import SplitNetwork
from rftstream.backends.deepspeed.settings import RankSettings, deepspeed_config
from rftstream.backends.deepspeed.shards import KINDS, MASTER, MOMENTS, REFERENCE, shards_of
from rftstream.backends.passes import Passes
from rftstream.backends.torch.inputs import Inputs, make_inputs
from rftstream.backends.torch.network import Network
from rftstream.backends.torch.optimizer import adamw
from rftstream.backends.torch.training import Trained

Read = Callable[[str, str], Tensor]
"""A function from kind and name to a whole tensor of a checkpoint."""


class TrainedNetwork(Trained):
    """A network under DeepSpeed's engine, with this process's part of its masters and optimizer.

    `Rank.join` makes one for the policy, then one for the critic if there is one, in the same order in all ranks. All
    ranks call every method in the same way."""

    in_lockstep = True

    def __init__(
        self,
        name: str,
        network: Network | SplitNetwork,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerSettings,
        settings: RankSettings,
    ) -> None:
        """`name`: POLICY or CRITIC. `parameters`: the trained ones, by the names under which they are saved."""
        deepspeed = import_deepspeed(network.model.device.type)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        of_critic = name == CRITIC
        module = EngineModule(network.model, cast(Any, network).values if of_critic else network.logprobs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it imports a compiler
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=adamw(list(parameters.values()), optimizer),
                config=deepspeed_config(settings),
                dist_init_required=False,
            )
        if settings.stage == 3:
            head = network.model.get_output_embeddings()
            for parameter in () if head is None else head.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(module, parameter)  # used outside of its own module
        self.shards = shards_of(self._engine, settings.stage, parameters, self.shapes)
        self.network = EngineNetwork(self._engine, network, of_critic=of_critic)
        self._device = self._engine.device
        self._rounds_left = 0

    def close(self) -> None:
        """Free the engine's memory."""
        self._engine.destroy()

    def accumulate(self, passes: Passes, number: int, algorithm: Algorithm) -> None:
        """Add up the gradients of a mini-batch, in the number of passes that all ranks take."""
        minibatch = passes.minibatches[number]
        if passes.balances:
            num_idle = passes.num_rounds[number] - len(minibatch.inputs)
            minibatch.counts_E = passes.count_experts(minibatch, [self._idle_inputs()] * num_idle)
            torch.distributed.all_reduce(minibatch.counts_E)
        self._rounds_left = passes.num_rounds[number]
        passes.accumulate(minibatch, algorithm, backward=self._backward)
        while self._rounds_left:
            self._backward(self.network.idle(self._idle_inputs(), entropy_gradient="entropy" in algorithm.needs))

    def norm(self, lr: float, max_grad_norm: float) -> float:
        """Return the norm of all gradients together. If the norm is finite, this also takes the step."""
        return self.shards.step(lr, max_grad_norm)

    def copy(self) -> list[Tensor]:
        """Return a copy of this rank's part of masters and moments."""
        return self.shards.copy()

    def undo(self, before: list[Tensor] | None) -> None:
        """Restore what `copy` returned."""
        if before is not None:
            self.shards.restore(before)

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradients of this rank's share of the loss.

        DeepSpeed takes the mean over ranks, but the loss is a share of a sum, so it is multiplied by the number of
        ranks. A loss that is not finite turns every gradient into NaN, in this rank and therefore in all: all ranks
        skip the step."""
        self._rounds_left -= 1
        self._engine.set_gradient_accumulation_boundary(self._rounds_left == 0)
        size = torch.distributed.get_world_size()
        factor = torch.where(loss.detach().isfinite(), float(size), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    @torch.no_grad()
    def look(self, count: int) -> None:
        """Take forward passes only to keep in step with the other ranks."""
        for _ in range(count):
            self.network.idle(self._idle_inputs(), entropy_gradient=False)

    def _idle_inputs(self) -> Inputs:
        ones = np.ones(2, np.float32)
        row = TrainingRow(
            token_ids=np.zeros(2, np.int32),
            loss_mask=np.asarray([0, 1], np.float32),
            behavior_logprobs=ones,
            advantages=ones,
        )
        return make_inputs([row], self._device, packed=self.network.packs)

    def load(self, moments: bool, num_steps: float, read: Read | None) -> None:
        """Restore all masters, and the moments if they are saved; otherwise the moments are 0."""
        self.shards.forget_moments()
        for kind in KINDS if moments else (MASTER,):
            self.receive(kind, read)
        self.shards.num_steps = num_steps

    def receive(self, kind: str, read: Read | None) -> None:
        """Restore the tensors that rank 0 reads. Rank 0 passes `read`; the others pass None and receive the tensors
        from it."""
        for name, shape in self.shapes.items():
            if read is None:
                value = torch.empty(shape, dtype=torch.float32, device=self._device)
            else:
                value = read(kind, name).to(self._device, torch.float32).contiguous()
            torch.distributed.broadcast(value, src=0)
            with torch.no_grad():
                self.shards.put(MASTER if kind == REFERENCE else kind, name, value)
        if kind not in MOMENTS:
            self.shards.refresh()
