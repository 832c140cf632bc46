"""Publishing a version: write the object, make it durable, and say what to announce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rftstream import faults
from rftstream.messages import VersionName, WeightsAnnounced, WeightsKind
from rftstream.weights.snapshot import RawTensor, state_digest, write_snapshot
from rftstream.weights.store import ObjectStore

Fault = Callable[[str], None]
"""Called with the name of a point that a fault test may want to stop at."""


def object_name(name: VersionName) -> str:
    return f"versions/{name.trainer_epoch:06d}-{name.version:08d}.safetensors"


def parse_object_name(text: str) -> VersionName | None:
    """None for a name that is not a version's."""
    folder, _, rest = text.partition("/")
    epoch, dash, version = rest.removesuffix(".safetensors").partition("-")
    if folder != "versions" or not rest.endswith(".safetensors") or not dash:
        return None
    if not (epoch.isdecimal() and version.isdecimal()):
        return None
    return VersionName(trainer_epoch=int(epoch), version=int(version))


def publish(
    store: ObjectStore,
    tensors: Mapping[str, RawTensor],
    name: VersionName,
    model: str,
    dtype: str,
    *,
    resumed: bool = False,
    announced_at: float = 0.0,
    gone: Sequence[VersionName] = (),
    fault: Fault = faults.at,
) -> WeightsAnnounced:
    """Puts the version into the store. The object is durable when this returns; announcing it is the caller's part, and
    so is deleting what the announcement says is `gone`.

    This is the one place where a version's form is chosen; so far it is always a full snapshot, without a parent.
    """
    metadata = {"model": model, "trainer_epoch": str(name.trainer_epoch), "version": str(name.version)}
    stored = store.write(object_name(name), lambda file: write_snapshot(file, tensors, metadata))
    fault("object_written")
    return WeightsAnnounced(
        model=model,
        name=name,
        kind=WeightsKind.full,
        parent=None,
        object=stored.name,
        num_bytes=stored.num_bytes,
        digest=stored.digest,
        weights_digest=state_digest(tensors),
        dtype=dtype,
        resumed=resumed,
        announced_at=announced_at,
        gone=tuple(gone),
    )
