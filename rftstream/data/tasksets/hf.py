"""Hugging Face datasets: a folder that `save_to_disk` wrote, a folder of data files, or a name on the hub.

Parquet, Arrow, JSON lines, JSON and CSV files are read; a dataset's scripts are never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftstream.data.tasksets.arrow import ArrowRows
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.datafolder import Wanted, choose_split, find_split
from rftstream.data.tasksets.files import RowTaskset
from rftstream.data.tasksets.rows import Chain, Csv, JsonLines, RowReader, RowSource, json_rows
from rftstream.errors import ConfigError

CONVERTED = "refs/convert/parquet"
"""Revision with the hub's own conversions, which has a folder for each subset."""


class HfTaskset(RowTaskset):
    """The rows of one split of a dataset, from a folder or from the hub."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TableConfig):
        """The settings in `[tasksets.NAME.options]`."""

        subset: str | None = None
        """Name of the subset, if a dataset has several; `datasets` calls it the configuration name."""
        split: str | None = None
        """Name of the split; default: train, or the only one."""
        revision: str | None = None
        """Branch, tag or commit on the hub; default: the newest. A commit fixes a run's data."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        folder = Path(location).expanduser()
        mapping = Columns(columns, system=system, config=config, data_source=_name(location), folder=folder)
        super().__init__(self.open_rows(config, location, mapping), mapping, config, f"hf:{location}")

    @staticmethod
    def open_rows(config: Config, location: str, columns: RowReader) -> RowSource:
        """Open the rows of the split for `columns`."""
        source = f"hf:{location}"
        return open_data(find_data(config, location, source), columns, source)


def find_data(config: HfTaskset.Config, location: str, source: str) -> list[Path]:
    """Return the files of the split."""
    folder = Path(location).expanduser()
    if folder.is_dir():
        if config.revision is not None:
            raise ConfigError(f"{source}: is a folder, which has no revisions; remove options.revision")
        return _saved(folder, config, source) or _in_folder(folder, config, source)
    if folder.exists():
        raise ConfigError(
            f"{source}: is a file, expected a folder or a name on the hub; write parquet:, csv: or jsonl:"
        )
    if not is_on_hub(location):
        raise ConfigError(f"{source}: no such folder; give a folder, or a name on the hub like openai/gsm8k")
    from rftstream.data.tasksets.hub import fetch_split

    wanted = Wanted(subset=config.subset, split=config.split, folders_are_subsets=config.revision == CONVERTED)
    _, fetched, files = fetch_split(location, config.revision, wanted)
    return [fetched / name for name in files]


def is_on_hub(location: str) -> bool:
    """Return whether the location can be a name on the hub, and is nothing on this machine."""
    is_name = bool(location) and not location.startswith((".", "/", "~")) and location.count("/") <= 1
    return is_name and not Path(location).expanduser().exists()


def _in_folder(folder: Path, config: HfTaskset.Config, source: str) -> list[Path]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    _, files = find_split(names, text, Wanted(subset=config.subset, split=config.split), source)
    return [folder / name for name in files]


def _saved(folder: Path, config: HfTaskset.Config, source: str) -> list[Path]:
    """Return the files that `save_to_disk` wrote, from its state file. Empty if the folder is of another kind."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if not splits.is_file() and not state.is_file():
        return []
    if config.subset is not None:
        raise ConfigError(f"{source}: was made by save_to_disk, which knows no subsets; remove options.subset")
    if splits.is_file():
        found = _listed(splits, "splits")
        folder = folder / choose_split(found, config.split, source)
        state = folder / "state.json"
    else:
        named = json_object(state).get("_split")
        choose_split([named if isinstance(named, str) else "train"], config.split, source)
    files = json_object(state).get("_data_files")
    names = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    paths = [folder / name for name in names if isinstance(name, str) and Path(name).name == name]
    if not paths:
        raise ConfigError(f"{state}: names no data files, expected what save_to_disk writes; save it again")
    return paths


def _listed(path: Path, key: str) -> Sequence[str]:
    found = json_object(path).get(key)
    names = [one for one in found if isinstance(one, str) and Path(one).name == one] if isinstance(found, list) else []
    if not names:
        raise ConfigError(f"{path}: {key} is {found!r}, expected a list of names; save the dataset again")
    return names


def json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. ConfigError if the file holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; expected what save_to_disk writes; save the dataset again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected an object; save the dataset again")
    return values


def open_data(paths: Sequence[Path], columns: RowReader, source: str) -> RowSource:
    """Open the files as one source of rows. They must have one format, which `find_split` ensures."""
    suffix = paths[0].suffix
    if suffix in (".parquet", ".arrow"):
        return ArrowRows(paths, columns, source)
    reader = {".json": json_rows, ".csv": Csv, ".tsv": Csv}.get(suffix, JsonLines)
    parts: list[RowSource] = [reader(path, columns) for path in paths]
    return parts[0] if len(parts) == 1 else Chain(parts)


def _name(location: str) -> str:
    """Return a name such as `openai/gsm8k` unchanged, and the last part of a folder's path."""
    folder = Path(location).expanduser()
    return folder.resolve().name if folder.is_dir() else location
