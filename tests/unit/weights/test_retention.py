"""Which weight objects go."""

from __future__ import annotations

import pytest

from rftstream.contracts.versions import VersionName
from rftstream.weights.retention import to_delete
from rftstream.weights.version_parts import object_name

pytestmark = pytest.mark.law("lineage")


def name(epoch: int, version: int) -> VersionName:
    return VersionName(trainer_epoch=epoch, version=version)


def versions(epoch: int, *numbers: int) -> list[VersionName]:
    return [name(epoch, number) for number in numbers]


def deleted(objects: list[VersionName], **needs: object) -> list[VersionName]:
    return to_delete([object_name(one) for one in objects], **needs)  # type: ignore[arg-type]


def test_the_newest_and_version_0_stay() -> None:
    all_of_them = versions(1, *range(8))
    assert deleted(all_of_them, in_force=all_of_them, newest_keep=3) == versions(1, 1, 2, 3, 4)


def test_what_something_needs_stays() -> None:
    all_of_them = versions(1, *range(10))
    gone = deleted(
        all_of_them,
        in_force=all_of_them,
        newest_keep=2,
        kept_checkpoints=[name(1, 4), name(1, 6)],
        due_evaluations=[name(1, 7)],
        best=[name(1, 2)],
    )
    assert gone == versions(1, 1, 3, 5)


def test_versions_out_of_force_go_and_the_first_beginning_stays() -> None:
    in_force = [*versions(1, 0, 1, 2), *versions(2, 2, 3)]
    objects = [*versions(1, 0, 1, 2, 3, 4), *versions(2, 2, 3)]
    assert deleted(objects, in_force=in_force, newest_keep=2) == versions(1, 1, 2, 3, 4)
    restarted = [*versions(1, 0), *versions(2, 0, 1, 2)]
    assert deleted(restarted, in_force=restarted, newest_keep=2) == versions(2, 0)
    assert deleted(restarted, in_force=restarted[1:], newest_keep=2) == versions(1, 0), "it was never announced"
    assert deleted(restarted, in_force=restarted[1:], newest_keep=2, first=name(1, 0)) == versions(2, 0)


def test_what_is_newer_than_the_newest_known_is_never_touched() -> None:
    objects = [*versions(1, 0, 1, 2, 3), *versions(2, 1, 2)]
    assert deleted(objects, in_force=versions(1, 0, 1, 2), newest_keep=1) == versions(1, 1)


def test_nothing_known_nothing_deleted() -> None:
    assert deleted(versions(1, 0, 1), in_force=[], newest_keep=1) == []


def test_foreign_names_are_never_touched() -> None:
    in_force = versions(1, 0, 1, 2)
    assert to_delete(["notes.txt", "checkpoints/000001-00000001/manifest.json"], in_force=in_force, newest_keep=1) == []


def test_anchors_are_kept_with_all_that_came_after() -> None:
    """Anchors are 0, 4, 8 and 12."""
    all_of_them = versions(1, *range(14))
    parents = {name(1, one): name(1, one - 1) for one in range(14) if one % 4}
    assert deleted(all_of_them, in_force=all_of_them, newest_keep=2, parents=parents) == versions(1, *range(1, 8))


def test_what_a_kept_version_is_made_from_stays() -> None:
    all_of_them = versions(1, *range(14))
    parents = {name(1, one): name(1, one - 1) for one in range(14) if one % 4}
    gone = deleted(
        all_of_them, in_force=all_of_them, newest_keep=1, parents=parents, kept_checkpoints=[name(1, 6)],
        best=[name(1, 2)],
    )  # fmt: skip
    assert gone == versions(1, 3, 7, 8, 9, 10, 11)
