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
    """As the task had them; for expert data of the same form, made by the buffer."""
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
    """From `experts`, not from the policy."""
    pair: str | None = None
    """For preferences: `chosen` or `rejected`; the two share a group."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of the verdict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of rollout and verdict; under a name that both have, the verdict's."""
    additions: dict[str, Array] = field(default_factory=dict)
    """Of the verdict, e.g. teacher_logprobs [T]."""
    attachments: dict[str, Media] = field(default_factory=dict)
    """Of the rollout."""
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
    """Of the run."""
    count: int
    """Experiences of this batch in this share."""
    digest: str
    """`sha256:<hex>` over the encoded experiences of this share, in order."""
    groups: tuple[str, ...]
    """Groups of this share, in order."""
    num_groups: int
    """Of the batch, all shares."""
    total_groups: int
    """Batched by all batches up to and including this one."""
    last: bool = False
    """The run's last batch; it may be short or empty."""
    admitted: int | None = None
    """Groups that the feeder had admitted in all, where `last`: a run that was given more to do has more later."""
    max_staleness: int = 0
    """batch_sequence minus the oldest version that sampled a token of the batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the buffer saw since the batch before: reward over all decided rollouts, filtered share, ..."""
    total_experts: int = 0
    """Demonstrations in all batches up to and including this one; one that came in two passes counts twice."""
