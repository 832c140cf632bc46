"""Which weight objects may be deleted. A pure function; the trainer calls it before it announces a version, which says
what goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rftstream.contracts.versions import VersionName
from rftstream.weights.publisher import parse_object_name


def to_delete(
    objects: Iterable[str],
    *,
    in_force: Sequence[VersionName],
    newest_keep: int,
    parents: Mapping[VersionName, VersionName] | None = None,
    kept_checkpoints: Iterable[VersionName] = (),
    due_evaluations: Iterable[VersionName] = (),
    best: Iterable[VersionName] = (),
    pinned: Iterable[VersionName] = (),
) -> list[VersionName]:
    """Versions out of `objects` that nothing needs any more, oldest first.

    `parents`: of the versions that are nothing but a delta; the others are anchors. Kept are the newest `newest_keep`
    anchors of the announced versions in force (`in_force`, oldest first) and what came after the oldest of them, the
    versions of kept checkpoints, due evaluations, best results and `pinned` (another run's start), version 0 of the
    first trainer, and of each of these all that it is made from. What the newest announcement in force does not reach
    (a version just being published, a newer trainer's) and names that are not versions are never touched.
    """
    if not in_force:
        return []
    parents = parents or {}
    newest = in_force[-1]
    anchors = [place for place, one in enumerate(in_force) if one not in parents][-newest_keep:]
    keep = {*in_force[anchors[0] if anchors else 0 :], *kept_checkpoints, *due_evaluations, *best, *pinned}
    found = {version for name in objects if (version := parse_object_name(name)) is not None}
    beginnings = [version for version in (*found, *in_force) if version.version == 0]
    if beginnings:
        keep.add(min(beginnings, key=_age))
    for one in list(keep):
        while (parent := parents.get(one)) is not None and parent not in keep:
            keep.add(parent)
            one = parent
    return sorted((one for one in found if one not in keep and _age(one) < _age(newest)), key=_age)


def _age(name: VersionName) -> tuple[int, int]:
    return name.trainer_epoch, name.version
