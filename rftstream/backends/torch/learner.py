"""Networks that learn from a batch together, the policy and its critic: all of them take a step, or none does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rftstream.algorithms.base import Algorithm
from rftstream.backends.passes import Passes
from rftstream.backends.torch.optimizer import Masters, State


@dataclass(slots=True)
class Learner:
    """One network that learns from one batch. A backend makes it for the policy, and one for the critic;
    `take_steps` calls it."""

    passes: Passes
    masters: Masters
    lr: float
    max_grad_norm: float
    """Norm to which gradients are clipped; 0 for no clipping."""
    loss_name: str = "loss"
    norm_name: str = "grad_norm"
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of each step."""
    _before: State | None = None

    def begin(self, num_steps: int) -> None:
        """Keep a copy for `undo` if there is more than one step. A single step is undone by not being taken."""
        self._before = self.masters.copy() if num_steps > 1 else None

    def accumulate(self, step: int, algorithm: Algorithm) -> dict[str, float]:
        """Compute the gradients of a step, and return its loss and norm."""
        minibatches = self.passes.minibatches
        loss = self.passes.accumulate(minibatches[step % len(minibatches)], algorithm)
        self.norms.append(self.masters.norm())
        return {self.loss_name: loss, self.norm_name: self.norms[-1]}

    def step(self) -> None:
        """Take the optimizer step with the clipped gradients."""
        norm = self.norms[-1]
        clip = self.max_grad_norm and norm > self.max_grad_norm
        self.masters.step(self.lr, scale=self.max_grad_norm / norm if clip else 1.0)

    def undo(self) -> None:
        """Put everything back as it was at `begin`."""
        self.masters.drop_gradients()
        if self._before is not None:
            self.masters.put(*self._before)

    def metrics(self, algorithm: Algorithm) -> dict[str, float]:
        """Return the metrics of the batch."""
        return {self.norm_name: sum(self.norms) / len(self.norms), **self.passes.metrics(algorithm)}


def take_steps(learners: Sequence[Learner], algorithm: Algorithm, num_steps: int) -> dict[str, float] | None:
    """Take all steps of a batch, and return None. If a loss or norm is NaN or infinite, undo all and return that
    step's losses and norms."""
    for learner in learners:
        learner.begin(num_steps)
    for step in range(num_steps):
        found: dict[str, float] = {}
        for learner in learners:
            found |= learner.accumulate(step, algorithm)
        if not all(map(math.isfinite, found.values())):
            for learner in learners:
                learner.undo()
            return found
        for learner in learners:
            learner.step()
    return None
