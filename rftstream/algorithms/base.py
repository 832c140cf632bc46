"""Algorithms: from a batch of experiences to rows with advantages, and from logprobs to a loss.

An algorithm binds a Config to the pure functions of `core/`. `prepare` uses only numpy; `loss` gets the backend's
arrays (torch). Legend: B rows of a micro-batch, T padded tokens, N rows of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import ImageSpan, Segment, VersionSpan

if TYPE_CHECKING:
    import numpy as np

    from rftstream.algorithms.settings import CriticConfig
    from rftstream.contracts.beside import Columns

Spread = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One segment, ready for the backend. Position t of the arrays belongs to token t, given the tokens before it."""

    token_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """float32 [T], 0 or 1; position 0 is never trained on."""
    behavior_logprobs: np.ndarray
    """float32 [T]."""
    advantages: np.ndarray
    """float32 [T]."""
    temperature: float = 1.0
    """Temperature of the sampler, by which logits are divided."""
    group: int = 0
    """Dense number of the group inside the batch. Rows of a group are in the same mini-batch if there are enough groups
    of their stratum."""
    rollout: int = 0
    """Dense number of the rollout inside the batch, if an algorithm needs it. The rows of a rollout are consecutive."""
    stratum: str = ""
    """Origin of the row, as `KIND/TASKSET`. Each mini-batch has an equal part of each stratum."""
    additions: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: tuple[ImageSpan, ...] = ()
    """Spans of images among the tokens."""
    beside: Columns = field(default_factory=dict)
    """Values that the sampler recorded beside the tokens."""
    versions: tuple[VersionSpan, ...] = ()
    """Versions that sampled the tokens. The trainer computes staleness from them; no backend reads them."""

    @property
    def num_trained(self) -> int:
        """Number of unmasked tokens."""
        import numpy as np

        return int(np.count_nonzero(self.loss_mask))


def stratum_of(experience: Experience) -> str:
    """Return `KIND/TASKSET`, which separates rollouts, demonstrations and pairs, and also tasksets."""
    return f"{experience.loss_kind}/{experience.ids.taskset}"


def training_row(
    segment: Segment, advantage: float, temperature: float, group: int, rollout: int = 0, stratum: str = ""
) -> TrainingRow:
    """Return the row of a segment whose sampled tokens all have the same advantage."""
    import numpy as np

    from rftstream.contracts.beside import columns_of

    token_ids_T = segment.token_ids.numpy()
    loss_mask_T = segment.loss_mask.numpy().astype(np.float32)  # 0 or 1, as the contract says
    loss_mask_T[:1] = 0  # the first token has no context, so the policy gives it no probability
    return TrainingRow(
        token_ids=token_ids_T,
        loss_mask=loss_mask_T,
        behavior_logprobs=segment.behavior_logprobs.numpy(),
        advantages=np.full(len(token_ids_T), advantage, dtype=np.float32),
        temperature=temperature or 1.0,  # greedy sampling records the logprobs of temperature 1
        group=group,
        rollout=rollout,
        stratum=stratum,
        images=segment.images,
        beside=columns_of(segment.beside),
        versions=segment.versions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Padded arrays of B rows; torch tensors in the torch backend. Values at masked positions may be anything."""

    loss_mask_BT: Any
    behavior_logprobs_BT: Any
    advantages_BT: Any
    additions: Mapping[str, Any] = field(default_factory=dict)
    entropy_BT: Any | None = None
    """Entropy of the policy. It has a gradient if the algorithm needs `entropy`."""
    proximal_logprobs_BT: Any | None = None
    """Logprobs by the parameters before the batch. Present if the algorithm needs them, and whenever a batch takes more
    than one optimizer step, unless the algorithm does without. If absent, they equal the policy's."""
    reference_logprobs_BT: Any | None = None
    """Logprobs by the reference, if the algorithm needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """The divisors of a step's losses, so that accumulation over micro-batches equals one large batch.

    If a batch is cut into k mini-batches, each has a k-th of the batch's denominators. The mean of the mini-batches'
    losses and gradients is then that of the whole batch, however the rows are distributed. Denominators may be below
    1."""

    num_tokens: float
    """Number of unmasked tokens."""
    num_rows: float
    """Number of rows with at least one unmasked token."""
    num_groups: float = 0.0
    """Number of groups with at least one such row."""
    num_demonstration_tokens: float = 0.0
    """Number of unmasked tokens in rows whose addition `expert` is 1."""
    num_demonstration_rows: float = 0.0

    @staticmethod
    def of(rows: Sequence[TrainingRow], minibatches: int = 1) -> Denominators:
        """Return the denominators of each mini-batch, if the rows are cut into `minibatches` of them."""
        kept = [row for row in rows if row.num_trained]
        demonstrations = [row for row in kept if is_demonstration(row)]
        return Denominators(
            num_tokens=float(sum(row.num_trained for row in kept)) / minibatches,
            num_rows=float(len(kept)) / minibatches,
            num_groups=float(len({row.group for row in kept})) / minibatches,
            num_demonstration_tokens=float(sum(row.num_trained for row in demonstrations)) / minibatches,
            num_demonstration_rows=float(len(demonstrations)) / minibatches,
        )


def is_demonstration(row: TrainingRow) -> bool:
    """Return whether the row belongs to a demonstration in a batch with rollouts: its addition `expert` is 1."""
    return "expert" in row.additions and bool(row.additions["expert"].any())


class Algorithm(Protocol):
    """The objective of a run. The trainer builds it as `Class(config: Class.Config)`. For each batch the trainer calls
    `prepare`; the backend then calls `loss` for each micro-batch, and `summarise` after the last."""

    needs: frozenset[str]
    """Names of what the algorithm needs from the backend:
    - `entropy`, `proximal_logprobs`, `reference_logprobs`: these values in the micro-batch that `loss` gets.
    - `no_proximal_logprobs`: `loss` does without them, however many optimizer steps a batch takes.
    - `reference_rewards`: a second call of `prepare`, with the reference's logprobs of the rows that the first
      returned.
    - `row_logprobs`: a call of `refine` (of `RefiningAlgorithm`).
    - `values`: a critic (`CriticAlgorithm`).
    - `scores`: a classifier, whose output for the text before an unmasked token takes the place of the token's logprob.
    - `whole_groups`: all rows of a group in one call of `loss`.
    - `rows_without_advantage`: a gradient of rows whose advantages are all 0, too. Without this name such rows come to
      `loss` apart, and once more if they turn out to have a gradient.

    `loss` must return a sum over its rows divided by the denominators: then mini-batches and micro-batches add up to
    the batch.

    `needs_spread` says which rewards have to differ so that the algorithm learns: `group`, those inside some group;
    `batch`, any of the batch (also where the attribute is missing); `none`: the algorithm learns from equal rewards, or
    from none.

    Properties that others must know before the algorithm is made, such as `greedy_baseline`, are declared in its
    table's record (`rftstream.config.parts.part_specs.AlgorithmSpec`).

    An algorithm that learns from demonstrations or pairs names them in `loss_kinds`, a set of LossKind (else `rl`
    alone). It may have `held_out(rows, logprobs, reference_logprobs)`, which returns metrics of rows that are not
    trained on."""

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return rows and metrics (advantage statistics, groups without signal, ...)."""

    def loss(self, policy_logprobs_BT: Any, rows: MicroBatch, denominators: Denominators) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the loss (shares add up), and metrics as sums over the micro-batch. Each
        metric is later divided by `denominators.num_tokens`, unless its name starts with `max_`."""

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the batch's metrics from the token means of the sums that `loss` returned. Ratios of means (ESS) are
        computed here."""


def spread_needed(algorithm: Algorithm) -> Spread:
    """Return which rewards must differ so that the algorithm learns from them; `batch` by default."""
    spread: Spread = getattr(algorithm, "needs_spread", "batch")
    return spread


class RefiningAlgorithm(Algorithm, Protocol):
    """An algorithm that needs the policy's logprobs of the whole batch before training on it."""

    def refine(
        self, rows: Sequence[TrainingRow], row_logprobs: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return the rows of `prepare`, modified as needed, and more metrics. `row_logprobs` has the logprobs of each
        row's unmasked tokens under the policy before the batch, float32 [T] with 0 elsewhere."""


class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm with a critic: a separate network that the backend holds and trains beside the policy."""

    critic: CriticConfig

    def estimate(
        self, rows: Sequence[TrainingRow], values: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return the rows of `prepare` with advantages, and more metrics. `values` are the critic's values before the
        batch at each unmasked token of a row, given the tokens before it; float32 [T] with 0 elsewhere."""

    def value_loss(self, values_BT: Any, rows: MicroBatch, denominators: Denominators) -> tuple[Any, dict[str, Any]]:
        """Return the micro-batch's share of the critic's loss, and metrics, as `loss` does."""
