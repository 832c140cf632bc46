"""A network that DeepSpeed trains, the policy or the critic, as one rank has it; and how both learn from a batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed.engine import EngineModule, EngineNetwork, EngineValueNetwork, import_deepspeed
from rftstream.backends.deepspeed.sequence import SplitNetwork
from rftstream.backends.deepspeed.settings import RankSettings
from rftstream.backends.deepspeed.shards import KINDS, MASTER, MOMENTS, REFERENCE, shards_of
from rftstream.backends.deepspeed.shared_passes import SharedPasses
from rftstream.backends.torch.inputs import Inputs, make_inputs
from rftstream.backends.torch.network import Network
from rftstream.backends.torch.optimizer import adamw

POLICY, CRITIC = "policy", "critic"
"""Names of the networks that ranks train."""

Read = Callable[[str, str], Tensor]
"""From kind and name to a whole tensor of a checkpoint."""


class TrainedNetwork:
    """A network under DeepSpeed's engine, with this process's part of its masters and optimizer.

    `Rank.join` makes one for the policy, then one for the critic if there is one, in the same order in all ranks. All
    ranks call every method alike."""

    def __init__(
        self,
        name: str,
        network: Network | SplitNetwork,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerSettings,
        settings: RankSettings,
    ) -> None:
        """`name` is POLICY or CRITIC. `parameters` are those that are trained, by the names that they are published
        and saved under."""
        deepspeed = import_deepspeed(network.model.device.type)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        """Shapes of the trained parameters, by name; tied ones once."""
        of_critic = name == CRITIC
        module = EngineModule(network.model, cast(Any, network).values if of_critic else network.logprobs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports a compiler
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=adamw(list(parameters.values()), optimizer),
                config=dict(settings.deepspeed),
                dist_init_required=False,
            )
        if settings.stage == 3:
            head = network.model.get_output_embeddings()
            for parameter in () if head is None else head.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(module, parameter)  # used outside of its own module
        self.shards = shards_of(self._engine, settings.stage, parameters, self.shapes)
        self.network: Any = (EngineValueNetwork if of_critic else EngineNetwork)(self._engine, network)
        self._device = self._engine.device
        self._rounds_left = 0

    def close(self) -> None:
        """Free what the engine holds."""
        self._engine.destroy()

    def accumulate(self, passes: SharedPasses, step: int, algorithm: Algorithm) -> None:
        """Add up the gradients of a step, in as many passes as all other ranks take."""
        number = step % len(passes.minibatches)
        self._rounds_left = passes.num_rounds[number]
        passes.accumulate(passes.minibatches[number], algorithm, backward=self._backward)
        while self._rounds_left:
            self._backward(self.network.idle(self._idle_inputs(), entropy_gradient="entropy" in algorithm.needs))

    def _backward(self, loss: Tensor) -> None:
        """Compute gradients of a share of the loss.

        DeepSpeed takes the mean over ranks, and the loss is a share of a sum, so it is multiplied by their number. A
        loss that is not finite makes every gradient a NaN, in this rank and so in all: all leave the step out."""
        self._rounds_left -= 1
        self._engine.set_gradient_accumulation_boundary(self._rounds_left == 0)
        size = torch.distributed.get_world_size()
        factor = torch.where(loss.detach().isfinite(), float(size), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)

    @torch.no_grad()
    def look(self, count: int) -> None:
        """Take forward passes only because the other ranks take them."""
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
        """Take over all masters, and moments if there are any; else the moments are 0."""
        self.shards.forget_moments()
        for kind in KINDS if moments else (MASTER,):
            self.receive(kind, read)
        self.shards.num_steps = num_steps

    def receive(self, kind: str, read: Read | None) -> None:
        """Take over what rank 0 reads. It gives `read`; the others give None and receive the tensors from it."""
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


@dataclass(slots=True)
class RankLearner:
    """One network that learns from one batch, in one rank. `Rank.update` makes it, and `take_steps` calls it."""

    passes: SharedPasses
    trained: TrainedNetwork
    lr: float
    max_grad_norm: float
    loss_name: str = "loss"
    norm_name: str = "grad_norm"
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of each step, the same in all ranks."""
    _before: list[Tensor] | None = None

    def begin(self, *, undoable: bool) -> None:
        """Keep a copy for `undo`. Without one, only a step that was not taken can be undone."""
        self._before = self.trained.shards.copy() if undoable else None

    def step(self, step: int, algorithm: Algorithm) -> bool:
        """Compute the gradients of a step and take it. False if their norm is not finite; then it is not taken."""
        self.trained.accumulate(self.passes, step, algorithm)
        self.norms.append(self.trained.shards.step(self.lr, self.max_grad_norm))
        return math.isfinite(self.norms[-1])

    def undo(self) -> None:
        """Put everything back as it was at `begin`."""
        if self._before is not None:
            self.trained.shards.restore(self._before)

    def last(self) -> dict[str, float]:
        """Return loss and norm of the last step; nothing if there was none."""
        if not self.norms:
            return {}
        return {self.loss_name: self.passes.part()["losses"][-1], self.norm_name: self.norms[-1]}

    def metrics(self, algorithm: Algorithm) -> dict[str, float]:
        """Return the metrics of the batch."""
        return {self.norm_name: sum(self.norms) / len(self.norms), **self.passes.metrics(algorithm)}


def take_steps(learners: Sequence[RankLearner], algorithm: Algorithm, num_steps: int) -> bool:
    """Take all steps of a batch, and return True. If a loss or norm is NaN or infinite, undo all and return False.

    Under ZeRO the norm is known only once a step is taken, so of several networks each step is taken one after the
    other, and all but the last need a copy to be undone."""
    for learner in learners:
        learner.begin(undoable=num_steps > 1 or learner is not learners[-1])
    for step in range(num_steps):
        for learner in learners:
            if not learner.step(step, algorithm):
                for one in learners:
                    one.undo()
                return False
    return True


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """The result of an update in one rank. Norms, and whether it was skipped, are the same in all ranks."""

    learners: Sequence[RankLearner]
    skipped: bool
