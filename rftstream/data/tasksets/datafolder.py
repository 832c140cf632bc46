"""The files in a dataset's folder that make up one split of one subset.

The card (README.md) names them under `configs`; otherwise the names of files and folders decide. Hugging Face's
`datasets` interprets patterns and names. It gets only names, so only the wanted files of a dataset on the hub are
fetched, and part of a folder is enough. Scripts are never opened.

`datasets` does not read the rows, because it would turn texts in CSV into numbers (007 into 7.0) and texts in JSON into
times, and copy all data into its cache. It also has no digest of contents, which a resumed run needs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec  # type: ignore[import-untyped]

from rftstream.config.parts import registry
from rftstream.errors import ConfigError, importing

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of readable files. If two suffixes are equally frequent, the first one in this list wins."""
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".lz4", ".7z")
NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")
_SCHEME = "rftstream-names"
_ROOT = "folder"
_FOLDER = f"{_SCHEME}://{_ROOT}"
"""The address under which `datasets` finds the names."""

Splits = dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The requested subset and split of a dataset."""

    subset: str | None
    split: str | None
    folders_are_subsets: bool = False
    """Whether folders name subsets, as in the hub's own conversions to Parquet: `SUBSET/SPLIT/0000.parquet`."""


def find_split(names: Sequence[str], card: str, wanted: Wanted, where: str) -> tuple[str, list[str]]:
    """Return the split's name and its files, in order. `names`: the relative paths of all files, with slashes; `card`:
    the text of README.md.

    ConfigError lists the existing splits.
    """
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
    """Return the requested split. If none is requested, return `train`, or the only split."""
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
        return _by_card(subsets[subset], data, where)
    if wanted.subset is None and not wanted.folders_are_subsets:
        return splits_by_names(data, where)
    folders: dict[str, dict[str, Any]] = {name.partition("/")[0]: {} for name in data if "/" in name}
    subset = _choose_subset(folders, wanted.subset, where)
    return splits_by_names([name for name in data if name.startswith(f"{subset}/")], where)


def splits_by_names(data: Sequence[str], where: str) -> Splits:
    """Return the splits that the names of folders or files indicate. If they indicate none, return all files as
    `train`."""
    rules = _Rules(data, where)
    return {split: sorted(rules.matches(patterns)) for split, patterns in rules.default_patterns().items()}


def read_card(card: str, where: str) -> dict[str, dict[str, Any]]:
    """Return `configs` in the YAML header of a README.md, by name. Empty if there are none."""
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
    return {str(subset.get("config_name", "default")): subset for subset in configs if isinstance(subset, dict)}


def _choose_subset(subsets: dict[str, dict[str, Any]], subset: str | None, where: str) -> str:
    found = list(subsets)
    if subset is not None:
        if subset not in subsets:
            raise ConfigError(f"{where}: no subset {subset!r}; {registry.suggest(subset, found)}")
        return subset
    marked = [name for name, config in subsets.items() if config.get("default") is True or name == "default"]
    if len(found) == 1 or marked:
        return (marked or found)[0]
    shown = ", ".join(found) if found else "none"
    raise ConfigError(
        f"{where}: has the subsets {shown}; choose one: options = {{ subset = {found[0]!r} }}"
        if found
        else f"{where}: has no subsets; leave options.subset out"
    )


def _by_card(config: dict[str, Any], data: Sequence[str], where: str) -> Splits:
    folder = str(config.get("data_dir") or "").strip("./")
    prefix = f"{folder}/" if folder else ""
    inside = [name.removeprefix(prefix) for name in data if name.startswith(prefix)]
    wanted = config.get("data_files")
    if wanted is None:
        splits = splits_by_names(inside, where) if inside else {"train": []}
    else:
        rules = _Rules(inside, where)
        splits = {split: rules.matches(patterns) for split, patterns in rules.patterns_of(wanted).items()}
    return {split: [prefix + name for name in files] for split, files in splits.items()}


class _Rules:
    """The rules of `datasets`, applied to a list of names, which look like files of a folder to the rules."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        self._datasets = _import_datasets(where)
        self._where = where
        options = {_SCHEME: {"paths": [f"{_ROOT}/{name}" for name in names]}}
        self._options = self._datasets.DownloadConfig(storage_options=options)

    def default_patterns(self) -> dict[str, list[str]]:
        """Return the patterns of each split that the names indicate."""
        try:
            patterns = self._datasets.data_files.get_data_patterns(_FOLDER, self._options)
        except ValueError as error:  # of a split that no program could name
            raise ConfigError(f"{self._where}: {error}; rename the files") from None
        return {str(split): found for split, found in patterns.items()}

    def patterns_of(self, wanted: Any) -> dict[str, list[str]]:
        """Return the patterns of each split from `data_files` of a card, in any of its forms."""
        try:
            patterns = self._datasets.data_files.sanitize_patterns(wanted)
        except (ValueError, TypeError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"{self._where}: README.md: data_files: {text}; mend it") from None
        return {split: [str(pattern).removeprefix("./") for pattern in found] for split, found in patterns.items()}

    def matches(self, patterns: Sequence[str]) -> list[str]:
        """Return the matching names, in the order of the patterns, each once.

        A pattern that leads out of the folder matches nothing, since a card could name files of this machine, or of
        another.
        """
        found: dict[str, None] = {}
        for pattern in patterns:
            if "::" in pattern or "://" in pattern or os.path.isabs(pattern):
                continue
            try:
                paths = self._datasets.data_files.resolve_pattern(pattern, _FOLDER, download_config=self._options)
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise ConfigError(f"{self._where}: README.md: {pattern!r}: {error}; mend it") from None
            found.update(dict.fromkeys(path.removeprefix(f"{_FOLDER}/") for path in paths))
        return list(found)


class _Names(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system of names without contents, with just enough methods to search for files."""

    protocol = _SCHEME
    cachable = False  # each list of names is another one

    def __init__(self, paths: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self._infos = {path: {"name": path, "type": "file", "size": 0} for path in paths}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the information about a file. FileNotFoundError if it does not exist."""
        path = self._strip_protocol(path)
        if path not in self._infos:
            raise FileNotFoundError(path)
        return self._infos[path]

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:
        """Return all files. The caller matches them with a pattern, which begins with `path`."""
        return self._infos


fsspec.register_implementation(_SCHEME, _Names, clobber=True)


def _import_datasets(where: str) -> Any:
    with importing(where, "datasets", install="rftstream[data]"):
        import datasets.data_files
    return datasets


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return path.suffix in SUFFIXES and path.name not in NOT_DATA and not hidden


def _one_format(files: list[str]) -> list[str]:
    """Return the files with the most frequent suffix. The others are usually the same rows again."""
    counts = Counter(PurePosixPath(name).suffix for name in files)
    suffix = max(SUFFIXES, key=lambda known: (counts[known], -SUFFIXES.index(known)))
    return [name for name in files if name.endswith(suffix)]


def _check_complete(files: Sequence[str], where: str) -> None:
    """Raise ConfigError if a shard is missing: `-00000-of-00005` gives the number of shards."""
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
    expected = f"expected files of {', '.join(known[1:] for known in SUFFIXES)}"
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
