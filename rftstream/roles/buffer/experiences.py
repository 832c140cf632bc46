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
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.groups import Group
from rftstream.roles.buffer.tally import Tally
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
    added = plain_sum(terms.values())
    spans = result.masks.get(sibling, ()) if result is not None else ()
    return Experience(
        ids=verified.ids,
        batch_sequence=batch,
        share=share,
        position=position,
        loss_kind=LossKind.rl,
        segments=mask_tokens(rollout.segments, spans),
        reward=verdict.reward + added if terms else verdict.reward,
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
        roles={role: None if one is None else one + added for role, one in verdict.roles.items()},
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


def experiences_of_share(
    groups: Sequence[Group], share: int, batch: int, bodies: Bodies, tally: Tally, imported: bool
) -> list[Publish]:
    """Return the encoded experiences of a share: all kept siblings of these groups, in order. They are counted in
    `tally`. Each body is dropped once it is encoded, so that a batch is in memory once. `imported` means that the
    versions of the rollouts belong to another run."""
    found: list[Publish] = []
    for some in bodies.in_parts(groups):
        read = bodies.get_all([sibling.place_offset for group in some for sibling in group.kept])
        for group in some:
            for sibling in group.kept:
                body = read.pop(sibling.place_offset)
                tally.rollout(body, None if imported else batch)
                made = experience_of(body, batch, share, position=len(found), result=group.result)
                found.append(encoded(made))
                bodies.forget(*sibling.place_offset)
    return found


def encoded(experience: Experience) -> Publish:
    """Return the experience as an output of its share, encoded. Nothing of the rollout's body is kept for it."""
    return Publish("batches", experience.share, *codec.encode_once(experience))


# ------------------------------------------------------------------------------------------
#
# The records of a batch: for each share its experiences, and a manifest that closes them.


def batch_records(
    experiences_of: Mapping[int, Sequence[Publish]],
    groups_of: Mapping[int, Sequence[Group]],
    reused_of: Mapping[int, tuple[str, ...]],
    manifest: BatchManifest,
) -> list[Publish]:
    """Return the records of a batch, share by share, from its encoded experiences. `manifest` has the fields that are
    the same in all shares."""
    outputs: list[Publish] = []
    for share, experiences in experiences_of.items():
        own = replace(
            manifest,
            share=share,
            count=len(experiences),
            digest=codec.digest_of_experiences(experience.value or b"" for experience in experiences),
            groups=tuple(group.group_id for group in groups_of.get(share, ())),
            reused=reused_of.get(share, ()),
        )
        outputs += (*experiences, Publish("batches", share, own))
    return outputs
