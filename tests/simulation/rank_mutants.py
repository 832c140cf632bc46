"""Rules of versions in parts, left out one at a time."""

from __future__ import annotations

from typing import Any

from rftstream.contracts.versions import VersionName
from rftstream.errors import WeightsError
from rftstream.roles.trainer import versions as versions_module
from rftstream.weights import retention
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.version_parts import parse_object_name
from tests.simulation.changes import Change, around, instead


@around(WeightsFollower, "_follow")
def held_before_whole(follow: Any, self: WeightsFollower, state: Any, links: Any) -> Any:
    """The copy counts as the version as soon as one of its parts is applied."""
    try:
        return follow(self, state, links)
    except WeightsError:
        self._held = links[-1][0].name
        raise


def whole_name(text: str) -> VersionName | None:
    return parse_object_name(text) if text.count(".") == 1 else None


def delete_but_any_beginning(objects: Any, *, in_force: Any, first: Any, **needs: Any) -> list[VersionName]:
    objects = list(objects)
    beginnings = [name for one in objects if (name := parse_object_name(one)) is not None and name.version == 0]
    return retention.to_delete(objects, in_force=in_force, first=min([*beginnings, *in_force]), **needs)


RULES: dict[str, tuple[str, str, Change]] = {
    "held-before-whole": ("lineage", "a version is held although a part of it could not be read", held_before_whole),
    "parts-left": (
        "bounded", "parts without an announcement stay", instead(retention, parse_object_name=whole_name)
    ),
    "any-beginning-kept": (
        "bounded", "version 0 of a trainer that never announced it is kept for ever",
        instead(versions_module, to_delete=delete_but_any_beginning),
    ),
}  # fmt: skip
