"""Versions of scorers: a text that changes whenever the same input could get another score."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rftstream.config.parts.own_code import imported_sources


def config_version(code: str, config: Any, *packages: str) -> str:
    """Return `<code>[+package-1.2]+<hash of the config>`. `code` is raised by hand when the code gives other
    verdicts."""
    installed = [f"{package}-{importlib.metadata.version(package)}" for package in packages]
    return "+".join([code, *installed, _short(msgspec.json.encode(config, order="deterministic"))])


def source_version(thing: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return a hash of the file that defines a user's function or class, of what that imports from its own folder, and
    of the options."""
    thing = inspect.unwrap(thing)
    while isinstance(thing, functools.partial):
        thing = inspect.unwrap(thing.func)
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        thing = type(thing)  # an object that can be called: its repr would differ in each process
    try:
        file = Path(inspect.getsourcefile(thing) or "")
        code = b"".join([file.read_bytes(), *imported_sources(thing.__module__, file)])
    except (OSError, TypeError):
        code = repr(thing).encode()
    return _short(code + msgspec.json.encode(dict(options or {}), order="deterministic"))


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
