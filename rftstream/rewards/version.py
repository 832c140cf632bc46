"""Versions of scorers: a text that changes whenever the same input could get another score."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import sys
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


def source_version(thing: Any, options: Mapping[str, Any] | None = None, *, name: str = "") -> str:
    """Return a hash of the options and of the user's code behind a function, class or object: of the module in `name`
    (`module:Thing`), of the one that defines it, and of what these import from their own folders."""
    defined = inspect.unwrap(thing)
    while isinstance(defined, functools.partial):
        defined = inspect.unwrap(defined.func)
    if not (inspect.isclass(defined) or inspect.isroutine(defined)):
        defined = type(defined)  # an object that can be called: its repr would differ in each process
    named = name.partition(":")[0] if ":" in name else defined.__module__
    sources = [one for module in dict.fromkeys((named, defined.__module__)) for one in _sources(module)]
    code = b"".join(sources) or repr(defined).encode()
    return _short(code + msgspec.json.encode(dict(options or {}), order="deterministic"))


def _sources(module: str) -> list[bytes]:
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    try:
        return [file.read_bytes(), *imported_sources(module, file)]
    except OSError:
        return []


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
