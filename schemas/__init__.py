"""The contracts as data: one JSON Schema per message (`rollout.json`), and golden bytes of each version.

Nothing here imports rftstream, so that a reader in any language, or another Python program, can be written from it;
only `generate.py` does, which makes the schemas.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def load(contract: str) -> dict[str, Any]:
    """The JSON Schema of a contract, e.g. of `rollout`."""
    schema: dict[str, Any] = json.loads(files(__name__).joinpath(f"{contract}.json").read_text(encoding="utf-8"))
    return schema


def contracts() -> tuple[str, ...]:
    """The names of all contracts, sorted."""
    return tuple(sorted(path.name[:-5] for path in files(__name__).iterdir() if path.name.endswith(".json")))


def golden(contract: str) -> dict[str, bytes]:
    """The golden samples of a contract: `v1` -> record value. A contract with several forms has `v1-late`, ..."""
    folder = files(__name__).joinpath("golden")
    prefix, suffix = f"{contract}.", ".msgpack"
    return {
        path.name[len(prefix) : -len(suffix)]: path.read_bytes()
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.startswith(prefix) and path.name.endswith(suffix)
    }
