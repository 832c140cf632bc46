"""Backends take the optimizer steps. They hold masters and optimizer, and know nothing of logs, stores or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.algorithms.base import Algorithm, TrainingRow

if TYPE_CHECKING:
    import numpy as np

    from rftstream.algorithms.settings import CriticConfig
    from rftstream.models.spec import ModelSpec
    from rftstream.weights.snapshot import RawTensor

POLICY, CRITIC = "policy", "critic"
"""Names of the networks that a backend trains."""
MASTERS_FILE = {POLICY: "masters.safetensors", CRITIC: "critic.safetensors"}
MOMENTS_FILE = {POLICY: "optimizer.safetensors", CRITIC: "critic_optimizer.safetensors"}
"""Network -> its file in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings of AdamW that are fixed for a run; the learning rate comes with each plan."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How a batch is turned into optimizer steps. The trainer resolves each field for each batch."""

    lr: float
    """Learning rate of every optimizer step of this batch."""
    minibatches: int
    """Optimizer steps per pass over the batch. Each mini-batch has as much of every stratum as the others, and the
    batch's denominators, so that with the same weights the mean of their gradients is the batch's."""
    updates_per_batch: int
    """Passes over the batch."""
    max_grad_norm: float
    """Norm to which gradients are clipped; 0 for no clipping."""
    tokens_per_microbatch: int
    """Most tokens, padding included, of a forward and backward pass, unless a single row has more."""
    trains_policy: bool = True
    """Whether the policy is trained; if not, only the critic learns."""
    stratified: bool = True
    """False for replays of runs that were recorded before strata: then mini-batches are cut in the batch's order, and
    each has denominators of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of a batch, as `Backend.update` returns it."""

    metrics: Mapping[str, float]
    """Plain numbers by name: loss, grad_norm, entropy, mismatch_k3, ess, clip fractions, num_tokens, ..."""
    skipped: bool = False
    """Whether a loss or gradient was NaN or infinite: then masters and optimizer are as they were before the batch."""


class Backend(Protocol):
    """Masters and optimizer of a model, and the computations over them.

    The trainer makes it and calls `open` once; then it calls the other methods from one thread, in any order, and
    `close` at the end. A step of the trainer with a checkpoint:

        backend = TorchBackend(config, model=spec, optimizer=OptimizerSettings(), seed=0)
        backend.open()
        update = backend.update(rows, algorithm, plan)
        if not update.skipped:
            publisher.publish(backend.served_tensors(), name)
        backend.save(folder)
        backend.close()
    """

    def __init__(self, config: Any, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int) -> None:
        """Keep the settings; nothing is loaded yet. `config` is the backend's own `Config`."""

    def open(self) -> None:
        """Load the model from `model.folder`. The trainer calls it once, before every other method.

        Afterwards the masters are version 0; `load` replaces them."""

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """Train on a batch. Masters, optimizer, RNG and rows alone decide the result on a CPU, to the bit.

        The trainer calls it for each batch. Afterwards the masters are those of the next version, or unchanged if the
        update says `skipped`."""

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the policy's logprobs of each row's unmasked tokens now: float32 [T], 0 elsewhere.

        The trainer asks before `update`, if the algorithm needs `row_logprobs` or demonstrations are held out. Nothing
        changes."""

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the logprobs as `logprobs` does, under the reference. Nothing changes.

        The reference is the model of `model.folder`, or what `renew_reference` made it. The trainer asks only if the
        algorithm needs `reference_rewards` or demonstrations are held out."""

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the weights as engines get them: in the served dtype, by the names of the model's own checkpoint, tied
        ones once.

        The publisher asks after each update. A tensor may be converted at the moment when it is asked for, as a copy:
        who wants the same state for longer takes all tensors before the next `update`."""

    def save(self, folder: Path) -> None:
        """Write masters, optimizer, RNG and counters into an existing empty folder, as safetensors and JSON.

        The trainer calls it for a checkpoint, between two updates."""

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. The trainer calls it after `open`, when it goes on from a checkpoint.

        Afterwards `update` goes on as if the process had never stopped, to the bit on a CPU."""

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face model folder: weights, config, tokenizer, template, generation config.

        The trainer calls it after the last step of the run."""

    def close(self) -> None:
        """Give back memory, devices and processes. No other call may follow."""


class CriticBackend(Backend, Protocol):
    """A backend that can hold a critic beside the policy.

    The critic is a network with one output at each token. Its own optimizer trains it in `update`; it is skipped, saved
    and loaded together with the policy. The trainer calls `hold_critic` first:

        backend.hold_critic(settings, folder)
        backend.open()
        values = backend.values(rows, tokens_per_microbatch=4096)
    """

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        """Prepare a critic that begins as the model in `folder`. Called before `open`, which loads it."""

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the critic's values of what stands before each row's unmasked tokens: float32 [T], 0 elsewhere.

        The trainer asks before `update`, to compute advantages. Nothing changes."""


class RenewingBackend(Backend, Protocol):
    """A backend whose reference can follow the policy.

    if version % renew_every == 0:
        backend.renew_reference()
    """

    def renew_reference(self) -> None:
        """Make the policy as it is now the reference. The trainer calls it between two updates.

        From now on `save` and `load` take the reference with them."""


class OffloadingBackend(Backend, Protocol):
    """A backend that holds its device's memory only while it computes.

    with backend.on_device():
        values = backend.values(rows, tokens_per_microbatch)
        update = backend.update(rows, algorithm, plan)
    backend.leave_device()
    """

    def on_device(self) -> AbstractContextManager[None]:
        """Have the state on the device inside of this context, so that several calls move it once. It may be entered
        again within. Calls outside of it fetch the state by themselves."""

    def leave_device(self) -> None:
        """Move the state to main memory until it is computed with. Called outside of `on_device`.

        `served_tensors` and `save` read it there. Afterwards nothing has changed, to the bit."""


def on_device(backend: Backend) -> AbstractContextManager[None]:
    """Return a context in which a backend's state stays on the device; one that does nothing if it always does."""
    entered: AbstractContextManager[None] = getattr(backend, "on_device", nullcontext)()
    return entered
