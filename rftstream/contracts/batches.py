"""A batch is experiences and a manifest that closes them. Topic `batches`: buffer -> trainer.

Shapes: T tokens of a segment, G siblings of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rftstream.contracts.arrays import Array
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.tasks import Media, RolloutIds, Sampling


class LossKind(StrEnum):
    """Which loss an experience goes into."""

    rl = "rl"
    """Policy gradient; needs a reward."""
    sft = "sft"
    """Cross entropy on expert data."""
    dpo = "dpo"
    """Preference pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout's segments with reward and group, ready to train on. `batches`: buffer -> trainer.

    Advantages are not in it: the algorithm computes them in the trainer from the whole group, which stays
    inside one share of one batch."""

    ids: RolloutIds
    """The ids that the task had; those of expert data have the same form and are made by the buffer."""
    batch_sequence: int
    """The batch k, trained at version k."""
    share: int
    """Which of the shares; equal to the partition."""
    position: int
    """Place inside the share, dense from 0."""
    loss_kind: LossKind
    """Which loss it goes into."""
    segments: tuple[Segment, ...]
    """What to train on."""
    reward: float | None
    """None for expert data."""
    sampling: Sampling
    """How it was sampled."""
    truncated: bool = False
    """A token limit ended the rollout."""
    expert: bool = False
    """Whether it comes from `experts`, not from the policy."""
    pair: str | None = None
    """The side of a preference pair: `chosen` or `rejected`; the two share a group."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the verdict's reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of rollout and verdict; where both have a name, the verdict's counts."""
    additions: dict[str, Array] = field(default_factory=dict)
    """Arrays of the verdict, e.g. teacher_logprobs [T]."""
    attachments: dict[str, Media] = field(default_factory=dict)
    """Payloads of the rollout, by reference."""
    weight: float = 1.0
    """Factor of its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """Closes a batch: the last record of the batch in every share. `batches`: buffer -> trainer."""

    batch_sequence: int
    """The batch k, trained at version k."""
    share: int
    """Which of the shares; equal to the partition."""
    num_shares: int
    """Number of shares of the run."""
    count: int
    """Experiences of this batch in this share."""
    digest: str
    """`sha256:<hex>` over the encoded experiences of this share, in order."""
    groups: tuple[str, ...]
    """Groups of this share, in order."""
    num_groups: int
    """Groups of the batch, over all shares."""
    total_groups: int
    """Groups in all batches up to and including this one."""
    last: bool = False
    """The run's last batch; it may be short or empty."""
    admitted: int | None = None
    """Groups that the feeder had admitted in all; set where `last`. A run that is given more to do has more later."""
    max_staleness: int = 0
    """batch_sequence minus the oldest version that sampled a token of the batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the buffer saw since the batch before: reward over all decided rollouts, filtered share, ..."""
    total_experts: int = 0
    """Demonstrations in all batches up to and including this one; one that came in two passes counts twice."""
