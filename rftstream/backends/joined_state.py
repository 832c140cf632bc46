"""The state that a joined training loop keeps in a checkpoint: nested dicts and lists with tensors, as safetensors and
JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rftstream.desk import AnswerRefused
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import raw, write_tensors

TREE_FILE, TENSORS_FILE = "state.json", "state.safetensors"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state. AnswerRefused, before anything is written, if it has values of other kinds."""
    tensors: dict[str, RawTensor] = {}
    tree = _encode(state, tensors, "state")
    write_tensors(folder / TENSORS_FILE, tensors)
    (folder / TREE_FILE).write_text(json.dumps(tree) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state that `write_state` wrote, equal to the bit; None if there is none."""
    if not (folder / TREE_FILE).is_file():
        return None
    tree = json.loads((folder / TREE_FILE).read_text(encoding="utf-8"))
    found: dict[str, Any] = _decode(tree, {name: one.clone() for name, one in load_file(folder / TENSORS_FILE).items()})
    return found


def _encode(value: Any, tensors: dict[str, RawTensor], where: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor() | np.ndarray():
            if hasattr(value, "full_tensor"):
                raise AnswerRefused(f"{where}: got a shard (DTensor), expected a whole tensor; gather it first")
            name = str(len(tensors))
            try:
                tensors[name] = raw(torch.as_tensor(value))
            except (KeyError, TypeError, RuntimeError):  # meta, sparse and complex tensors, arrays of texts
                raise AnswerRefused(
                    f"{where}: got a {type(value).__name__} of {value.dtype} on {value.device}, expected plain numbers "
                    "in memory, as safetensors keeps them"
                ) from None
            return {"tensor" if isinstance(value, torch.Tensor) else "array": name}
        case np.number() | np.bool_() | np.str_() if not isinstance(value, np.complexfloating):
            return value.item()
        case Mapping():
            return {
                "dict": [
                    [_encode(key, tensors, f"{where}: a key"), _encode(one, tensors, f"{where}.{key}")]
                    for key, one in value.items()
                ]
            }
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_encode(one, tensors, f"{where}[{number}]") for number, one in enumerate(value)]}
        case bytes():
            return {"bytes": value.hex()}
    raise AnswerRefused(f"{where}: got a {type(value).__name__}, expected tensors, numbers, texts, lists and dicts")


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            return tensors[value].numpy()
        case "dict":
            return {_key(_decode(key, tensors)): _decode(one, tensors) for key, one in value}
        case "list":
            return [_decode(one, tensors) for one in value]
        case "tuple":
            return tuple(_decode(one, tensors) for one in value)
    return bytes.fromhex(value)


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
