"""The objects of a version: their names in the store, and how several of them make one version.

A version that one process wrote is one object. A version that several processes wrote is as many objects, its parts;
each has some of the tensors, and is by itself an ordinary snapshot or delta of these. The announcement lists the parts,
so it is their manifest: a version exists once all its parts are stored and the announcement stands on the log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from rftstream.contracts.versions import DeltaObject, ObjectPart, VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.stores.store import StoredObject

SUFFIXES = {WeightsKind.full: ".safetensors", WeightsKind.delta: ".delta"}
FOLDER = "versions/"


class HasObject(Protocol):
    """An announced object: a version's, a delta, or a part of either."""

    @property
    def object(self) -> str:
        """Name in the store."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the bytes."""


def object_name(name: VersionName, kind: WeightsKind = WeightsKind.full, part: int | None = None) -> str:
    """Return the name of a version's object in the store, or of one of its parts."""
    return f"{FOLDER}{name.stem}{'' if part is None else f'.{part:04d}'}{SUFFIXES[kind]}"


def parse_object_name(text: str) -> VersionName | None:
    """Return the version to which an object belongs; None if the name is not a version's."""
    folder, _, rest = text.partition("/")
    stem, dot, suffix = rest.rpartition(".")
    stem, has_part, part = stem.partition(".")
    is_ours = f"{folder}/" == FOLDER and f"{dot}{suffix}" in SUFFIXES.values()
    return VersionName.of_stem(stem) if is_ours and part.isdecimal() == bool(has_part) else None


def objects_of(announced: WeightsAnnounced | DeltaObject) -> Sequence[HasObject]:
    """Return all objects of a version, or of the delta to it: one, or the parts in order."""
    return announced.parts or (announced,)


def joined(name: VersionName, written: Sequence[StoredObject]) -> tuple[ObjectPart, tuple[ObjectPart, ...]]:
    """Return what is announced of the objects that were written: all of them as one, and the parts if there are
    several."""
    parts = tuple(ObjectPart(object=one.name, num_bytes=one.num_bytes, digest=one.digest) for one in written)
    if len(parts) == 1:
        return parts[0], ()
    num_bytes = sum(part.num_bytes for part in parts)
    return ObjectPart(object=f"{FOLDER}{name.stem}", num_bytes=num_bytes, digest=digest_of_parts(parts)), parts


def digest_of_parts(parts: Sequence[ObjectPart]) -> str:
    """Return `sha256:<hex>` over the parts: of each a line, the JSON of [object, num_bytes, digest]."""
    lines = (json.dumps([part.object, part.num_bytes, part.digest], separators=(",", ":")) + "\n" for part in parts)
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
