"""`data import` runs a recipe of Data-Juicer, unchanged, in a separate environment.

Data-Juicer is large, brings its own versions of many packages, and installs more for its operators while it runs. So it
never shares our environment. It has its own interpreter, which the caller names or uv makes. Its export appears in a
new folder as a whole, with a report and digests, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rftstream.environments.hosts import guard
from rftstream.errors import ConfigError, RftError
from rftstream.preflight.new_folder import existing_report, new_folder, publish, sha256_of
from rftstream.preflight.prepare import Prepared
from rftstream.version import __version__

VERSION = "1.6.1"
PACKAGES = (f"py-data-juicer=={VERSION}", "aiohttp", "pip")
"""Packages of a new environment. Data-Juicer 1.6.1 imports aiohttp at its start but does not require it."""
DEFAULT_ENVIRONMENT = "~/.cache/rftstream/data-juicer-" + VERSION
TAIL_LINES = 12
"""Last lines of Data-Juicer's output that an error shows."""
KEPT = (
    "HOME LANG LC_ALL TMPDIR SSL_CERT_FILE HF_HUB_OFFLINE HF_HOME PIP_INDEX_URL PIP_CONFIG_FILE UV_INDEX_URL "
    "UV_DEFAULT_INDEX UV_CONFIG_FILE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy"
)
"""Environment variables that Data-Juicer may see."""
EXPORTED = "data.jsonl"
"""File name of a recipe's export."""

Say = Callable[[str], None]


ASK_S = 120.0
"""Seconds for the interpreter to report its Data-Juicer version."""


class DataJuicerFailed(RftError):
    """Data-Juicer, or the setup of its environment, ended with an error. The text has the last lines of its output."""


class Imported(Prepared):
    """The result of a recipe. `import_data` makes it; a command prints it."""

    def to_text(self) -> str:
        """Return the report as text for people."""
        report, file = self.report, self.out / EXPORTED
        is_there = [] if self.is_new else [f"{self.out}: is there already, made of the same data by the same recipe"]
        lines = [
            *is_there,
            f"{report['in'] if report['in'] is not None else 'unknown'} rows in, {report['out']} out: {file}",
            f"{report['sha256']}, by Data-Juicer {report['data_juicer']}",
            f"columns: {', '.join(report['columns'])}",
            "in a run file:",
            f'[tasksets.NAME]\nsource = "jsonl:{file}"',
        ]
        if "prompt" not in report["columns"] and "messages" not in report["columns"]:
            lines.append(f'columns = {{ prompt = "{report["columns"][0]}" }}')
        return "\n".join(lines)


def import_data(
    recipe: Path,
    out: Path,
    *,
    dataset: Path | None = None,
    python: Path | None = None,
    say: Say,
) -> Imported:
    """Run a recipe and put its export into the new folder `out`.

    `dataset` replaces the recipe's own `dataset_path`. `python` is an interpreter that has Data-Juicer; by default an
    environment is made once, in DEFAULT_ENVIRONMENT. ConfigError for bad input and an empty result; DataJuicerFailed,
    with the end of its output, for other failures. After an error nothing is left in `out`.
    """
    if not recipe.is_file():
        raise ConfigError(f"{recipe}: no such file, expected a recipe of Data-Juicer (YAML)")
    if dataset is not None and not dataset.exists():
        raise ConfigError(f"{dataset}: no such file, expected the data for the recipe")
    interpreter = _checked(python) if python is not None else make_environment(say)
    version, named = _version_of(interpreter), _dataset_named(recipe)
    source = dataset or _dataset_of(named, recipe)
    out = Path(os.path.abspath(out))
    with new_folder(out) as folder:
        settings = {
            "recipe": sha256_of(recipe),
            "data_juicer": version,
            "dataset": str(source),
            "dataset_digest": _digest_of(source),
        }
        if (report := existing_report(out, settings, [EXPORTED])) is not None:
            return Imported(out=out, report=report, is_new=False)
        exported = _run_recipe(interpreter, recipe, source, folder, say)
        num_rows, columns = _look_at(exported, recipe)
        for path in folder.iterdir():
            if path != exported:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copyfile(recipe, folder / "recipe.yaml")
        report = {
            "rftstream": __version__,
            "settings": settings,
            "data_juicer": version,
            "in": _num_lines(source),
            "out": num_rows,
            "columns": columns,
            "sha256": sha256_of(exported),
            "files": {EXPORTED: sha256_of(exported)},
        }
        publish(folder, out, report)
    return Imported(out=out, report=report, is_new=True)


# ------------------------------------------------------------------------------------------ the environment


def make_environment(say: Say, folder: Path | None = None) -> Path:
    """Return the interpreter of Data-Juicer's environment. Make the environment if it is missing or incomplete."""
    folder = folder or Path(DEFAULT_ENVIRONMENT).expanduser()
    python, done = folder / "bin" / "python", folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if done.is_file() and python.exists():
            return python
        uv = _uv()
        say(f"making an environment for Data-Juicer {VERSION} in {folder}; this downloads some 500 MB, once")
        shutil.rmtree(folder, ignore_errors=True)
        _call([uv, "venv", "-q", "--python", f"{sys.version_info[0]}.{sys.version_info[1]}", str(folder)], "uv venv")
        _call([uv, "pip", "install", "-q", "--python", str(python), *PACKAGES], "uv pip install")
        done.write_text("\n".join(PACKAGES) + "\n")
    return python


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise ConfigError(
            "uv: not found, expected it on the PATH to make an environment for Data-Juicer; install uv, or make one "
            f"yourself with {PACKAGES[0]} and {PACKAGES[1]} and name its interpreter by --python"
        )
    return found


def _checked(python: Path) -> Path:
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(f"--python {python}: no such program, expected the interpreter of an environment")
    if os.path.abspath(python.parent) == os.path.abspath(Path(sys.executable).parent):
        raise ConfigError(
            f"--python {python}: is the environment of rftstream, which Data-Juicer would install packages into; "
            "expected one of its own"
        )
    return Path(os.path.abspath(python))  # do not resolve the path: the link is what makes it a venv


_VERSION = "from importlib.metadata import version; print(version('py-data-juicer'))"


def _version_of(python: Path) -> str:
    """Return the version of the Data-Juicer that an interpreter has. ConfigError if it has none."""
    command, environment = [str(python), "-I", "-c", _VERSION], _environment(python, {})
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise DataJuicerFailed(f"{python}: no answer within {ASK_S:g} s; is the machine busy?") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"{python}: has no Data-Juicer ({last}); expected {PACKAGES[0]} there")
    return ended.stdout.strip()


def _dataset_named(recipe: Path) -> str | None:
    """Return the data that a recipe names, or None. ConfigError if the file is no recipe."""
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe}: cannot be read as YAML: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("process"), list):
        raise ConfigError(f"{recipe}: has no list `process`, expected a recipe of Data-Juicer")
    path = found.get("dataset_path")
    return path if isinstance(path, str) else None


def _dataset_of(named: str | None, recipe: Path) -> Path:
    if named is None:
        raise ConfigError(f"{recipe}: has no dataset_path, expected one, or --from FILE")
    for path in (recipe.parent / Path(named).expanduser(), Path(named).expanduser()):
        if path.exists():
            return path.resolve()
    raise ConfigError(f"{recipe}: dataset_path {named!r}: no such file; name it by --from FILE")


# ------------------------------------------------------------------------------------------ the run


def _run_recipe(python: Path, recipe: Path, source: Path, folder: Path, say: Say) -> Path:
    """Run the recipe and return the file that it exported."""
    exported, work = folder / EXPORTED, folder / "work"
    work.mkdir()
    command = [str(python), "-m", "data_juicer.tools.process_data"]
    command += ["--config", str(recipe.resolve()), "--dataset_path", str(source.resolve())]
    command += ["--export_path", str(exported), "--work_dir", str(work / "job")]
    say(f"running {recipe} over {source}")
    caches = {name: str(work / name.lower()) for name in ("DATA_JUICER_CACHE_HOME", "HF_DATASETS_CACHE")}
    _call(command, "Data-Juicer", env=_environment(python, caches), cwd=work)
    if not exported.is_file():
        raise ConfigError(f"{recipe}: nothing was exported, so nothing is left of {source}; let the recipe keep more")
    return exported


def _environment(python: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for Data-Juicer: few, so that none of our settings or keys reaches it."""
    values = {name: os.environ[name] for name in KEPT.split() if name in os.environ}
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    return {**values, "PATH": path, "VIRTUAL_ENV": str(python.parent.parent), **more}


def _call(command: Sequence[str], what: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a program to its end. The program and its children end when this process does. DataJuicerFailed if it
    fails."""
    guarded = [sys.executable, "-I", "-S", guard.__file__, "--command", str(os.getpid()), *command]
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(
            guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=cwd, check=False
        ).returncode
        if code:
            output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 14)))
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise DataJuicerFailed(f"{what} ended with {code}:\n" + "\n".join(lines[-TAIL_LINES:]))


def _look_at(exported: Path, recipe: Path) -> tuple[int, list[str]]:
    """Return the number of rows, and the columns of the first row. ConfigError if there are no rows."""
    num_rows, columns = 0, None
    with exported.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{recipe}: line {number} of what was exported is no JSON object: {error}") from None
            columns = columns or list(row)
            num_rows += 1
    if not columns:
        raise ConfigError(f"{recipe}: nothing is left; let the recipe keep more")
    return num_rows, columns


def _digest_of(source: Path) -> str:
    """Return the digest of a file, or of all files in a folder with their names."""
    if source.is_file():
        return sha256_of(source)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    text = "\n".join(f"{path.relative_to(source)} {sha256_of(path)}" for path in files)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _num_lines(source: Path) -> int | None:
    """Return the number of rows of a JSON lines file, and None for other files."""
    if source.suffix not in (".jsonl", ".json") or not source.is_file():
        return None
    with source.open("rb") as file:
        return sum(1 for line in file if line.strip())
