"""The rule for which weight objects may be deleted: a pure function.

The trainer calls it before it announces a version. The announcement lists the versions that are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rftstream.contracts.versions import VersionName
from rftstream.weights.version_parts import parse_object_name


def to_delete(
    objects: Iterable[str],
    *,
    in_force: Sequence[VersionName],
    newest_keep: int,
    parents: Mapping[VersionName, VersionName] | None = None,
    kept_checkpoints: Iterable[VersionName] = (),
    due_evaluations: Iterable[VersionName] = (),
    best: Iterable[VersionName] = (),
    first: VersionName | None = None,
) -> list[VersionName]:
    """Return the versions in `objects` that are no longer needed, oldest first.

    `in_force` are the announced versions in force, oldest first. `parents` has the parent of each version that is only
    a delta; the other versions are anchors. `first` is the first version 0 that was announced, if it is not in force
    any more. Objects of a version that was never announced are what a dead trainer has left. These are kept:

    - the newest `newest_keep` anchors in force, and every version after the oldest of these;
    - the versions of kept checkpoints, due evaluations and best results;
    - version 0 of the first trainer that announced it;
    - all versions from which a kept version is made.

    Two kinds of names are never returned: versions newer than the newest in force (being published, or a newer
    trainer's), and names that are not versions."""
    if not in_force:
        return []
    parents = parents or {}
    newest = in_force[-1]
    anchors = [place for place, name in enumerate(in_force) if name not in parents][-newest_keep:]
    keep = {*in_force[anchors[0] if anchors else 0 :], *kept_checkpoints, *due_evaluations, *best}
    found = {version for text in objects if (version := parse_object_name(text)) is not None}
    beginnings = [version for version in in_force if version.version == 0]
    keep |= {first} if first is not None else {*beginnings[:1]}
    for name in list(keep):
        while (parent := parents.get(name)) is not None and parent not in keep:
            keep.add(parent)
            name = parent
    return sorted(name for name in found if name not in keep and name < newest)
