"""Secrets of a run file. Their values stay in the environment; files and records hold only the variables' names.

A setting may be `"env:NAME"`. Its value is looked up where it is used. A literal secret is moved into the environment
of this process, which its workers inherit, and replaced by such a name. So it reaches no run folder, no topic, no log
and no list of processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.errors import ConfigError

_IS_SECRET = re.compile(r"(password|passwd|secret|api_?key|secret_key|access_key|auth_token|credentials?)$", re.I)
_IS_SECRET_VARIABLE = re.compile(_IS_SECRET.pattern.replace("auth_token", "token"), re.I)
_IS_SECRET_FIELD = re.compile(r"(?:^|_)(authorization|" + _IS_SECRET_VARIABLE.pattern[1:], re.I)
_IN_URL = re.compile(r"(?<=://)[^/@\s\"]+(?=@)")
_SCHEME = "env:"
_PREFIX = "RFTSTREAM_SECRET"


def hide(values: dict[str, Any], *, where: Sequence[str] = (), names: Mapping[str, str] | None = None) -> None:
    """Replace literal secrets in place. `names`: dotted key -> environment variable of the key."""
    for key, value in values.items():
        path = (*where, str(key))
        if isinstance(value, dict):
            hide(value, where=path, names=names)
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, dict):
                    hide(one, where=(*path, str(number)), names=names)
        elif isinstance(value, (str, int)) and _IS_SECRET.search(str(key)) and not _is_named(value):
            name = (names or {}).get(".".join(path)) or _variable(path, str(value))
            os.environ[name] = str(value)
            values[key] = _SCHEME + name


def reveal(options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the options with their secrets looked up. ConfigError for a secret that this process was not given."""
    return {key: _revealed(value, f"{where}.{key}") for key, value in options.items()}


def hidden(text: str) -> str:
    """Return the text in a form that may be written down: without the values of environment variables whose names look
    like secrets, and without the user and password of a URL."""
    secrets = {value for name, value in os.environ.items() if _IS_SECRET_VARIABLE.search(name) and len(value) >= 4}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return without_logins(text)


def without_logins(text: str) -> str:
    """Return the text without the user and password of a URL."""
    return _IN_URL.sub("***", text)


def is_secret(name: str) -> bool:
    """Return whether a field of this name, such as `api_key` or `token`, holds a secret."""
    return _IS_SECRET_FIELD.search(name) is not None


def _revealed(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return reveal(value, where=where)
    if not _is_named(value):
        return value
    name = value.removeprefix(_SCHEME)
    if name not in os.environ:
        raise ConfigError(
            f"{where}: {name} is not set, expected the secret in this environment variable, for secrets are not written"
            f" to the run folder; export {name}=..."
        )
    return os.environ[name]


def _is_named(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_SCHEME)


def _variable(path: Sequence[str], value: str) -> str:
    """Return a free variable, or the one that has this value already."""
    base = "__".join((_PREFIX, *(re.sub(r"\W", "_", part).upper() for part in path)))
    name, number = base, 1
    while os.environ.get(name, value) != value:
        number += 1
        name = f"{base}_{number}"
    return name
