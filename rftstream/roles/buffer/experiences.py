"""The experiences that the trainer receives, made from scored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus, Segment
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.core.samples import plain_sum
from rftstream.data.operators.base import TokenSpan
from rftstream.data.operators.pipeline import ExperienceResult
from rftstream.roles.buffer.groups import Group
from rftstream.service.role import Publish

VerifiedAt = Mapping[tuple[TopicPartition, int], VerifiedRollout]
"""Partition and offset on `verified` -> the rollout of that record."""


def experience_of(
    verified: VerifiedRollout,
    batch: int,
    share: int,
    *,
    position: int,
    result: ExperienceResult | None = None,
    use: int = 0,
    weight: float = 1.0,
) -> Experience:
    """Return the experience of a scored rollout. `position` is its place in the share of the batch, and `result` the
    operators' decision on its group. `use` and `weight` are for a batch that reuses the group."""
    rollout, verdict = verified.rollout, verified.verdict
    assert rollout is not None and verdict is not None, "others are in no batch"
    sibling = verified.ids.sibling
    terms = dict(result.terms.get(sibling, {})) if result is not None else {}
    spans = result.masks.get(sibling, ()) if result is not None else ()
    return Experience(
        ids=verified.ids,
        batch_sequence=batch,
        share=share,
        position=position,
        loss_kind=LossKind.rl,
        segments=mask_tokens(rollout.segments, spans),
        reward=verdict.reward + plain_sum(terms.values()) if terms else verdict.reward,
        sampling=rollout.sampling,
        truncated=rollout.status is RolloutStatus.truncated,
        parts=verdict.parts,
        metrics={**rollout.metrics, **verdict.metrics},
        additions=verdict.additions,
        attachments=rollout.attachments,
        terms=terms,
        verified_reward=verdict.reward if terms else None,
        use=use,
        weight=weight,
    )


def mask_tokens(segments: tuple[Segment, ...], spans: Sequence[TokenSpan]) -> tuple[Segment, ...]:
    """Return the segments with a loss mask of 0 in these spans."""
    if not spans:
        return segments
    masks = {number: bytearray(segments[number].loss_mask.data) for number in {span.segment for span in spans}}
    for span in spans:
        masks[span.segment][span.start : span.stop] = bytes(span.stop - span.start)
    return tuple(
        replace(segment, loss_mask=replace(segment.loss_mask, data=bytes(masks[number])))
        if number in masks
        else segment
        for number, segment in enumerate(segments)
    )


def experiences_of_share(groups: Sequence[Group], share: int, batch: int, verified: VerifiedAt) -> list[Experience]:
    """Return the experiences of a share of a batch: all kept siblings of these groups, in order."""
    kept = [(verified[sibling.place_offset], group.result) for group in groups for sibling in group.kept]
    return [
        experience_of(rollout, batch, share, position=position, result=result)
        for position, (rollout, result) in enumerate(kept)
    ]


# ------------------------------------------------------------------------------------------
#
# The records of a batch: for each share its experiences, and a manifest that closes them.


def batch_records(
    experiences_of: Mapping[int, Sequence[Experience]],
    groups_of: Mapping[int, Sequence[Group]],
    reused_of: Mapping[int, tuple[str, ...]],
    manifest: BatchManifest,
) -> list[Publish]:
    """Return the records of a batch, share by share. `manifest` has the fields that are the same in all shares."""
    outputs: list[Publish] = []
    for share, experiences in experiences_of.items():
        encoded = [codec.encode(experience) for experience in experiences]
        own = replace(
            manifest,
            share=share,
            count=len(experiences),
            digest=codec.digest_of_experiences(encoded),
            groups=tuple(group.group_id for group in groups_of.get(share, ())),
            reused=reused_of.get(share, ()),
        )
        outputs += [Publish("batches", share, *pair) for pair in zip(experiences, encoded, strict=True)]
        outputs.append(Publish("batches", share, own))
    return outputs
