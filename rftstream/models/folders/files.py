"""Files of a model folder: whole new folders, reading and writing JSON, and digests."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError


@contextmanager
def whole_folder(target: Path, *, sign: str, setting: str) -> Iterator[Path]:
    """Yield an empty folder, which has the name `target` after the block: it appears complete or not at all, and if
    another process is first, that one's stays. ConfigError, which names the setting, if what is there has no file
    `sign`."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this number
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(target)
        except OSError:
            if not (target / sign).is_file():
                raise ConfigError(f"{setting}: {target} is in the way: it has no {sign}; remove it") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file isn't there."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected an object")
    return values


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that define its tokenizer, sorted by name."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name in names]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def digest_files(paths: list[Path]) -> str:
    """Return `sha256:<hex>` over the names and contents of files, in the given order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            inner = hashlib.file_digest(file, "sha256")
        total.update(path.name.encode() + b"\0" + inner.digest())
    return f"sha256:{total.hexdigest()}"


def digest_bytes(data: bytes) -> str:
    """Return `sha256:<hex>` of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_folder(folder: Path) -> str:
    """Return the digest of a folder's files. Files are read again only if their sizes or times have changed."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return _digest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@functools.cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_files([path for path, _, _ in files])
