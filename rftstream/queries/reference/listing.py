"""Lists the built-in parts of a kind, and the runs of a folder."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, TasksetSpec
from rftstream.errors import ConfigError, RftError
from rftstream.queries.curves.history import read_glance
from rftstream.queries.formatting import columns, moment, number
from rftstream.queries.plain import Report
from rftstream.queries.reference.settings import NAMING, OPTIONS, plural_of
from rftstream.queries.reference.source_text import config_fields, find_tree, part_doc
from rftstream.queries.state.elsewhere import look_elsewhere
from rftstream.queries.state.run_state import ending_of, state_of
from rftstream.runs.ending import Ending
from rftstream.runs.folder import OpenRun, RunFolder, open_transport, read_config, runs_of, shown_path
from rftstream.service.control_view import read_control
from rftstream.service.role import Log

ERROR_WIDTH = 60
"""Most characters of the error that ended a run; `status` shows more of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry(Report):
    """A built-in part. `list_parts` makes it."""

    JSON = "name where description settings=knobs"

    name: str
    where: str
    """`module:Thing`."""
    description: str
    """First sentence of its module's docstring if the module holds one part, else of its own docstring."""
    knobs: tuple[str, ...]
    """Fields of its Config, with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine(Report):
    """A run in a list of runs."""

    JSON = "run=name run_dir=folder *"

    name: str
    folder: str
    state: str
    stopped: Ending | None = None
    """How the newest session ended, for a run that is neither live nor finished."""
    version: int | None = None
    steps: int | None = None
    reward: float | None = None
    """Mean reward of the last tenth of the steps, as the end of a run and the studio tell it."""
    created_at: float | None = None
    error: str | None = None
    """Why the other fields are unknown."""


def kind_of(word: str) -> str:
    """Return the kind that a word names: `policies` and `policy` give `policy`. ConfigError if it names no kind."""
    kinds = {plural_of(kind): kind for kind in registry.KINDS}
    if word not in kinds and word not in registry.KINDS:
        raise ConfigError(f"list: unknown kind {word!r}; {registry.suggest(word, [*kinds, 'benchmarks', 'runs'])}")
    return kinds.get(word, word)


# --------------------------------------------------------------------------------------------- parts


def list_parts(kind: str) -> list[PartEntry]:
    """Return the built-in parts of a kind. Their source text is read, since an import may need packages that are
    missing."""
    return [_part(name, spec.path) for name, spec in registry.table(kind).items()]


def how_to_plug(kind: str) -> str:
    """Return the instructions in the kind's table for adding a part, without their title."""
    module = registry.KINDS[kind].partition(":")[0]
    return (ast.get_docstring(find_tree(module) or ast.Module([], [])) or "").partition("\n\n")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry(Report):
    """A source of tasksets that needs a package. `list_sources` makes it."""

    JSON = "source environment package installed install"

    source: str
    """Source in the form of a run file."""
    environment: str
    """The environment that its problems get."""
    package: str
    installed: str | None
    """Version of the package beside rftstream. None: it is not there, and may be in an interpreter of its own."""
    install: str
    """The line that installs it."""


def list_sources(kind: str) -> list[SourceEntry]:
    """Return the sources that name environments of packages, with what is installed. Other kinds of parts have none."""
    found: list[SourceEntry] = []
    if kind != EnvironmentSpec.kind:
        return found
    for name, spec in registry.built_in(TasksetSpec).items():
        if not spec.package:
            continue
        target = spec.environment.get("target", "")
        environment = f"{spec.environment['name']} ({target})" if target else "single_turn"
        found.append(
            SourceEntry(
                source=f"{name}:{spec.location_name}",
                environment=environment,
                package=spec.package,
                installed=_version_of(spec.package),
                install=spec.install,
            )
        )
    return found


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(
            package
        )  # these packages are imported by the names that they are installed by
    except importlib.metadata.PackageNotFoundError:
        return None


def sources_to_text(sources: Sequence[SourceEntry]) -> str:
    """Return the sources as text for people, which follows that of the parts."""
    if not sources:
        return ""
    rows: list[tuple[object, ...]] = [("source", "environment", "package", "here", "installed by")]
    for one in sources:
        rows.append((one.source, one.environment, one.package, one.installed or "no", one.install))
    lines = columns(rows, left=5, indent="  ")
    return "\n".join(["\n", "environments of packages, by name: tasksets.NAME.source = ...", "", *lines])


def parts_to_text(kind: str, parts: Iterable[PartEntry]) -> str:
    """Return the parts of a kind as text for people."""
    rows = [(part.name, part.description) for part in parts]
    knobs = [(part.name, ", ".join(part.knobs)) for part in parts if part.knobs]
    lines = [f"{plural_of(kind)}: {NAMING[kind]} = ...", "", *columns(rows, left=2, indent="  ")]
    if knobs:
        table = OPTIONS.get(kind, f"{plural_of(kind)}.<name>")
        lines += ["", f"settings, in [{table}]:", "", *columns(knobs, left=2, indent="  ")]
    source = registry.KINDS[kind].partition(":")[0].replace(".", "/") + "/__init__.py"
    return "\n".join(
        [
            *lines,
            "",
            f'Your own: {NAMING[kind]} = "my_package.module:Thing" works without touching rftstream.',
            f"{source} says what a part must be:",
            *(f"  {line}" for line in how_to_plug(kind).splitlines()),
        ]
    )


def _part(name: str, where: str) -> PartEntry:
    if find_tree(where.partition(":")[0]) is None:
        return PartEntry(name=name, where=where, description="(its module is missing)", knobs=())
    text = part_doc(where) or ""
    return PartEntry(name=name, where=where, description=_first_sentence(text), knobs=tuple(_knobs(where)))


def _first_sentence(text: str) -> str:
    paragraph = " ".join(re.split(r"\n\s*\n", text)[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]


def _knobs(path: str) -> list[str]:
    return [
        field.name if field.default is None else f"{field.name} = {_default(field.default)}"
        for field in config_fields(path)
    ]


def _default(value: ast.expr) -> str:
    text = ast.unparse(value)
    factory = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return {"dict": "{}", "list": "[]", "tuple": "()"}.get(factory[1], f"{factory[1]}()") if factory else text


# --------------------------------------------------------------------------------------------- runs


def run_places(here: Path) -> list[Path]:
    """Return the folders in which the run files in `here`, and one folder below, put their runs; and `runs` itself."""
    files = sorted([*here.glob("*.toml"), *here.glob("*/*.toml")])
    places = [here / "runs", *here.glob("*/runs"), *(place for file in files if (place := runs_of(file)) is not None)]
    places += [here] if any(RunFolder(path).exists() for path in here.iterdir()) else []
    found = {place.resolve(): place for place in reversed(places) if place.is_dir()}
    if not found:
        raise ConfigError(
            f"{here.resolve()}: no runs here: neither runs/ nor the folder of a run file in it or one folder below; "
            "name where they are with --folder; a run of another host is shown by `rftstream status` of its run files"
        )
    return sorted(found.values())


def list_runs(*folders: Path) -> list[RunLine]:
    """Return the run folders in these folders, oldest first."""
    lines = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder, expected one with run folders; name it with --folder")
        found = [RunFolder(path) for path in folder.iterdir()]
        lines += [_run_line(one) for one in found if one.exists()]
        lines += [_elsewhere_line(one) for one in found if not one.exists() and any(one.logs.glob("*.log"))]
    return sorted(lines, key=lambda line: (line.created_at or 0.0, line.name))


def runs_to_text(lines: list[RunLine]) -> str:
    """Return the runs as text for people."""
    if not lines:
        return "no runs here; start one with `rftstream run FILE`"
    folders = [shown_path(Path(line.folder).resolve().parent) for line in lines]
    rows: list[tuple[object, ...]] = [("run", "in", "state", "created", "version", "reward")]
    for line, folder in zip(lines, folders, strict=True):
        of = f" / {line.steps:,}" if line.steps else ""
        version = None if line.version is None else f"{line.version:,}{of}"
        created = moment(line.created_at) if line.created_at else None
        rows.append((line.name, folder, line.error or _state(line), created, version, number(line.reward)))
    return "\n".join(columns(rows, left=4))


def _state(line: RunLine) -> str:
    if line.stopped is None:
        return line.state
    stopped = line.state if line.state == "stopped" else f"{line.state}, stopped"
    return f"{stopped} by {line.stopped.sentence(ERROR_WIDTH)}"


def _elsewhere_line(folder: RunFolder) -> RunLine:
    """Return the line of a folder in which workers of this host log, of a run that another host has made."""
    why = "only logs of workers for another host's run; `rftstream status` of its run files shows it"
    return RunLine(name=folder.run_id, folder=str(folder.path), state="unknown", error=why)


def _run_line(folder: RunFolder) -> RunLine:
    try:
        config = read_config(folder)
        run = OpenRun(folder, config, open_transport(config, folder))
    except RftError as error:
        return RunLine(name=folder.run_id, folder=str(folder.path), state="unknown", error=str(error))
    try:
        log = Log(run.transport)
        goes_on, control, history = folder.is_live(), read_control(run.transport), read_glance(log)
        if not goes_on and control.finished is None:
            elsewhere = look_elsewhere(control, run.transport, time.time())
            goes_on = elsewhere is not None and elsewhere.goes_on
        return RunLine(
            name=folder.run_id,
            folder=str(folder.path),
            state=state_of(control, goes_on),
            stopped=ending_of(control, folder, goes_on),
            version=history.version,
            steps=config.steps,
            reward=history.reward_ends()[1] if history.rewards() else None,
            created_at=control.manifest.created_at if control.manifest else None,
        )
    except RftError as error:
        return RunLine(name=folder.run_id, folder=str(folder.path), state="unknown", error=str(error))
    finally:
        run.transport.close()
