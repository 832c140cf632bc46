"""Run folders: the files of a run, how a run is found, and which process supervises it.

runs/<name>/            the run folder; its name is the run's id (a second run of the name gets <name>-2, ...)
  config.toml           the resolved config; every process of the run reads this one
  modules.json          digests of the user's own modules, as of the last start
  log/                  the embedded log
  model/                the model, where it was made on the spot
  weights/              the default object store: versions, checkpoints, generations
  anchors/              the newest anchor and the deltas since, where the object store is elsewhere
  exports/              what `weights export` wrote, unless it was told where
  demonstrations/       rollouts of other runs, from `experts.source = "run:..."`
  logs/<process>.log    one file a process
  final/                the trained model, once the run is finished
  index/, plots/        the index of `audit`, `trace` and `studio`, locks of readers, the output of `plot`
  notes.jsonl           notes and tags of people, from the studio
  targets.json          the ports of its workers, for Prometheus, while it is live
  run.lock              held by the `run` or `resume` that supervises
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.config import loader, log_users, secrets, toml_files
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TransportSpec
from rftstream.config.sections import RunConfig, TransportSection
from rftstream.contracts.topics import TOPICS, num_partitions
from rftstream.errors import ConfigError
from rftstream.roles import role_specs
from rftstream.transport.base import TopicSettings, Transport
from rftstream.version import __version__

if TYPE_CHECKING:
    from rftstream.weights.stores.store import ObjectStore


def consumer_groups(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return consumer groups, named like their roles -> the topics whose positions they commit."""
    topics = {spec.name: (*spec.positions, *spec.chosen(config)) for spec in role_specs()}
    return {name: some for name, some in topics.items() if some}


WRITTEN_BY = "# Written by rftstream "
"""First line of a run's config.toml, before the release."""

LOOKING_S = 0.3
"""Longest time in seconds that a process which only checks a run's lock may hold it."""


class _FolderPart:
    """A path in a run folder, with the name of the attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run and the paths in it. Callers make one from a path, which creates no files."""

    path: Path

    @property
    def run_id(self) -> str:
        """Return the run's id, which is the folder's name."""
        return self.path.name

    log = _FolderPart("log")
    weights = _FolderPart("weights")
    anchors = _FolderPart("anchors")
    exports = _FolderPart("exports")
    model = _FolderPart("model")
    plots = _FolderPart("plots")
    index = _FolderPart("index")
    final = _FolderPart("final")
    logs = _FolderPart("logs")
    targets_file = _FolderPart("targets.json")
    notes_file = _FolderPart("notes.jsonl")
    demonstrations = _FolderPart("demonstrations")
    modules_file = _FolderPart("modules.json")
    placement_file = _FolderPart("placement.json")
    config_file = _FolderPart("config.toml")
    lock_file = _FolderPart("run.lock")

    def exists(self) -> bool:
        """Return whether the folder is a run: whether it has a config.toml."""
        return self.config_file.is_file()

    def config_stamp(self) -> tuple[int, int] | None:
        """Return what differs once config.toml is written anew; None without one."""
        try:
            found = self.config_file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def is_live(self) -> bool:
        """Return whether a `run` or `resume` holds the lock."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. ConfigError if another process holds it, with its name, or if the folder cannot be made. An
        OSError inside the block that names no file gets this folder's name."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: {error.strerror or error}, expected a run folder that can be written; "
                "name another by --run-dir or run.folder"
            ) from None
        try:
            try:
                _lock(descriptor)
            except BlockingIOError:
                pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"{self.path}: this run is live, held by process {pid}; wait for it, stop it, or take another "
                    "--run-dir (more workers join with `rftstream worker`)"
                ) from None
            with naming(self.lock_file):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            with naming(self.path):
                yield
        finally:
            os.close(descriptor)


PARTS = tuple(part.name for part in vars(RunFolder).values() if isinstance(part, _FolderPart))
"""Names that a run makes in its folder, in the order of deletion. The files that mark the folder as a run come last."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to an OSError that names no file, such as that of a write to an open file on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _lock(descriptor: int) -> None:
    """Take the lock of a run. BlockingIOError if it stays taken for longer than those need who look if it is live."""
    deadline = time.monotonic() + LOOKING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """An existing run: its folder, config and log. `open_run` makes it; its user closes the transport."""

    folder: RunFolder
    config: RunConfig
    transport: Transport

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self.folder.run_id

    def store(self) -> ObjectStore:
        """Open the run's object store."""
        return open_store(self.config, self.folder)


def candidates(config: RunConfig, *, user: str | None = None) -> list[RunFolder]:
    """Return the runs of this run file, oldest first: with a folder here, or on a shared log. `user`: for the log."""
    return _numbered(config, {folder.run_id for folder in candidates_here(config)} | names_on_log(config, user=user))


def candidates_here(config: RunConfig) -> list[RunFolder]:
    """Return the runs with a folder here, oldest first. No server is asked."""
    base = Path(config.base) / config.run.folder
    return _numbered(config, {path.name for path in _listed(base) if RunFolder(path).exists()})


def runs_of(file: Path) -> Path | None:
    """Return the folder in which a run file puts its runs; None if the file is no run file."""
    section = toml_files.glance(file).get("run")
    if not isinstance(section, dict) or not isinstance(folder := section.get("folder", "runs"), str):
        return None
    return file.parent / folder if "name" in section else None


def _numbered(config: RunConfig, names: Iterable[str]) -> list[RunFolder]:
    """Return the folders with names of this run file's runs, in order: <name>, <name>-2, ..."""
    pattern = re.compile(re.escape(config.run.name) + r"(?:-(\d+))?$")
    found = [(int(match[1] or 1), name) for name in names if (match := pattern.fullmatch(name))]
    return [RunFolder(Path(config.base) / config.run.folder / name) for _, name in sorted(found)]


def names_on_log(config: RunConfig, *, user: str | None = None) -> set[str]:
    """Return the names of runs on a shared log; none for a log on this host alone."""
    find_names = getattr(registry.resolve("transport", config.transport.kind, where="transport.kind"), "runs", None)
    return set(find_names(_revealed(config, user))) if find_names is not None else set()


def check_transport(config: RunConfig) -> None:
    """Check the transport's settings as far as it can by itself. ConfigError if it refuses them."""
    check = getattr(registry.resolve("transport", config.transport.kind, where="transport.kind"), "check", None)
    if check is not None:
        check(_revealed(config))


def next_folder(config: RunConfig, newest: RunFolder | None) -> RunFolder:
    """Return the folder for a new run of this run file: the run file's name, or the name with the next number."""
    name = config.run.name
    if newest is not None:
        name += f"-{int(newest.run_id.removeprefix(name)[1:] or 1) + 1}"
    return RunFolder(Path(config.base) / config.run.folder / name)


def named_files(run: str | Path, layers: Sequence[Path] = ()) -> list[Path]:
    """Return the files that RUN names, with commas between them, and the `layers` behind them."""
    return [*([Path(run)] if Path(run).exists() else map(Path, str(run).split(","))), *layers]


def find_run(run: str | Path, layers: Sequence[Path] = ()) -> tuple[RunFolder, RunConfig]:
    """Return the run of a run folder, or the newest of run files, whose settings stand for those of another host's."""
    if not isinstance(run, str | Path):
        raise ConfigError(f"run: got a {type(run).__name__}, expected the path of a run folder or of a run file")
    path, *layers = named_files(run, layers)
    if path.is_dir():
        if layers:
            raise ConfigError(f"{layers[0]}: got it beside the run folder {path}, expected the folder alone")
        folder = RunFolder(path.resolve())
        if not folder.exists() and folder.lock_file.is_file():
            raise ConfigError(
                f"{path}: a run was being made in it and has no config.toml yet; wait, or do again the command that "
                "was making it, which goes on, or remove the folder"
            )
        if not folder.exists():
            seen = "only logs of workers for another host's run, which may be removed; " if folder.logs.is_dir() else ""
            what = f"no config.toml in it, so it is not a run folder; {seen}name one, or a run file"
            raise ConfigError(f"{path}: {what}{_nearest(path / '?')}")
        return folder, read_config(folder)
    if not path.exists():
        raise ConfigError(f"{path}: no such file, expected a run folder or a run file{_nearest(path)}")
    config = loader.load([path, *layers])
    if not (folders := candidates(config)):
        there = "" if lies_in_folder(config) else f" nor {config.run.name!r} at {config.transport.servers}"
        root = Path(config.base) / config.run.folder
        what = f"no run of it yet under {root}{there}; start one with `rftstream run`, or name its folder"
        raise ConfigError(f"{path}: {what}{_nearest(root / '?') if _listed(root) else ''}")
    return folders[-1], read_config(folders[-1]) if folders[-1].exists() else config


def read_config(folder: RunFolder, sets: Sequence[str] = ()) -> RunConfig:
    """Return the config that the run was started with, its environment variables included. The ConfigError for a file
    of another release names both releases."""
    try:
        config = loader.load([folder.config_file], env={})
    except ConfigError as error:
        writer = _writer_of(folder)
        if writer in (None, __version__):
            raise
        raise ConfigError(f"{error} (rftstream {writer} wrote the file, this is {__version__})") from None
    return loader.load([folder.config_file], sets=sets, env={}) if sets else config


def _writer_of(folder: RunFolder) -> str | None:
    """Return the release that wrote the run's config.toml; None if the file does not say."""
    text = folder.config_file.read_text(encoding="utf-8", errors="replace") if folder.exists() else ""
    return text.partition("\n")[0].removeprefix(WRITTEN_BY) if text.startswith(WRITTEN_BY) else None


def _nearest(path: Path) -> str:
    """Return a hint for a wrong RUN: the nearest run folder or run file beside it, or in runs/ there or one below."""
    if ":" in path.parts[0]:
        return "; name a run on Kafka by a copy of its run file, on any host"
    beside = _listed(path.parent)
    runs = (one for folder in (path.parent, *beside) for one in _listed(folder / "runs") if RunFolder(one).exists())
    files = (one for one in beside if one.suffix == ".toml" and one.name != "pyproject.toml")
    known = [*files, *filter(lambda one: RunFolder(one).exists(), beside), *runs]
    if not known:
        return "; `rftstream list runs --folder DIR` lists those of a folder"
    near = difflib.get_close_matches(path.name, [one.name for one in known], n=1)
    if not near:
        return f"; there are {', '.join(sorted(map(str, known))[:8])}"
    return f"; did you mean {next(one for one in known if one.name == near[0])}?"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def named_runs(runs: Sequence[str | Path]) -> dict[str, str | Path]:
    """Return several runs by unique names that are valid in addresses and labels. ConfigError for a run that does not
    exist."""
    found: dict[str, str | Path] = {}
    for run in runs:
        name = base = re.sub(r"[^A-Za-z0-9._-]", "_", find_run(run)[0].run_id)
        number = 2
        while name in found:
            name, number = f"{base}~{number}", number + 1
        found[name] = run
    return found


def open_run(run: str | Path, layers: Sequence[Path] = ()) -> OpenRun:
    """Open the run that `find_run` finds. ConfigError if there is no such run or its log is missing."""
    folder, config = find_run(run, layers)
    return OpenRun(folder, config, open_transport(config, folder, create=False))


def open_transport(config: RunConfig, folder: RunFolder, *, create: bool = False, user: str | None = None) -> Transport:
    """Open the log of a run. `create` makes it if it is missing. `user` is this process's name for the log's servers:
    the role of a worker, or None for commands (config/log_users.py)."""
    kind = config.transport.kind
    transport = registry.resolve("transport", kind, where="transport.kind")
    spec = registry.spec(TransportSpec, kind)
    place = (folder.log,) if spec.in_run_folder else (folder.run_id, _revealed(config, user))
    options = {"create": create} if spec.in_run_folder or spec.takes_create else {}
    return transport(*place, **options)  # type: ignore[no-any-return]


def lies_in_folder(config: RunConfig) -> bool:
    """Return whether the log is in the run folder, so that only this host has it."""
    return registry.find_spec(TransportSpec, config.transport.kind).in_run_folder


def _revealed(config: RunConfig, user: str | None = None) -> TransportSection:
    named = log_users.options_of(config.transport.options, user or log_users.command_user())
    options = secrets.reveal(named, where="transport.options")
    return dataclasses.replace(config.transport, options=options)


def open_store(config: RunConfig, folder: RunFolder, *, patience_s: float | None = None) -> ObjectStore:
    """Open the object store of a run. `patience_s` replaces the config's time to wait for one that does not answer."""
    from rftstream.weights.stores.store import ObjectStore

    settings = config.weights
    patience_s = settings.patience_s if patience_s is None else min(patience_s, settings.patience_s)
    return ObjectStore(
        settings.store.replace("{run}", folder.run_id),
        base=folder.path,
        patience_s=patience_s,
        timeout_s=min(settings.timeout_s, max(patience_s, 1.0)),
    )


def store_place(config: RunConfig, folder: RunFolder) -> str:
    """Return the place of a run's objects: a path, or a URL."""
    from rftstream.weights.stores.store import place_on_disk

    url = config.weights.store.replace("{run}", folder.run_id)
    place = place_on_disk(url, folder.path)
    return url.rstrip("/") if place is None else os.path.abspath(place)


def check_store_is_reached(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError where the objects of a run lie in its folder, and this host does not see that folder."""
    place = Path(store_place(config, folder))
    if not folder.exists() and folder.path in place.parents:
        raise ConfigError(
            f"weights.store: got {config.weights.store!r}, a folder in the run folder, which is on another host; "
            "expected a store that all hosts reach: start the run, and its workers, with weights.store = "
            '"s3://BUCKET/{run}", or "file:///FOLDER/{run}" on a disk that all of them mount'
        )


def sharing_store(config: RunConfig, folder: RunFolder) -> list[str]:
    """Return the runs beside this one whose objects have the same place and the same names."""
    place, found = store_place(config, folder), []
    for path in _listed(folder.path.parent):
        other = RunFolder(path)
        if path == folder.path or not other.exists():
            continue
        try:
            if store_place(read_config(other), other) == place:
                found.append(other.run_id)
        except ConfigError:  # of another release
            continue
    return found


def wanted_topics(config: RunConfig) -> dict[str, TopicSettings]:
    """Return the topics that `contracts/topics.py` and the run file require."""
    return {
        name: TopicSettings(
            partitions=num_partitions(topic, partitions=config.transport.partitions, shares=config.trainer.shares),
            compacted=topic.compacted,
            max_record_bytes=topic.max_record_bytes,
        )
        for name, topic in TOPICS.items()
    }


def create_log(transport: Transport, config: RunConfig) -> None:
    """Create the topics of a run, and position 0 for every consumer group, before any reader starts."""
    transport.admin.ensure_topics(wanted_topics(config))
    for group, topics in consumer_groups(config).items():
        transport.admin.commit_initial(group, topics)


def complete_log(transport: Transport, config: RunConfig) -> None:
    """Create the missing topics and positions of a run that was made by an earlier release, or that has a new
    section."""
    there = transport.admin.topics()
    transport.admin.ensure_topics({name: one for name, one in wanted_topics(config).items() if name not in there})
    for group, topics in consumer_groups(config).items():
        known = transport.admin.committed(group)
        if lacking := [topic for topic in topics if not any(place.topic == topic for place in known)]:
            transport.admin.commit_initial(group, lacking)


def shown_path(path: Path) -> str:
    """Return the path relative to the current folder if it is below that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
