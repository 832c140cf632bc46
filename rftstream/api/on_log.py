"""Opens a run of a shared log on a host that has not its folder: by its id, or by a part of its run file. Its settings
are those that the run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rftstream.config import loader, toml_files
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.folder import (
    OpenRun,
    RunFolder,
    candidates,
    lies_in_folder,
    names_on_log,
    open_run,
    open_transport,
)
from rftstream.service.control_view import read_manifest

_ANY = {"run": {"name": "any", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"any": {"source": "arithmetic"}}}
"""Settings with which a log can be asked for its runs: nothing but the transport is used of them."""


def open_on_log(run_id: str, servers: str, options: Mapping[str, Any]) -> OpenRun:
    """Open a run by its id and the servers of its log. ConfigError if the log has no such run."""
    asking = loader.from_dict({**_ANY, "transport": {"kind": "kafka", "servers": servers, "options": dict(options)}})
    known = names_on_log(asking)
    if run_id not in known:
        raise ConfigError(f"{run_id}: no such run at {servers}; {registry.suggest(run_id, sorted(known))}")
    config = _recorded(RunFolder(Path(run_id)), asking)
    folder = RunFolder(Path(config.base) / config.run.folder / run_id)
    return OpenRun(folder, config, open_transport(config, folder))


def open_named(run: Path, layers: Sequence[Path] = ()) -> OpenRun:
    """Open a run by its folder, or by its run file. Of the files of a run that was made from several, one that names
    the run and its log is enough, since the run has recorded its settings. ConfigError, which says what is missing, for
    another one."""
    try:
        return open_run(run, layers)
    except ConfigError as error:
        files = [run, *layers]
        values = {key: value for file in files if file.is_file() for key, value in toml_files.glance(file).items()}
        missing = [name for name in _ANY if name not in values and not (name == "tasksets" and "experts" in values)]
        if not values or not missing:
            raise
        try:
            asking = _filled(files, values, missing)
        except ConfigError:
            raise ConfigError(f"{error}; {_what_is_enough(run)}") from None
    folders = candidates(asking)
    if not folders:
        at = "" if lies_in_folder(asking) else f" nor at {asking.transport.servers}"
        place = Path(asking.base) / asking.run.folder
        raise ConfigError(
            f"{run}: a part of a run file, without {_listed(missing)}; no run {asking.run.name} under {place}{at}; "
            f"{_what_is_enough(run)}"
        )
    if folders[-1].exists():
        return open_run(folders[-1].path)
    config = _recorded(folders[-1], asking)
    return OpenRun(folders[-1], config, open_transport(config, folders[-1]))


def _filled(files: Sequence[Path], values: Mapping[str, Any], missing: Sequence[str]) -> RunConfig:
    """Return the settings of some files of a run file, with any in place of those that only the others have."""
    run = values.get("run")
    sets = {"model": ['model.path="fake"'], "tasksets": ['tasksets.any.source="arithmetic"'], "run": []}
    more = [setting for name in missing for setting in sets[name]]
    if not isinstance(run, dict) or not {"steps", "hours", "stop_reward"} & set(run):
        more.append("run.steps=1")
    return loader.load(files, sets=more)


def _recorded(folder: RunFolder, asking: RunConfig) -> RunConfig:
    """Return the settings that a run has recorded on its log, with the servers of `asking`, since the log may have
    other addresses from here."""
    with closing(open_transport(asking, folder)) as transport:
        manifest = read_manifest(transport)
    if manifest is None:
        raise ConfigError(
            f"{folder.run_id}: the run at {asking.transport.servers} has not begun, so it has no settings yet; start "
            "its workers"
        )
    options = dict(asking.transport.options)
    own = {"transport__options": options} if options else {}
    return loader.replace(loader.from_toml(manifest.config), transport__servers=asking.transport.servers, **own)


def _what_is_enough(run: Path) -> str:
    return (
        "of a run made from several files, name all of them as one, FIRST.toml,SECOND.toml, or the run folder, or the "
        f"file with run.name and [transport], or give what {run} lacks of these by RFTSTREAM__RUN__NAME, "
        "RFTSTREAM__TRANSPORT__KIND and RFTSTREAM__TRANSPORT__SERVERS"
    )


def _listed(sections: Sequence[str]) -> str:
    return ", ".join(f"[{name}]" for name in sections)
