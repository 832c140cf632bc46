"""Which files of a dataset's folder are which split of which subset, by the rules of Hugging Face's `datasets`:

what the card (README.md) says under `configs`; else names like `data/train-00000-of-00002.parquet`; else folders, else
files, whose names hold train, validation or test as a word; else all files are `train`. Works on names alone, so that
of a dataset on the hub only the files that are wanted have to be fetched. Scripts are never looked into.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rftstream.config import registry
from rftstream.errors import ConfigError

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of files that are read; of equally many files with different suffixes, the first suffix counts."""
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".lz4", ".7z")
NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> how folders and files say it."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")
_SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*\.\w+")

Splits = dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which subset and split of a dataset are asked for."""

    subset: str | None
    split: str | None
    folders_are_subsets: bool = False
    """Whether folders name subsets, as in the hub's own conversions to Parquet: `SUBSET/SPLIT/0000.parquet`."""


def find_split(names: Sequence[str], card: str, wanted: Wanted, where: str) -> tuple[str, list[str]]:
    """Return the split's name and its files, in order. `names`: all files, relative, with slashes; `card`: of
    README.md.

    ConfigError lists what there is."""
    data = sorted(name for name in names if _is_data(name))
    if not data:
        raise ConfigError(_nothing(names, where))
    splits = find_splits(data, card, wanted, where)
    split = choose_split(list(splits), wanted.split, where)
    if not splits[split]:
        raise ConfigError(f"{where}: README.md names files for {split} that are not there; found {_listed(data)}")
    files = _one_format(splits[split])
    _check_complete(files, where)
    return split, files


def choose_split(found: Sequence[str], split: str | None, where: str) -> str:
    """Return the split that is asked for; else `train`, or the only split."""
    if split is None:
        if "train" in found or len(found) == 1:
            return "train" if "train" in found else found[0]
        raise ConfigError(
            f"{where}: has the splits {', '.join(found)}; choose one: options = {{ split = {found[0]!r} }}"
        )
    if split in found:
        return split
    if "[" in split or "+" in split:
        raise ConfigError(
            f"{where}: split {split!r}: a split as it is was expected, one of {', '.join(found)}; for a part of it set "
            "options.skip and options.size"
        )
    raise ConfigError(f"{where}: no split {split!r}; {registry.suggest(split, list(found))}")


def find_splits(data: Sequence[str], card: str, wanted: Wanted, where: str) -> Splits:
    """Return all splits of the subset."""
    subsets = read_card(card, where)
    if subsets:
        subset = _choose_subset(subsets, wanted.subset, where)
        return _by_card(subsets[subset], data)
    if wanted.subset is None and not wanted.folders_are_subsets:
        return splits_by_names(data)
    folders: dict[str, dict[str, Any]] = {name.partition("/")[0]: {} for name in data if "/" in name}
    subset = _choose_subset(folders, wanted.subset, where)
    return splits_by_names([name for name in data if name.startswith(f"{subset}/")])


def splits_by_names(data: Sequence[str]) -> Splits:
    """Return the splits that the names of folders or files tell of; else all files as `train`."""
    found: Splits = {}
    for name in data:
        if match := _SHARDED.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    for parts_of in (_folders, _stem):
        if not found:
            for split, words in WORDS.items():
                said = re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:$|[-._ 0-9])")
                files = [name for name in data if any(said.search(part) for part in parts_of(name))]
                if files:
                    found[split] = files
    return found or {"train": list(data)}


def read_card(card: str, where: str) -> dict[str, dict[str, Any]]:
    """Return `configs` of the YAML at the top of a README.md, by name; empty where there are none."""
    head = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", card, re.DOTALL)
    if head is None or "configs" not in head[1]:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(head[1])
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{where}: README.md: the part between --- is not YAML: {text}; mend it") from None
    configs = values.get("configs") if isinstance(values, dict) else None
    if not isinstance(configs, list):
        return {}
    return {str(one.get("config_name", "default")): one for one in configs if isinstance(one, dict)}


def _choose_subset(subsets: dict[str, dict[str, Any]], subset: str | None, where: str) -> str:
    found = list(subsets)
    if subset is not None:
        if subset not in subsets:
            raise ConfigError(f"{where}: no subset {subset!r}; {registry.suggest(subset, found)}")
        return subset
    marked = [name for name, one in subsets.items() if one.get("default") is True or name == "default"]
    if len(found) == 1 or marked:
        return (marked or found)[0]
    shown = ", ".join(found) if found else "none"
    raise ConfigError(
        f"{where}: has the subsets {shown}; choose one: options = {{ subset = {found[0]!r} }}"
        if found
        else f"{where}: has no subsets; leave options.subset out"
    )


def _by_card(config: dict[str, Any], data: Sequence[str]) -> Splits:
    folder = str(config.get("data_dir") or "").strip("./")
    prefix = f"{folder}/" if folder else ""
    inside = [name.removeprefix(prefix) for name in data if name.startswith(prefix)]
    wanted = config.get("data_files")
    if wanted is None:
        splits = splits_by_names(inside)
    else:
        splits = {}
        for split, patterns in _data_files(wanted):
            matches = [re.compile(_pattern(pattern)) for pattern in patterns]
            files = [name for match in matches for name in inside if match.fullmatch(name)]
            splits.setdefault(split, []).extend(dict.fromkeys(files))
    return {split: [prefix + name for name in files] for split, files in splits.items()}


def _data_files(wanted: Any) -> list[tuple[str, list[str]]]:
    """Return the patterns of each split, in all forms that a card may have: a pattern, several, or those of each
    split."""
    if isinstance(wanted, dict):
        return [(str(split), _listed_patterns(patterns)) for split, patterns in wanted.items()]
    if isinstance(wanted, list) and any(isinstance(one, dict) for one in wanted):
        return [
            (str(one.get("split", "train")), _listed_patterns(one.get("path")))
            for one in wanted
            if isinstance(one, dict)
        ]
    return [("train", _listed_patterns(wanted))]


def _listed_patterns(patterns: Any) -> list[str]:
    patterns = patterns if isinstance(patterns, list) else [patterns]
    return [str(one).removeprefix("./") for one in patterns if one is not None]


def _pattern(glob: str) -> str:
    """Return a glob with `**` as a regular expression; `*` stays within a folder."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", glob)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part) or (part if part.startswith("[") and len(part) > 2 else re.escape(part)) for part in parts
    )


def _folders(name: str) -> Sequence[str]:
    return PurePosixPath(name).parts[:-1]


def _stem(name: str) -> Sequence[str]:
    return [PurePosixPath(name).name]


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return path.suffix in SUFFIXES and path.name not in NOT_DATA and not hidden


def _one_format(files: list[str]) -> list[str]:
    """Return the files with the most usual suffix; the others are most often the same rows once more."""
    counts = Counter(PurePosixPath(name).suffix for name in files)
    suffix = max(SUFFIXES, key=lambda one: (counts[one], -SUFFIXES.index(one)))
    return [name for name in files if name.endswith(suffix)]


def _check_complete(files: Sequence[str], where: str) -> None:
    """Raise ConfigError if a shard is missing: `-00000-of-00005` says how many there are."""
    shards: dict[str, set[int]] = {}
    totals: dict[str, int] = {}
    for name in files:
        if match := _SHARD.search(name):
            family = f"{name[: match.start()]}-*-of-{match[2]}"
            shards.setdefault(family, set()).add(int(match[1]))
            totals[family] = int(match[2])
    for family, found in shards.items():
        missing = sorted(set(range(totals[family])) - found)
        if missing:
            raise ConfigError(
                f"{where}: {family}: {len(found)} of {totals[family]} files, number {missing[0]:05d} is missing; "
                "fetch the rest"
            )


def _nothing(names: Sequence[str], where: str) -> str:
    expected = f"expected files of {', '.join(one[1:] for one in SUFFIXES)}"
    if packed := [name for name in names if name.endswith(PACKED)]:
        return f"{where}: found only packed files ({_listed(packed)}), {expected}; unpack them into a folder"
    if scripts := [name for name in names if name.endswith(".py")]:
        return (
            f"{where}: found a script ({_listed(scripts)}) and no data, {expected}; scripts are never run: for one on "
            'the hub try options = { revision = "refs/convert/parquet" }'
        )
    return f"{where}: no data there ({_listed(names) or 'it is empty'}), {expected}"


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
