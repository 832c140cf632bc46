"""One process's training on one batch: all steps of the policy and its critic are taken, or none.

The backends torch and deepspeed share it. They differ in how a network takes its steps, which `Trained` defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.base import CRITIC, POLICY, Update, UpdatePlan
from rftstream.backends.passes import ALL, ALL_ROWS_LEARN, MicrobatchShare, Passes, computed_by_row
from rftstream.backends.stopping import UpdateStopped
from rftstream.backends.torch.critic import CriticPasses
from rftstream.backends.torch.inputs import Inputs
from rftstream.errors import ConfigError
from rftstream.models.routers import check_balanced
from rftstream.models.spec import ModelSpec

Shapes = Mapping[str, torch.Size]


def check_saved(folder: Path, network: str, spec: ModelSpec, saved: Shapes, trained: Shapes) -> None:
    """Raise ConfigError unless the masters in a checkpoint have the shapes of the trained parameters."""
    if saved == trained:
        return
    if network == POLICY:
        raise ConfigError(f"{folder}: the checkpoint is of another model than {spec.name}; start a new run")
    raise ConfigError(f"{folder}: the checkpoint's critic is of another model; take back the change of it")


class Trained:
    """A network with its masters and optimizer. A backend makes it, and a learner trains it: for each step it calls
    `accumulate`, `norm`, and `step` if the norm is finite."""

    network: Any
    """The network that `Passes` computes with."""
    shapes: Shapes
    """Shapes of the trained parameters, by the names under which they are published and saved; tied ones once."""
    in_lockstep = False
    """Whether processes take every pass together, as under ZeRO. Then no pass is skipped, and the norm is known only
    after the step."""

    def accumulate(self, passes: Passes, number: int, algorithm: Algorithm) -> None:
        """Compute the gradients of mini-batch `number`."""
        passes.accumulate(passes.minibatches[number], algorithm)

    def norm(self, lr: float, max_grad_norm: float) -> float:
        """Return the norm of all gradients together. In lockstep, also take the step if the norm is finite."""
        raise NotImplementedError

    def step(self, lr: float, *, scale: float = 1.0) -> None:
        """Take a step with the gradients times `scale`, unless `norm` has taken it."""

    def copy(self) -> Any:
        """Return a copy of masters and moments."""
        raise NotImplementedError

    def undo(self, before: Any) -> None:
        """Drop the gradients, and restore what `copy` returned. None means that no step was taken."""
        raise NotImplementedError

    def look(self, count: int) -> None:
        """Take forward passes only to keep in step with other processes."""


@dataclass(slots=True)
class Learner:
    """One network that learns from one batch. `BatchTraining` makes it, and `take_steps` calls it."""

    passes: Passes
    trained: Trained
    lr: float
    max_grad_norm: float
    """Norm to which gradients are clipped; 0 for no clipping."""
    names: tuple[str, str] = ("loss", "grad_norm")
    """Names of its loss and norm among the metrics."""
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of each step, the same in all processes."""

    def accumulate(self, step: int, algorithm: Algorithm) -> bool:
        """Compute the gradients of a step, and return whether they are finite. In lockstep, the loss of a process is
        its share; if one share is not finite, the norm is not finite in any process."""
        self.trained.accumulate(self.passes, step % len(self.passes.minibatches), algorithm)
        self.norms.append(self.trained.norm(self.lr, self.max_grad_norm))
        return math.isfinite(self.norms[-1]) and (self.trained.in_lockstep or math.isfinite(self.passes.last_loss))

    def step(self) -> None:
        """Take the optimizer step with the clipped gradients."""
        norm = self.norms[-1]
        clip = self.max_grad_norm and norm > self.max_grad_norm
        self.trained.step(self.lr, scale=self.max_grad_norm / norm if clip else 1.0)

    def last(self) -> dict[str, float]:
        """Return loss and norm of the last step; empty if there was none."""
        return dict(zip(self.names, (self.passes.last_loss, self.norms[-1]), strict=True)) if self.norms else {}

    def metrics(self, algorithm: Algorithm) -> dict[str, float]:
        """Return the metrics of the batch."""
        return {self.names[1]: sum(self.norms) / len(self.norms), **self.passes.metrics(algorithm)}


def take_steps(learners: Sequence[Learner], algorithm: Algorithm, num_steps: int) -> bool:
    """Take all steps of a batch, and return True. If a loss or norm is NaN or infinite, undo all steps and return
    False. UpdateStopped, with all steps undone, if that is asked for.

    In lockstep each network takes its step before the next network's gradients are computed. So every network but the
    last needs a copy from which it can be restored."""
    lockstep = learners[0].trained.in_lockstep
    undoable = learners if num_steps > 1 else learners[:-1] if lockstep else ()
    copies = [learner.trained.copy() if learner in undoable else None for learner in learners]

    def undo() -> None:
        for learner, copied in zip(learners, copies, strict=True):
            learner.trained.undo(copied)

    for step in range(num_steps):
        is_finite = True
        try:
            for learner in learners:
                if is_finite or not lockstep:
                    is_finite = learner.accumulate(step, algorithm) and is_finite
        except UpdateStopped:
            undo()
            raise
        if not is_finite:
            undo()
            return False
        for learner in learners:
            learner.step()
    return True


@dataclass(frozen=True, slots=True)
class LearnedBatch:
    """One process's result for a batch. The norms and `skipped` are the same in all processes."""

    learners: Sequence[Learner]
    skipped: bool

    def update(self, algorithm: Algorithm, plan: UpdatePlan, **more: float) -> Update:
        """Return the result for the trainer, after the parts of all processes were added. `more`: further metrics."""
        first = self.learners[0]
        metrics: dict[str, float] = {"num_tokens": first.passes.num_tokens}
        if self.skipped:
            found = {name: value for learner in self.learners for name, value in learner.last().items()}
            return Update(metrics={**found, **metrics}, skipped=True)
        metrics |= {
            "optimizer_steps": float(len(first.norms)),
            "lr": plan.lr,
            "microbatches": float(first.passes.num_microbatches),
            **more,
        }
        for learner in self.learners if first.norms else ():
            found = learner.metrics(algorithm)
            metrics |= {**found, "tflop": metrics.get("tflop", 0.0) + found["tflop"]}
        return Update(metrics=metrics)


T = TypeVar("T", bound=Trained)


@dataclass
class BatchTraining(Generic[T]):
    """One process's training, which computes its share of the micro-batches. A backend makes it. All processes call its
    methods in the same order, with the same rows and plans."""

    device: torch.device
    critic: CriticConfig | None
    """Settings of the critic; None if there is none."""
    as_reference: Callable[[], AbstractContextManager[Any]]
    """Returns a context with a network that computes as the reference."""
    share: MicrobatchShare = ALL
    trained: dict[str, T] = field(default_factory=dict)
    """The policy, and the critic if there is one. The backend fills it."""

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> LearnedBatch:
        """Train the policy and the critic on a batch."""
        learners = [self._policy_learner(rows, algorithm, plan)] if plan.trains_policy else []
        if self.critic is not None and "values" in algorithm.needs:
            critic, settings = self.trained[CRITIC], self.critic
            own = replace(plan, router_aux_coef=0.0)
            passes = CriticPasses(critic.network, rows, own, self.device, share=self.share)
            names = ("value_loss", "critic_grad_norm")
            learners.append(Learner(passes, critic, settings.lr, settings.max_grad_norm, names))
        done = take_steps(learners, algorithm, learners[0].passes.num_steps)
        return LearnedBatch(learners, skipped=not done)

    def _policy_learner(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Learner:
        policy = self.trained[POLICY]
        if plan.router_aux_coef:
            check_balanced(policy.network.routers)
        passes = Passes(
            policy.network,
            rows,
            plan,
            self.device,
            whole_groups="whole_groups" in algorithm.needs,
            signal_apart=not (policy.in_lockstep or algorithm.needs & ALL_ROWS_LEARN or plan.router_aux_coef),
            share=self.share,
        )
        if passes.wants_proximal(algorithm):
            passes.compute_proximal()
            policy.look(passes.num_idle)
        if "reference_logprobs" in algorithm.needs:
            with self.as_reference() as reference:
                passes.compute_reference(reference)
                if reference is policy.network:  # otherwise each process computes alone
                    policy.look(passes.num_idle)
        return Learner(passes, policy, plan.lr, plan.max_grad_norm)

    def logprobs(
        self, rows: Sequence[TrainingRow], tokens_per_microbatch: int, *, reference: bool = False
    ) -> dict[int, np.ndarray]:
        """Return the logprobs of this process's share of the rows, by row number: float32 [T]."""
        policy = self.trained[POLICY]
        with self.as_reference() if reference else nullcontext(policy.network) as network:
            return self._by_row(rows, tokens_per_microbatch, policy, network, lambda one: network.logprobs(one)[0])

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> dict[int, np.ndarray]:
        """Return the critic's values of this process's share of the rows, by row number: float32 [T]."""
        critic = self.trained[CRITIC]
        return self._by_row(rows, tokens_per_microbatch, critic, critic.network, critic.network.values)

    def _by_row(
        self,
        rows: Sequence[TrainingRow],
        tokens_per_microbatch: int,
        trained: Trained,
        network: Any,
        compute: Callable[[Inputs], torch.Tensor],
    ) -> dict[int, np.ndarray]:
        found, num_idle = computed_by_row(rows, tokens_per_microbatch, network, self.device, compute, self.share)
        if network is trained.network:  # otherwise each process computes alone
            trained.look(num_idle)
        return found


def in_order(rows: Sequence[TrainingRow], found: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """Return the results of all processes in the order of the rows. Rows without tokens get empty arrays."""
    nothing = np.zeros(0, np.float32)
    return [found.get(number, nothing) for number in range(len(rows))]
