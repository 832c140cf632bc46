"""Datasets on the Hugging Face hub: only their wanted files.

Fetched code is never run. Without a network, the cache is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftstream.data.tasksets.datafolder import Wanted, find_split
from rftstream.errors import ConfigError

log = logging.getLogger(__name__)

CARD = "README.md"


def fetch_split(name: str, revision: str | None, wanted: Wanted) -> tuple[str, Path, list[str]]:
    """Return the split, the folder to which its files were fetched, and their names there."""
    hub = _import_hub(name)
    where = f"hf:{name}" + (f" at {revision}" if revision else "")
    try:
        info = hub.HfApi().dataset_info(name, revision=revision)
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        return _from_cache(hub, name, revision, wanted, where, error)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    folder = _fetch(hub, name, revision, [CARD], where) if CARD in names else None
    split, files = find_split(names, _card(folder), wanted, where)
    return split, _fetch(hub, name, revision, files, where), files


def _fetch(hub: Any, name: str, revision: str | None, files: Sequence[str], where: str) -> Path:
    patterns = [_literal(file) for file in files]
    try:
        return Path(hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # as above
        raise ConfigError(
            f"{where}: could not be fetched ({_reason(error)}); try again, or fetch it by hand and give "
            'the folder: source = "hf:FOLDER"'
        ) from None


def _from_cache(
    hub: Any, name: str, revision: str | None, wanted: Wanted, where: str, error: Exception
) -> tuple[str, Path, list[str]]:
    try:
        cached = Path(
            hub.snapshot_download(
                name, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=[CARD]
            )
        )
    except Exception:  # missing, for whatever reason; the first error says more
        raise ConfigError(
            f"{where}: no such folder here, and the hub did not give it ({_reason(error)}); correct the name, or fetch "
            'it elsewhere and give the folder: source = "hf:FOLDER"'
        ) from None
    log.warning("%s: the hub cannot be asked (%s); taking what is in the cache", where, _reason(error))
    names = [str(path.relative_to(cached).as_posix()) for path in cached.rglob("*") if path.is_file()]
    split, files = find_split(names, _card(cached), wanted, f"{where} in the cache")
    return split, cached, files


def _card(folder: Path | None) -> str:
    if folder is None or not (folder / CARD).is_file():
        return ""
    return (folder / CARD).read_text(encoding="utf-8", errors="replace")


def _literal(name: str) -> str:
    """Return a pattern that matches only this name."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in name)


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _import_hub(name: str) -> Any:
    try:
        import huggingface_hub

        return huggingface_hub
    except ImportError:
        raise ConfigError(
            f"hf:{name}: no such folder, and huggingface_hub is not installed to fetch it; pip install huggingface_hub"
        ) from None
