"""The records of a batch: for each share its experiences, and a manifest that closes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.roles.buffer.groups import Group
from rftstream.service.role import Publish


def batch_records(
    experiences_of: Mapping[int, Sequence[Experience]],
    groups_of: Mapping[int, Sequence[Group]],
    reused_of: Mapping[int, tuple[str, ...]],
    manifest: BatchManifest,
) -> list[Publish]:
    """Return the records of a batch, share by share. `manifest` says what holds for all shares."""
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
