"""What the trainer gets of scored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.roles.buffer.groups import Group

VerifiedAt = Mapping[tuple[TopicPartition, int], VerifiedRollout]
"""Partition and offset on `verified` -> what stands there."""


def experience_of(verified: VerifiedRollout, batch: int, share: int, *, position: int) -> Experience:
    """Return what the trainer gets of a scored rollout. `position`: its place in the share of the batch."""
    rollout, verdict = verified.rollout, verified.verdict
    assert rollout is not None and verdict is not None, "others are in no batch"
    return Experience(
        ids=verified.ids,
        batch_sequence=batch,
        share=share,
        position=position,
        loss_kind=LossKind.rl,
        segments=rollout.segments,
        reward=verdict.reward,
        sampling=rollout.sampling,
        truncated=rollout.status is RolloutStatus.truncated,
        parts=verdict.parts,
        metrics={**rollout.metrics, **verdict.metrics},
        additions=verdict.additions,
        attachments=rollout.attachments,
    )


def experiences_of_share(groups: Sequence[Group], share: int, batch: int, verified: VerifiedAt) -> list[Experience]:
    """Return the experiences of a share of a batch: all scored siblings of these groups, in order."""
    scored = [verified[sibling.place_offset] for group in groups for sibling in group.scored]
    return [experience_of(rollout, batch, share, position=position) for position, rollout in enumerate(scored)]
