"""Files that a script of TRL names, as in `load_dataset("json", data_files=...)`, and slices of splits; and what
launches it: a shell script, and accelerate's config, which says how many processes train."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rftstream.integrations.foreign_configs.conversion import many
from rftstream.integrations.foreign_configs.reading import read_yaml
from rftstream.integrations.foreign_configs.shell import Launch, read_launch

FORMATS = ("json", "csv", "parquet", "arrow", "text", "xml", "webdataset", "imagefolder", "audiofolder", "videofolder")
"""Formats of files, which `load_dataset` takes in the place of a dataset's name."""
FOLDERS = {"json": "hf", "csv": "hf", "parquet": "parquet"}
"""Format -> the source that reads a folder of such files."""
MORE_PROCESSES = (
    "says how many processes train, and is not read here: the batch is that of one; multiply feeder.groups_per_batch "
    "(of demonstrations: experts.per_batch) by them, or name num_processes in the YAML or the launch script"
)
SPLIT = re.compile(r"([\w.-]+)(?:\[(\d*):(\d*)\])?")


def rows_of(split: str) -> tuple[str, int | None, int | None] | None:
    """Return the name, the first row and the end of the rows in `train[10:100]`. None for shares, sums and rows counted
    from the end."""
    if (match := SPLIT.fullmatch(split)) is None:
        return None
    first, end = (int(one) if one else None for one in match.groups()[1:])
    return match[1], first, end


def source_of(kind: str, files: Any, folder: str | None, split: str, beside: Path, *, experts: bool) -> Any:
    """Return the source that reads these files, or several, which only demonstrations have. None if there is none.

    `files` and `folder` are the data_files and data_dir of `load_dataset`, `beside` is the folder of the script."""
    if isinstance(files, dict):
        files = files.get(split, next(iter(files.values())) if len(files) == 1 else None)
    named = [str(one) for one in many(files)] if files else []
    names = [one if "://" in one else str(PurePosixPath(folder or "", one)) for one in named]
    if not files and folder and kind in FOLDERS:
        return f"{FOLDERS[kind]}:{folder}"
    found = [_reader(kind, name, beside, experts=experts) for name in names]
    if not found or None in found or (len(found) > 1 and not experts):
        return None
    return found[0] if len(found) == 1 else found


def rows_file(script: Path, prefix: str) -> str:
    """Return the file for the rows that a script makes: scripts of one folder have one each."""
    return re.sub(r"\W", "_", script.stem) + f"_{prefix}rows.jsonl"


def described(kind: str, files: Any, folder: str | None) -> str:
    """Return the files as the script names them."""
    names: Sequence[Any] = list(files.values()) if isinstance(files, dict) else many(files or folder or "no file")
    return f"{kind} files: {', '.join(str(name) for one in names for name in many(one))}"


def _reader(kind: str, name: str, beside: Path, *, experts: bool) -> str | None:
    if "://" in name or name.endswith((".gz", ".zip", ".zst", ".xz", ".bz2")):
        return None
    if kind == "parquet":
        return f"parquet:{name}"
    if kind not in ("json", "csv") or "*" in name:
        return None
    if experts and name.endswith((".json", ".csv", ".tsv")):
        return f"file:{name}"
    is_list = _first_line(beside / name).startswith("[")
    return f"jsonl:{name}" if kind == "json" and not is_list else None


def form_of_prompts(path: Path, column: str) -> type | None:
    """Return what the prompt, of this column, in the first row of a file of JSON lines is: a list of messages, or a
    str. None if it cannot be read."""
    try:
        row = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return None
    return type(row[column]) if isinstance(row, dict) and column in row else None


def count_rows(path: Path) -> int | None:
    """Return how many rows a file of JSON lines has. None if it cannot be read."""
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError:
        return None


def count_repeated(path: Path) -> int:
    """Return how many rows of a file of JSON lines are the same as an earlier one. 0 if it cannot be read."""
    try:
        with path.open("rb") as lines:
            found = [hashlib.sha256(stripped).digest() for line in lines if (stripped := line.strip())]
    except OSError:
        return 0
    return len(found) - len(set(found))


def _first_line(path: Path) -> str:
    """Return the first line that is not empty. Empty if the file cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return next((line.strip() for line in lines if line.strip()), "")
    except (OSError, UnicodeDecodeError):
        return ""


def take_processes(settings: dict[str, Any], folder: Path) -> tuple[int | None, str]:
    """Take how many processes accelerate starts, by TRL's YAML or accelerate's config, out of the settings. Return it,
    and the config that was not read."""
    count, unread = settings.pop("num_processes", None), ""
    for name in ("accelerate_config", "num_machines"):  # trl's own command takes them from its YAML, too
        if name in settings:
            settings[f"launcher.{name}"] = settings.pop(name)
    for name in ("launcher.accelerate_config", "launcher.config_file"):
        if (named := settings.get(name)) is not None:
            file = next((one for one in (folder / str(named), Path(str(named))) if one.is_file()), None)
            config = {} if file is None else read_yaml(file)
            count = config.get("num_processes") if count is None else count
            unread = "" if count is not None else f"{name[9:]} {named}"
            if "num_machines" in config:
                settings.setdefault("launcher.num_machines", config["num_machines"])
            if config.get("use_cpu"):
                settings.setdefault("use_cpu", True)
    return (count if isinstance(count, int) else None), unread


def own_parts_of_deepspeed(config: Any, folder: Path) -> list[str]:
    """Return the parts in a config of DeepSpeed, or in its file, that train in the place of those of the trainer."""
    file = folder / config if isinstance(config, str) else None
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else config
    except (OSError, ValueError):
        return []
    return [one for one in ("optimizer", "scheduler") if isinstance(found, dict) and one in found]


def launched_files(files: list[Path], trainers: tuple[str, ...]) -> tuple[list[Path], Launch | None]:
    """Return the files with those that a shell script among them launches in its place, and the launch."""
    found = next((path for path in files if path.suffix in (".sh", ".bash", ".slurm", ".sbatch")), None)
    if found is None:
        return files, None
    launched = read_launch(found, trainers)
    named = {path.name for path in files}
    more = [path for path in launched.files if path.name not in named]
    return [*(path for path in files if path != found), *more], launched
