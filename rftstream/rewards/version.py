"""Versions of scorers: a text that changes whenever the same input could get another score."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


def config_version(code: str, config: Any, *packages: str) -> str:
    """Return `<code>[+package-1.2]+<hash of the config>`. `code` is raised by hand when the code gives other
    verdicts."""
    installed = [f"{package}-{importlib.metadata.version(package)}" for package in packages]
    return "+".join([code, *installed, _short(msgspec.json.encode(config, order="deterministic"))])


def source_version(thing: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return a hash of the file that defines a user's function or class, and of the options."""
    try:
        code = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").read_bytes()
    except (OSError, TypeError):
        code = repr(thing).encode()
    return _short(code + msgspec.json.encode(dict(options or {}), order="deterministic"))


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
