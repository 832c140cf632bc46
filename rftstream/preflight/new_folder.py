"""A folder that appears as a whole. It is filled beside its final place and then renamed. A report in it describes its
content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError

REPORT = "report.json"
"""The report in the folder: `settings`, which it depends on, and `files`, name -> digest."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`, locked for the caller. It is removed at the end if it still exists.
    ConfigError if another process writes the same folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, lock = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: is being written by another process; wait for it") from None
        shutil.rmtree(folder, ignore_errors=True)  # what a killed one left
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def existing_report(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any] | None:
    """Return the report of a folder with exactly the expected content, or None if there is no folder. ConfigError for
    any other folder."""
    if not out.exists():
        return None
    try:
        report = json.loads((out / REPORT).read_bytes())
        same = (
            report["settings"] == json.loads(json.dumps(settings))
            and set(report["files"]) == set(files)
            and all(sha256_of(out / name) == digest for name, digest in report["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise ConfigError(
            f"--out {out}: is there and holds something else, expected a new folder, or one made of the same data by "
            "the same settings"
        )
    return dict(report)


def publish(folder: Path, out: Path, report: Mapping[str, Any]) -> None:
    """Add the report to the folder, flush it to disk and rename it to `out`."""
    with (folder / REPORT).open("wb") as file:
        file.write((json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode())
    for path in folder.iterdir():
        _make_durable(path)
    _make_durable(folder)
    os.rename(folder, out)
    _make_durable(out.parent)


def sha256_of(path: Path) -> str:
    """Return the digest of a file, as `sha256:<hex>`."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
