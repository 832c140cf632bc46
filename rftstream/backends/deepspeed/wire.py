"""What the ranks of a backend tell each other: maps, lists, numbers and bytes in msgpack. Nothing is pickled.

Dataclasses of plain values are maps by themselves; the functions here are for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.algorithms.by_taskset import ByTaskset, TasksetAlgorithm
from rftstream.config import registry
from rftstream.config.sections import LoraSection
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec

ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "advantages")
"""Of a row."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def row_out(row: TrainingRow) -> dict[str, Any]:
    return {
        **{name: array_out(getattr(row, name)) for name in ARRAYS},
        "temperature": float(row.temperature),
        "group": int(row.group),
        "rollout": int(row.rollout),
        "stratum": row.stratum,
        "additions": {name: array_out(array) for name, array in row.additions.items()},
    }


def row_in(value: Mapping[str, Any]) -> TrainingRow:
    arrays: dict[str, Any] = {name: array_in(value[name]) for name in ARRAYS}
    return TrainingRow(
        **arrays,
        temperature=value["temperature"],
        group=value["group"],
        rollout=value["rollout"],
        stratum=value["stratum"],
        additions={name: array_in(array) for name, array in value["additions"].items()},
    )


def array_out(array: np.ndarray) -> tuple[str, list[int], bytes]:
    return array.dtype.str, list(array.shape), np.ascontiguousarray(array).tobytes()


def array_in(value: Sequence[Any]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


def algorithm_out(algorithm: Algorithm) -> dict[str, Any]:
    """By where its class is and what it was built with, for a loss depends on nothing else."""
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
    if "parts" in value:
        rest, *others = [TasksetAlgorithm(algorithm_in(one), tuple(tasksets)) for one, tasksets in value["parts"]]
        return ByTaskset(rest, others)
    cls = registry.import_path(value["path"], what="backend deepspeed")
    result: Algorithm = cls(registry.build_config(cls, value["config"], where=value["path"]))
    return result


def spec_out(spec: ModelSpec) -> dict[str, Any]:
    return {**dataclasses.asdict(spec), "folder": str(spec.folder)}


def spec_in(value: Mapping[str, Any]) -> ModelSpec:
    lora = msgspec.convert(value["lora"], LoraSection | None)
    return ModelSpec(**{**value, "folder": Path(value["folder"]), "lora": lora})
