"""The messages between the ranks of a backend: maps, lists, numbers, arrays and bytes in msgpack. Nothing is pickled.

Dataclasses become maps; functions in this module read them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.by_taskset import ByTaskset, TasksetAlgorithm
from rftstream.config.parts import registry
from rftstream.config.sections import LoraSection
from rftstream.contracts.beside import Beside
from rftstream.contracts.rollouts import ImageSpan
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache

ARRAY = 1
"""Number of the msgpack extension for arrays: dtype, shape and bytes."""
PART_BYTES = 4 << 20


def pack(value: Any) -> bytes:
    """Return a value as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def unpack(data: bytes) -> Any:
    """Return the value that `pack` was given. Dataclasses come back as maps, and arrays are writable."""
    return msgspec.msgpack.decode(data, ext_hook=_array)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        parts = (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not sent to ranks")


def _array(_: int, parts: memoryview) -> np.ndarray:
    dtype, shape, data = msgspec.msgpack.decode(parts)
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


def put(store: Any, key: str, value: Any) -> None:
    """Write a value into a store in parts: the store takes 8 MiB at once, and a batch may be larger."""
    data = pack(value)
    parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)
    store.set(key, pack(len(parts)))


def take(store: Any, key: str) -> Any:
    """Return what `put` wrote."""
    return unpack(b"".join(store.get(f"{key}/{number}") for number in range(unpack(store.get(key)))))


def drop(store: Any, key: str) -> None:
    """Delete what `put` wrote."""
    for number in range(unpack(store.get(key))):
        store.delete_key(f"{key}/{number}")
    store.delete_key(key)


def rows_in(values: Sequence[Mapping[str, Any]]) -> list[TrainingRow]:
    """Return the rows that were packed, without the versions that sampled them. No backend reads those."""
    spans = tuple[ImageSpan, ...]
    return [
        TrainingRow(
            **{
                **value,
                "images": msgspec.convert(value["images"], spans),
                "beside": {name: Beside(**column) for name, column in value["beside"].items()},
                "versions": (),
            }
        )
        for value in values
    ]


def image_bytes(rows: Sequence[TrainingRow], images: ImageCache | None) -> dict[str, bytes]:
    """Return the bytes of the images of all rows, by digest. ImageError if one is gone."""
    shown = {span.image.digest: span.image for row in rows for span in row.images}
    if shown and images is None:
        raise ConfigError("backend deepspeed: got rows with images, which the model is not shown")
    return {} if images is None else {digest: images.fetch(media) for digest, media in shown.items()}


def algorithm_out(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm as the import path of its class and its config; a loss depends on nothing else. ConfigError
    if other processes cannot build it."""
    if isinstance(algorithm, ByTaskset):
        return {"parts": [[algorithm_out(part.algorithm), part.tasksets] for part in algorithm.parts]}
    cls = type(algorithm)
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ConfigError(
            f"backend deepspeed: other processes can't import the algorithm {path}; put the class into a module"
        )
    if not hasattr(algorithm, "config"):
        raise ConfigError(
            f"backend deepspeed: the algorithm {path} has no `config`, of which other processes would build it; keep "
            "in `self.config` what its class was given"
        )
    return {"path": path, "config": msgspec.to_builtins(algorithm.config)}


def algorithm_in(value: Mapping[str, Any]) -> Algorithm:
    """Build an algorithm from what `algorithm_out` returned."""
    if "parts" in value:
        rest, *others = [TasksetAlgorithm(algorithm_in(one), tuple(tasksets)) for one, tasksets in value["parts"]]
        return ByTaskset(rest, others)
    cls = registry.import_path(value["path"], what="backend deepspeed")
    result: Algorithm = cls(registry.build_config(cls, value["config"], where=value["path"]))
    return result


def spec_in(value: Mapping[str, Any]) -> ModelSpec:
    """Return the spec that was packed."""
    lora = msgspec.convert(value["lora"], LoraSection | None)
    return ModelSpec(**{**value, "folder": Path(value["folder"]), "lora": lora})
