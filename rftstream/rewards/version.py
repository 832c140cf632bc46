"""Versions of scorers: a text that changes whenever the same input could get another score."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rftstream.config.parts import registry
from rftstream.config.parts.own_code import imported_sources, named_sources
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.sections import RunConfig, name_of_part

_HOST = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]*(?=\S*\Z)", re.IGNORECASE)
"""Scheme and host of a text that is an address as a whole."""


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


def environment_version(config: RunConfig, where: str, name: str = "") -> str:
    """Return a hash of what the rewards of the environment at `where` depend on, as `RunConfig.build_environment` takes
    it: its settings, without those that only say where it runs, and the user's code behind it.

    Of the settings of a built-in environment count those that are not at their defaults, so that a new setting of a new
    release changes nothing, and the code that they name."""
    named = config.environments_named().get(where, name)
    if isinstance(named, str) or (name and name != name_of_part(named, where)):
        name, own = name or str(named), {}
    else:
        name, own = name_of_part(named, where), {key: value for key, value in named.items() if key != "name"}
    part, spec = registry.resolve("environment", name, where=where), registry.find_spec(EnvironmentSpec, name)
    given = {**config.environments.get(name, {}), **own}
    if ":" in name:
        kept = {key: value for key, value in given.items() if key not in spec.host_settings}
        return source_version(part, kept, name=name)
    usual, built = (
        msgspec.to_builtins(dataclasses.asdict(registry.build_config(part, options, where=f"environments.{name}")))
        for options in ({}, given)
    )
    set_here = {key: value for key, value in built.items() if value != usual[key] and key not in spec.host_settings}
    folders = [config.base, *built.get("path", ())]
    code = [
        source
        for setting in spec.code_settings
        for thing in _values_at(built, setting.split("."))
        for source in named_sources(thing, folders)
    ]
    paths = {path for setting in spec.path_settings for path in _values_at(built, setting.split("."))}
    facts = name, spec.revision, _without_places(set_here, paths)
    return _short(b"".join(code) + msgspec.json.encode(facts, order="deterministic"))


def _values_at(values: Any, keys: Sequence[str]) -> Iterator[str]:
    """Yield the texts at a dotted key with * for any key, also those in lists."""
    if isinstance(values, str) and not keys:
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _values_at(value, keys)
    elif isinstance(values, dict) and keys:
        for key in values if keys[0] == "*" else values.keys() & {keys[0]}:
            yield from _values_at(values[key], keys[1:])


def _without_places(value: Any, paths: set[str]) -> Any:
    """Return settings without what differs between hosts: of a path its last part, of an address what follows the
    host."""
    if isinstance(value, dict):
        return {key: _without_places(one, paths) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(one, paths) for one in value]
    if isinstance(value, str):
        return Path(value).name if value in paths else value[len(host[0]) if (host := _HOST.match(value)) else 0 :]
    return value


def _sources(module: str) -> list[bytes]:
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    try:
        return [file.read_bytes(), *imported_sources(module, file)]
    except OSError:
        return []


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
