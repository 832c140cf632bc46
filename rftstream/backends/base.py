"""Backends: the optimizer step. They hold masters and optimizer, and know nothing of logs, stores or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.algorithms.base import Algorithm, TrainingRow

if TYPE_CHECKING:
    import numpy as np

    from rftstream.algorithms.settings import CriticConfig
    from rftstream.models.spec import ModelSpec
    from rftstream.weights.snapshot import RawTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW's, fixed for a run; the learning rate comes with each plan."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How a batch is turned into optimizer steps. Each field is resolved for this batch."""

    lr: float
    minibatches: int
    """Optimizer steps per pass over the batch. Each has as much of every stratum as the others, and the batch's
    denominators, so that with the same weights the mean of their gradients is the batch's."""
    updates_per_batch: int
    """Passes over the batch."""
    max_grad_norm: float
    """0: no clipping."""
    tokens_per_microbatch: int
    trains_policy: bool = True
    """False: only the critic learns."""
    stratified: bool = True
    """False, for replays of runs that were recorded so: mini-batches are cut in the batch's order, each with
    denominators of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    metrics: Mapping[str, float]
    """loss, grad_norm, entropy, mismatch_k3, ess, clip fractions, num_tokens, ... as plain numbers."""
    skipped: bool = False
    """A NaN or infinite loss or gradient: masters and optimizer are as they were before the batch."""


class Backend(Protocol):
    """The model comes from `model.folder`; loading is done by `open`."""

    def __init__(self, config: Any, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int) -> None: ...

    def open(self) -> None: ...

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """One batch, deterministic on CPU given masters, optimizer, RNG and rows."""

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """The policy's logprobs of each row's unmasked tokens now, float32 [T] with 0 elsewhere. Asked for if the
        algorithm needs `row_logprobs`, or demonstrations are held out."""

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Likewise under the reference: the model of `model.folder`, or what `renew_reference` made it. Asked for only
        if the algorithm needs `reference_rewards`."""

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """The weights as engines get them: served dtype, names of the model's own checkpoint, tied ones once. May give
        each tensor as it is when it is asked for, a copy: whoever wants the same state for longer takes all of them."""

    def save(self, folder: Path) -> None:
        """Masters, optimizer, RNG and counters, as safetensors and JSON, into an existing empty folder."""

    def load(self, folder: Path) -> None:
        """What `save` wrote; afterwards `update` goes on bit for bit."""

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face model folder: weights, config, tokenizer, template, generation config."""

    def close(self) -> None: ...


class CriticBackend(Backend, Protocol):
    """One that can hold a critic beside the policy: a network with one output at each token, trained by its own
    optimizer in `update`, skipped with it, saved and loaded with it."""

    def hold_critic(self, settings: CriticConfig, folder: Path) -> None:
        """Before `open`: there is to be one, which begins as the model in `folder`."""

    def values(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """What it says of what stands before each row's unmasked tokens, float32 [T] with 0 elsewhere."""


class RenewingBackend(Backend, Protocol):
    """One whose reference can follow the policy."""

    def renew_reference(self) -> None:
        """The reference becomes the policy as it is now, and is saved and loaded with it from now on."""
