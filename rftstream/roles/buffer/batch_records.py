"""The records of a batch: for each share its experiences, and a manifest that closes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.roles.buffer.groups import Group
from rftstream.service.role import Publish


def batch_records(
    experiences_of: Mapping[int, Sequence[Experience]],
    groups_of: Mapping[int, Sequence[Group]],
    reused_of: Mapping[int, tuple[str, ...]],
    *,
    batch_sequence: int,
    total_groups: int,
    last: bool,
    admitted: int | None,
    max_staleness: int,
    metrics: dict[str, float],
    total_experts: int,
) -> list[Publish]:
    """Return the records of a batch, share by share. The keyword arguments are fields of each share's manifest."""
    outputs: list[Publish] = []
    num_groups = sum(map(len, groups_of.values()))
    for share, experiences in experiences_of.items():
        encoded = [codec.encode(experience) for experience in experiences]
        manifest = BatchManifest(
            batch_sequence=batch_sequence,
            share=share,
            num_shares=len(experiences_of),
            count=len(experiences),
            digest=codec.digest_of_experiences(encoded),
            groups=tuple(group.group_id for group in groups_of.get(share, ())),
            num_groups=num_groups,
            total_groups=total_groups,
            last=last,
            admitted=admitted,
            max_staleness=max_staleness,
            metrics=metrics,
            total_experts=total_experts,
            reused=reused_of.get(share, ()),
        )
        outputs += [Publish("batches", share, *pair) for pair in zip(experiences, encoded, strict=True)]
        outputs.append(Publish("batches", share, manifest))
    return outputs
