"""Reads TOML files, and explains why a text is not TOML, with the line and the key of the error.

The parser reports what it expected, and a position. The author of the file needs the key, and for a duplicate also the
place of the first one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftstream.config.parts import registry
from rftstream.errors import ConfigError

_PLACE = re.compile(r" \((?:at line (\d+), column \d+|at end of document)\)$")
_HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]#=]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*(=?)")
_OF_DATA = (".jsonl", ".json", ".parquet", ".csv")
"""Ends of the names of data files."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a file, unchecked. ConfigError if it cannot be read or is not TOML."""
    if path.suffix in _OF_DATA and path.is_file():
        raise ConfigError(f"{path}: is data, expected a run file; `rftstream init --tasks {path}` makes one of it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = registry.near_file(path)
        raise ConfigError(f"{path}: no such file; name a run file, or set RFTSTREAM_CONFIG{near}") from None
    except IsADirectoryError:
        raise ConfigError(_not_a_file(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}; save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {explain_toml(text, str(error))}") from None


def glance(path: Path) -> dict[str, Any]:
    """Return the values of a file, unchecked. Return none if it cannot be read or is not TOML."""
    try:
        return read_toml(path)
    except (ConfigError, OSError):
        return {}


def explain_toml(text: str, error: str) -> str:
    """Return the parser's error with its line and key: `line 4: trainer.lr: given twice, first in line 2; keep one of
    them`."""
    place = _PLACE.search(error)
    what = _PLACE.sub("", error)
    lines = text.split("\n")
    number = int(place[1]) if place is not None and place[1] else len(lines)
    named = list(_named(lines[:number]))
    if what.startswith(("Cannot overwrite a value", "Cannot declare", "Cannot mutate")) and named:
        return _given_twice(named)
    key = f"{named[-1][1]}: " if named and (named[-1][0] == number or not (place and place[1])) else ""
    where = f"line {named[-1][0] if key else number}"
    shown = lines[number - 1].strip()
    said = f"found {shown!r}, which is not TOML: " if place is not None and place[1] else "not TOML: "
    hint = "; texts stand in quotes, true and false are written small" if what == "Invalid value" else ""
    return f"{where}: {key}{said}{what[:1].lower()}{what[1:]}{hint}"


def _given_twice(named: list[tuple[int, str, bool]]) -> str:
    """Explain that the newest of the names was given before, or is both a value and a section."""
    number, name, is_header = named[-1]
    for first, other, was_header in named[:-1]:
        if other == name and was_header and is_header:
            return f"line {number}: [{name}]: this section was begun in line {first}; put its settings together"
        if other == name and not was_header and not is_header:
            return f"line {number}: {name}: given twice, first in line {first}; keep one of them"
        if other == name or (not was_header and name.startswith(f"{other}.")) or other.startswith(f"{name}."):
            return (
                f"line {number}: {name}: line {first} gives {other} already, and both cannot be; give it all in one "
                "place, as a value or as a section"
            )
    return f"line {number}: {name}: given twice; keep one of them"


def _named(lines: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield line, full name of the key or section that begins there, and whether it is the header of a section."""
    section = ""
    for number, line in enumerate(lines, start=1):
        if header := _HEADER.match(line):
            section = _plain(header[1])
            yield number, section, True
        elif (key := _KEY.match(line)) and key[2]:
            name = _plain(key[1])
            yield number, f"{section}.{name}" if section else name, False


def _plain(name: str) -> str:
    return re.sub(r"\s*\.\s*", ".", name)


def _not_a_file(folder: Path) -> str:
    if (folder / "run.lock").exists():
        return f"{folder}: is a run folder, expected a run file; `rftstream resume {folder}` goes on with that run"
    found = ", ".join(map(str, sorted(folder.glob("*.toml"))))
    return f"{folder}: is a folder, expected a run file" + (f"; there is {found}" if found else "")
