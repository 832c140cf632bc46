"""What the trainer gets of a scored rollout."""

from __future__ import annotations

from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout


def experience_of(verified: VerifiedRollout, batch: int, share: int, *, position: int) -> Experience:
    """`position`: inside the share."""
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
