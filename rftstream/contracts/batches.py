"""A batch is experiences and a manifest that closes them. Topic `batches`: buffer -> trainer.

Shapes: T tokens of a segment, G siblings of a group.
"""

from __future__ import annotations

import re
from dataclasses import field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.arrays import Array
from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rollouts import Segment, is_without_roles
from rftstream.contracts.rules import Violation, rule, show
from rftstream.contracts.tasks import Media, RolloutIds, Sampling, headers_of_ids

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class LossKind(StrEnum):
    """Which loss an experience goes into."""

    rl = "rl"
    """Policy gradient; needs a reward."""
    sft = "sft"
    """Cross entropy on expert data."""
    dpo = "dpo"
    """Preference pairs."""


def _experience_id(experience: Experience) -> str:
    rollout_id = experience.ids.rollout_id
    return f"{rollout_id}#{experience.pair}" if experience.pair else rollout_id


def _experience_headers(experience: Experience) -> Facts:
    return {
        **headers_of_ids(experience.ids),
        "num_tokens": sum(segment.loss_mask.num_ones for segment in experience.segments),
        "batch_sequence": experience.batch_sequence,
        "share": experience.share,
        "expert": experience.expert,
        "use": experience.use or None,
    }


@message(
    "experience",
    version=7,
    readable_since=6,
    skippable=lambda experience: is_without_roles(experience.segments, None),
    topic="batches",
    key=lambda experience: f"{experience.batch_sequence}",
    id=_experience_id,
    headers=_experience_headers,
)
class Experience(Message):
    """A rollout's segments with reward and group, ready to train on. `batches`: buffer -> trainer.

    Advantages are not in it: the algorithm computes them in the trainer from the whole group, which stays
    inside one share of one batch."""

    ids: RolloutIds
    """The ids that the task had; those of expert data have the same form and are made by the buffer."""
    batch_sequence: NonNegativeInt
    """The batch k, trained at version k."""
    share: NonNegativeInt
    """Which of the shares; equal to the partition."""
    position: NonNegativeInt
    """Place inside the share, dense from 0."""
    loss_kind: LossKind
    """Which loss it goes into."""
    segments: tuple[Segment, ...]
    """Token segments to train on, with their loss masks."""
    reward: float | None
    """Reward of the rollout; None for expert data."""
    sampling: Sampling
    """Sampling settings of the rollout."""
    truncated: bool = False
    """A token limit ended the rollout."""
    expert: bool = False
    """Whether it comes from `experts`, not from the policy."""
    pair: Annotated[str | None, Meta(extra_json_schema={"enum": ["chosen", "rejected", None]})] = None
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
    terms: dict[str, float] = field(default_factory=dict)
    """Amounts that operators added to the reward, by the term's name."""
    verified_reward: float | None = None
    """The reward of the verdict, where `terms` were added to it."""
    use: NonNegativeInt = 0
    """0 in the batch of its group; else the number of the use, as `BatchReuse` has it."""
    roles: dict[str, float | None] = field(default_factory=dict)
    """Reward of each role of the segments, with the `terms`. None: it is not trained. Empty: all have `reward`."""


@rule(Experience)
def _check_experience(experience: Experience) -> Violation | None:
    if experience.pair not in (None, "chosen", "rejected"):
        return ".pair", f"got {show(experience.pair)}, expected chosen, rejected or none"
    return None


def _manifest_headers(manifest: BatchManifest) -> Facts:
    names = ("batch_sequence", "share", "count", "last")
    return {**{name: getattr(manifest, name) for name in names}, "total_experts": manifest.total_experts or None}


@message(
    "batch_manifest",
    version=4,
    readable_since=3,
    topic="batches",
    key=lambda manifest: f"{manifest.batch_sequence}",
    id=lambda manifest: "manifest",
    headers=_manifest_headers,
)
class BatchManifest(Message):
    """Closes a batch: the last record of the batch in every share. `batches`: buffer -> trainer."""

    batch_sequence: NonNegativeInt
    """The batch k, trained at version k."""
    share: NonNegativeInt
    """Which of the shares; equal to the partition."""
    num_shares: NonNegativeInt
    """Number of shares of the run."""
    count: NonNegativeInt
    """Experiences of this batch in this share."""
    digest: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_DIGEST.pattern}$"})]
    """`sha256:<hex>` over the encoded experiences of this share, in order."""
    groups: tuple[str, ...]
    """Groups of this share, in order."""
    num_groups: NonNegativeInt
    """Groups of the batch, over all shares."""
    total_groups: NonNegativeInt
    """Groups in all batches up to and including this one."""
    last: bool = False
    """The run's last batch; it may be short or empty."""
    admitted: NonNegativeInt | None = None
    """Groups that the feeder had admitted in all; set where `last`. A run that is given more to do has more later."""
    max_staleness: NonNegativeInt = 0
    """batch_sequence minus the oldest version that sampled a token of the batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the buffer since the batch before: mean reward over all decided rollouts, filtered share, ..."""
    total_experts: NonNegativeInt = 0
    """Demonstrations in all batches up to and including this one; one that came in two passes counts twice."""
    reused: tuple[str, ...] = ()
    """Groups that were decided before and are in this share once more, in order. `num_groups` does not count them."""
    scorers: dict[str, str] = field(default_factory=dict)
    """Taskset -> name and version of the reward that scored the newest of its rollouts in the batch, over all shares.
    Rewards of two versions do not compare."""


@rule(BatchManifest)
def _check_batch_manifest(manifest: BatchManifest) -> Violation | None:
    if manifest.share >= manifest.num_shares:
        return ".share", f"got {manifest.share}, expected less than the num_shares {manifest.num_shares}"
    if not _DIGEST.fullmatch(manifest.digest):
        return ".digest", f"got {show(manifest.digest)}, expected sha256:<64 hex digits>"
    return None
