"""The choice of a run's folder, by the state of the runs before it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.state.elsewhere import at_work_elsewhere
from rftstream.runs.folder import RunFolder, candidates, names_on_log, next_folder, open_transport, shown_path
from rftstream.service.control_view import read_control


def choose_folder(config: RunConfig, run_dir: Path | None) -> RunFolder:
    """Return the folder of a new run. An ended run keeps its folder, and a run that could continue is not abandoned by
    accident.

    Without `run_dir` the run file names a series of runs, and after an ended one comes the next. A caller that names a
    folder expects the results there. If that folder holds an ended run, it is refused, and not silently replaced by
    another one.
    """
    newest = newest_folder(config, run_dir)
    shown = shown_path(newest.path)
    if newest.is_live():
        raise ConfigError(
            f"{shown}: this run is live; wait for its end, stop it, or start another with --run-dir "
            "(workers join a live run with `rftstream worker`)"
        )
    match run_state(config, newest):
        case "none":
            return newest
        case "ended":
            return folder_after(config, newest, run_dir)
    if newest.exists():
        with closing(open_transport(config, newest)) as transport:
            if workers := at_work_elsewhere(transport):
                raise ConfigError(
                    f"{shown}: this run has not ended, and may be at work elsewhere: {workers}; join it with "
                    f"`rftstream worker`, take it over with `rftstream resume {shown}`, or start another with --run-dir"
                )
        raise ConfigError(
            f"{shown}: this run has neither ended nor is anybody running it; go on with `rftstream resume {shown}`, "
            "or start another with --run-dir"
        )
    raise ConfigError(
        f"{newest.run_id}: begun on another host and not ended yet, as the log at {config.transport.servers} says; "
        "join it with `rftstream worker`, go on with `rftstream resume`, or take another run.name"
    )


def folder_after(config: RunConfig, ended: RunFolder, run_dir: Path | None) -> RunFolder:
    """Return the next folder. ConfigError if the ended run has the folder that was requested."""
    if run_dir is None:
        return next_folder(config, ended)
    shown = shown_path(ended.path)
    if not ended.exists():
        raise ConfigError(
            f"{shown}: a run is called as its folder, and the log at {config.transport.servers} has an ended run "
            f"{ended.run_id}, whose folder is not here; name another folder by --run-dir, or remove that run by "
            f"`rftstream delete` of its run file, or of one with run.name = {ended.run_id!r}"
        )
    raise ConfigError(
        f"{shown}: a run has ended in this folder, expected one for a new run; name another by --run-dir, go on with "
        f"this run by `rftstream resume {shown} --set run.steps=N`, or remove it by `rftstream delete {shown}`"
    )


def newest_folder(config: RunConfig, run_dir: Path | None) -> RunFolder:
    """Return the folder of the newest run, or the folder of the first run, which does not exist yet."""
    if run_dir is not None:
        return RunFolder(run_dir.resolve())
    existing = candidates(config)
    return existing[-1] if existing else next_folder(config, None)


def run_state(config: RunConfig, folder: RunFolder) -> Literal["none", "begun", "ended"]:
    """Return the state of a run by its log. "none" also means a run of which only the topics exist."""
    if not folder.exists() and folder.run_id not in names_on_log(config):
        return "none"
    with closing(open_transport(config, folder)) as transport:
        control = read_control(transport)
    if control.finished is not None:
        return "ended"
    return "begun" if folder.exists() or control.manifest is not None else "none"
