"""Backends take the optimizer steps. They hold masters and optimizer, and know nothing about logs, stores or
messages."""

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
    from rftstream.backends.stopping import UpdateStop
    from rftstream.contracts.batches import Experience
    from rftstream.models.spec import ModelSpec
    from rftstream.weights.snapshot import RawTensor
    from rftstream.weights.stores.store import ObjectStore
    from rftstream.weights.writer import VersionWriter

POLICY, CRITIC = "policy", "critic"
"""Names of the networks that a backend trains."""
MASTERS_FILE = {POLICY: "masters.safetensors", CRITIC: "critic.safetensors"}
MOMENTS_FILE = {POLICY: "optimizer.safetensors", CRITIC: "critic_optimizer.safetensors"}
"""Network -> its file in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings of AdamW that are fixed for a run. The learning rate comes with each plan."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How a batch is turned into optimizer steps. The trainer sets each field for each batch."""

    lr: float
    """Learning rate of every optimizer step of this batch."""
    minibatches: int
    """Optimizer steps per pass over the batch. Every mini-batch has the same share of each stratum, and uses the
    batch's denominators. So with unchanged weights the mean of their gradients is the batch's gradient."""
    updates_per_batch: int
    """Passes over the batch."""
    max_grad_norm: float
    """Norm to which gradients are clipped; 0 for no clipping."""
    tokens_per_microbatch: int
    """Largest number of tokens, padding included, in one forward and backward pass. A single longer row is allowed."""
    trains_policy: bool = True
    """Whether the policy is trained; if not, only the critic learns."""
    router_aux_coef: float = 0.0
    """Weight of the loss that balances a mixture's experts; 0 for none."""
    stratified: bool = True
    """False for replays of runs recorded before strata: mini-batches are then cut in the batch's order, and each has
    its own denominators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of a batch, as `Backend.update` returns it."""

    metrics: Mapping[str, float]
    """Plain numbers by name: loss, grad_norm, entropy, mismatch_k3, ess, clip fractions, num_tokens, ..."""
    skipped: bool = False
    """Whether a loss or gradient was NaN or infinite. Masters and optimizer are then the same as before the batch."""


class Backend(Protocol):
    """Holds masters and optimizer of a model, and computes with them.

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
        """Return the current policy's logprobs of each row's unmasked tokens: float32 [T], 0 elsewhere.

        The trainer calls it before `update`, if the algorithm needs `row_logprobs` or demonstrations are held out.
        Nothing changes."""

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same as `logprobs`, under the reference. Nothing changes.

        The reference is the model of `model.folder`, or the policy at the last `renew_reference`. The trainer calls it
        only if the algorithm needs `reference_rewards` or demonstrations are held out."""

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the weights in the form that engines load: in the served dtype, by the names of the model's own
        checkpoint, tied ones once.

        The publisher calls it after each update. A tensor may be converted when it is read, as a copy. A caller that
        wants to keep this state must read all tensors before the next `update`."""

    def save(self, folder: Path) -> None:
        """Write masters, optimizer, RNG and counters into an existing empty folder, as safetensors and JSON.

        The trainer calls it for a checkpoint, between two updates."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. The trainer calls it after `open`, when it resumes from a checkpoint.

        Later updates give the same results as if the process had never stopped, to the bit on a CPU."""

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face model folder: weights, config, tokenizer, template, generation config.

        The trainer calls it after the last step of the run."""

    def close(self) -> None:
        """Release memory, devices and processes. No other call may follow."""


class CriticBackend(Backend, Protocol):
    """A backend that can hold a critic beside the policy.

    The critic is a network with one output at each token. Its own optimizer trains it in `update`; it is skipped, saved
    and loaded together with the policy. The trainer calls `hold_critic` first:

        backend.hold_critic(settings, folder)
        backend.open()
        values = backend.values(rows, tokens_per_microbatch=4096)
    """

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        """Prepare a critic that is initialised from the model in `folder`. The trainer calls it before `open`, which
        loads the critic."""

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the critic's values of the text before each unmasked token of the rows: float32 [T], 0 elsewhere.

        The trainer calls it before `update`, to compute advantages. Nothing changes."""


class RenewingBackend(Backend, Protocol):
    """A backend whose reference can follow the policy.

    if version % renew_every == 0:
        backend.renew_reference()
    """

    def renew_reference(self) -> None:
        """Make the current policy the reference. The trainer calls it between two updates.

        From then on `save` and `load` include the reference."""


class OffloadingBackend(Backend, Protocol):
    """A backend that holds its device's memory only while it computes.

    with backend.on_device():
        values = backend.values(rows, tokens_per_microbatch)
        update = backend.update(rows, algorithm, plan)
    backend.leave_device()
    """

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the state on the device inside this context, so that several calls move it once. Contexts may be nested.
        Calls outside of it move the state by themselves."""

    def leave_device(self) -> None:
        """Move the state to main memory until it is needed for computation. The trainer calls it outside of
        `on_device`.

        `served_tensors` and `save` read the state in main memory. The move changes nothing, to the bit."""


class StoppableBackend(Backend, Protocol):
    """A backend that can leave a batch half trained, as if it had never begun it.

    with backend.stopping.allowed():
        update = backend.update(rows, algorithm, plan)  # UpdateStopped, if another thread called backend.stopping.ask()
    """

    stopping: UpdateStop
    """The request to do so. The trainer makes it if it is told to leave and the batch takes long."""


class PublishingBackend(Backend, Protocol):
    """A backend in several processes, each of which publishes its part of a version.

    publisher = WeightsPublisher(store, model, dtype, writer=backend.version_writer(store))
    """

    def version_writer(self, store: ObjectStore) -> VersionWriter | None:
        """Return a writer of versions into the store; None if this process has to write them alone, since there is no
        other, or the others do not reach the store. The trainer calls it before `open`, for each of its epochs.

        The writer's `take` is called in the thread of all other methods."""


class CompletedBackend(Backend, Protocol):
    """A backend whose checkpoints and batches have a part that somebody else holds.

    backend.begin_batch(7, experiences)
    update = backend.update(rows, algorithm, plan)
    backend.save(folder)
    backend.note_step(8)
    backend.complete(folder)
    backend.give_up()
    """

    def begin_batch(self, sequence: int, experiences: Sequence[Experience]) -> None:
        """Note the batch to which the rows of the next calls belong. The trainer calls it before them."""

    def note_step(self, version: int) -> None:
        """Note that this version is on the log. The trainer calls it in its own thread, and waits for the next update
        after that."""

    def complete(self, folder: Path) -> None:
        """Wait until the rest of a checkpoint is in the folder that `save` has filled. The trainer calls it once the
        step is on the log, in the thread that writes checkpoints."""

    def give_up(self) -> None:
        """End all waiting for somebody else by an error. The trainer calls it in its own thread, before it loads
        another state or leaves."""


def on_device(backend: Backend) -> AbstractContextManager[None]:
    """Return a context in which a backend's state stays on the device. It does nothing for a backend whose state is
    always there."""
    entered: AbstractContextManager[None] = getattr(backend, "on_device", nullcontext)()
    return entered
