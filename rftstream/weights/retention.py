"""Which weight objects may be deleted. A pure function; the trainer calls it before it announces a version, which says
what goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rftstream.messages import VersionName
from rftstream.weights.publisher import parse_object_name


def to_delete(
    objects: Iterable[str],
    *,
    in_force: Sequence[VersionName],
    newest_keep: int,
    kept_checkpoints: Iterable[VersionName] = (),
    due_evaluations: Iterable[VersionName] = (),
    best: Iterable[VersionName] = (),
    pinned: Iterable[VersionName] = (),
) -> list[VersionName]:
    """Versions out of `objects` that nothing needs any more, oldest first.

    Kept are the newest `newest_keep` of the announced versions in force (`in_force`, oldest first), those of kept
    checkpoints, due evaluations, best results and `pinned` (another run's start), and version 0 of the first trainer.
    What the newest announcement in force does not reach (a version just being published, a newer trainer's) and names
    that are not versions are never touched.
    """
    if not in_force:
        return []
    newest = in_force[-1]
    keep = {*in_force[-newest_keep:], *kept_checkpoints, *due_evaluations, *best, *pinned}
    found = [version for name in objects if (version := parse_object_name(name)) is not None]
    beginnings = [version for version in (*found, *in_force) if version.version == 0]
    if beginnings:
        keep.add(min(beginnings, key=_age))
    return sorted((one for one in found if one not in keep and _age(one) < _age(newest)), key=_age)


def _age(name: VersionName) -> tuple[int, int]:
    return name.trainer_epoch, name.version
