"""Settings as plain values, in the form in which they are written into a file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError


def plain_values(value: Any, like: Any = None) -> Any:
    """Return a config, or a part of one, as maps, lists and values without None. `like` is the map of an earlier file
    at the same place; default values are left out unless `like` has the setting."""
    known = like if isinstance(like, Mapping) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            item.name: getattr(value, item.name)
            for item in dataclasses.fields(value)
            if known is None or item.name in known or getattr(value, item.name) != _default(item)
        }
    if isinstance(value, Mapping):
        return {key: plain_values(item, (known or {}).get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value


def toml_value(value: Any) -> str:
    """Return a value in TOML, in one line. A function or a class is written as its name, `module:Name`; ConfigError if
    it has none that another process could import."""
    if callable(value):
        return toml_value(_import_name(value))
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(name))} = {toml_value(one)}" for name, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, (bool, str, Path)):
        return json.dumps(value if isinstance(value, bool) else str(value), ensure_ascii=False)
    return repr(value)


def _import_name(value: Any) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if module in ("", "__main__") or not name.isidentifier():
        last = name.rpartition(".")[2]
        raise ConfigError(
            f"got {name or repr(value)} itself, which the run's own processes cannot import; write it into a module "
            f"beside the run file, and name it: 'my_module:{last if last.isidentifier() else 'name'}'"
        )
    return f"{module}:{name}"


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)
