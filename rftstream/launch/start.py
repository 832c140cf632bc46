"""Start a whole run on this machine, continue one, or make one for workers that others start.

`rftstream.run` and the commands `run` and `resume` call this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from rftstream.config import loader
from rftstream.config.placement import chosen_settings, place
from rftstream.config.plain import toml_value
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState, RunFinished, RunState
from rftstream.contracts.records import NewRecord
from rftstream.data.tasksets.row_index import kept_in
from rftstream.errors import ConfigError
from rftstream.launch.processes import Spawner
from rftstream.launch.result import RunResult, result_of
from rftstream.launch.session import RunSession
from rftstream.launch.session_options import DEADLINE_S, SessionOptions
from rftstream.models.folders.folder import prepare_model
from rftstream.models.folders.made import make_as_recorded
from rftstream.models.machine import read_machine
from rftstream.preflight.folder_choice import choose_folder, folder_after, newest_folder, run_state
from rftstream.preflight.plan import Purpose, RunPlan, plan
from rftstream.queries.datasets.taking import take_rollouts
from rftstream.queries.state.elsewhere import held_elsewhere, nobody_at_work, reached_here_alone
from rftstream.roles.trainer.schedule import rate_change
from rftstream.runs.folder import (
    RunFolder,
    complete_log,
    find_run,
    named_files,
    open_store,
    open_transport,
    read_config,
    shown_path,
    wanted_topics,
)
from rftstream.runs.log_settings import check_log
from rftstream.runs.making.create import begin, say_aside, write_config
from rftstream.runs.making.elsewhere import check_resumed
from rftstream.runs.making.init_from import fetch_initial
from rftstream.runs.manifest import changed_settings, changes_of_resume, check_same_run, data_digests
from rftstream.runs.modules import changes_of_modules, write_modules
from rftstream.runs.observer import Observer
from rftstream.runs.placed import placed_anew, placement_notes, record_placement
from rftstream.runs.roll_back import roll_back
from rftstream.runs.writes.additions import commit_once
from rftstream.runs.writes.load_demonstrations import load_demonstrations
from rftstream.service.control_view import read_control
from rftstream.service.records.losses import WHOLE, check_beginnings
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.trimming import delete_trimmed, undeleted

Settings = Mapping[str, Any] | Sequence[str]
"""Settings to change: {"trainer.lr": 1e-5}, or ["trainer.lr=1e-5"] as for --set."""


def run(
    config: RunConfig | str | Path,
    *,
    set: Settings = (),  # noqa: A002  as the option of the commands
    run_dir: str | Path | None = None,
    progress: str = "auto",
    stream: TextIO | None = None,
    deadline_s: float = DEADLINE_S,
    spawner: Spawner | None = None,
) -> RunResult:
    """Do a new run from start to end, or continue an existing one if `run.resume` says so.

    A run that fails raises nothing: `exit_code`, `reason` and `error` of the result say so, and `final` is None.
    `set` changes settings of a run file. `progress`: auto, live, plain or none, written to `stream` (stdout).
    ConfigError if the folder's run is live, or neither live nor ended, or ended in a `run_dir` that was named.
    """
    options = SessionOptions(progress=progress, stream=stream, deadline_s=deadline_s, spawner=spawner)
    if not isinstance(config, RunConfig):
        config = loader.load(config, sets=as_sets(set))
    elif set:
        raise ConfigError("set: got a RunConfig, expected a run file; `load_config(FILE, sets=[...])` changes settings")
    planned = plan(config, Purpose.begin, run_dir=run_dir)
    config = planned.config
    if config.run.resume != "never":
        newest = newest_folder(config, planned.run_dir)
        found = run_state(config, newest)
        is_over = found == "ended" and config.run.resume == "auto"
        if is_over and (done := _complete(config, newest, options.began)) is not None:
            return done
        if found != "none":
            before = read_config(newest) if newest.exists() else config
            return _go_on(newest, before, planned, options)
    folder = choose_folder(config, planned.run_dir)
    with folder.held():
        if folder.exists():
            raise ConfigError(f"{folder.path}: another run was started there just now; try again")
        notes = [*placement_notes(planned.placement), *planned.notes, *reached_here_alone(config, folder)]
        record_placement(planned.placement, folder)
        if planned.run_dir is None and folder.run_id != config.run.name:
            notes.insert(0, f"a new run in {shown_path(folder.path)}: those of this name before it have ended")
        return RunSession(config, folder, options).run(new=True, notes=notes)


def as_sets(given: Settings) -> list[str]:
    """Return settings as --set takes them; None takes one away. ConfigError for a function that no module defines."""
    if isinstance(given, Mapping):
        return [f"{name}={_written(name, value)}" for name, value in given.items()]
    return list(given)


def _written(name: str, value: Any) -> str:
    try:
        return loader.UNSET_WORD if value is None else toml_value(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def resume(
    run: str | Path,
    *,
    layers: Sequence[Path] = (),
    sets: Sequence[str] = (),
    progress: str = "auto",
    stream: TextIO | None = None,
    deadline_s: float = DEADLINE_S,
    spawner: Spawner | None = None,
) -> RunResult:
    """Continue a run that was stopped or died, or extend a finished one. `layers` are run files that override a run
    file; `sets` change settings."""
    options = SessionOptions(progress=progress, stream=stream, deadline_s=deadline_s, spawner=spawner)
    folder, before = find_run(run, layers)
    files = named_files(run, layers)
    config = placed_anew(folder, sets) if folder.exists() else loader.load(files, sets=sets)
    planned = plan(config, Purpose.resume)
    notes = not_taken(files, planned.config, sets) if folder.exists() else []
    if folder.exists() and planned.config.run.folder != before.run.folder:
        raise ConfigError(
            f"run.folder: got {planned.config.run.folder!r}, but the run lies in {shown_path(folder.path)} and goes on "
            "there; leave it out, or begin a new run with it"
        )
    if not folder.exists():
        with closing(open_transport(planned.config, folder)) as transport:
            before = check_resumed(transport, planned.config, folder.run_id, sets) or before
    return _go_on(folder, before, planned, options, notes)


def not_taken(files: Sequence[Path], config: RunConfig, sets: Sequence[str]) -> list[str]:
    """Return the differences between the run files and the settings in force: the config that the run recorded, with
    `sets`. `files` may be a run folder instead."""
    if files[0].is_dir():
        return []
    differences = changed_settings(config, place(read_machine(), loader.load(files, sets=sets)).config)
    differences = [re.sub(r"^base ", "the folder of relative paths ", line) for line in differences]
    if not differences:
        return []
    return [
        *(f"not taken from {' '.join(map(shown_path, files))}: {line}" for line in differences),
        "the run goes on with the settings that it has recorded; give what should change by --set SECTION.KEY=VALUE",
    ]


def resume_if_incomplete(run: str | Path, *, progress: str = "auto", stream: TextIO | None = None) -> RunResult:
    """Resume a run, or return its result if it is complete."""
    began = time.monotonic()
    folder, config = find_run(run)
    if run_state(config, folder) == "ended" and (done := _complete(config, folder, began)) is not None:
        return done
    return resume(run, progress=progress, stream=stream)


def _go_on(
    folder: RunFolder,
    before: RunConfig,
    planned: RunPlan,
    options: SessionOptions,
    notes: Sequence[str] = (),
) -> RunResult:
    """Continue an existing run. `run.resume` may name a version to go back to, once."""
    config = planned.config
    version = config.run.resume if isinstance(config.run.resume, int) else None
    if version is not None:
        kept = before.run.resume if isinstance(before.run.resume, str) else "never"
        config = loader.replace(config, run__resume=kept)
    with folder.held():
        with closing(open_transport(config, folder)) as transport:
            others = held_elsewhere(config, transport)
            reopen(transport, folder, before, config, version)
            rate = _rate_change(transport, before, config, version)
            missing = nobody_at_work(config, transport)
        chosen = {*planned.placement.chosen} & {*chosen_settings(before)}  # left to rftstream, then and now
        changes = [line for line in changes_of_resume(before, config) if line.partition(" ")[0] not in chosen]
        changed = [f"changed: {line}" for line in (*changes, *rate)]
        changed += changes_of_modules(config, folder)
        write_modules(config, folder)
        record_placement(planned.placement, folder)
        write_config(config, folder)
        shown = placement_notes(planned.placement)
        back = [] if version is None else [f"goes on from version {version}"]
        return RunSession(config, folder, options).run(
            new=False, notes=[*others, *shown, *notes, *changed, *planned.notes, *back, *missing]
        )


def _rate_change(transport: Transport, before: RunConfig, config: RunConfig, version: int | None) -> list[str]:
    """Return a line on the new course of the learning rate if other settings change it at `version` (None: the
    newest). The settings before may have trained nothing, so the rate of the last step is that of its record."""
    with closing(Observer(transport)) as observer:
        observer.catch_up()
        curve = observer.curve
    version = curve.version if version is None else version
    last = next((step.metrics.get("lr") for step in curve.steps() if step.name.version == version), None)
    line = rate_change(Stages.of(before), Stages.of(config), version, last)
    return [] if line is None else [line]


def _complete(config: RunConfig, folder: RunFolder, began: float) -> RunResult | None:
    """Return the result of an ended run, or None if it has something left to do under this config."""
    before = read_config(folder) if folder.exists() else config
    with closing(open_transport(config, folder)) as transport, closing(Observer(transport)) as observer:
        observer.catch_up()
        finished = observer.control.finished
        if finished is None or nothing_more(finished, observer.curve.version, before, config) is None:
            return None
        delete_leftovers(transport, config, folder)
        return result_of(folder, observer, finished.reason, finished.exit_code, began)


def create(config: RunConfig | str | Path, *, run_dir: str | Path | None = None) -> tuple[RunFolder, bool]:
    """Make a run without processes, for workers that others start; return its folder and whether it is new.

    If the newest run has not ended, it is returned unchanged, so that a system can call this at each start.
    """
    if not isinstance(config, RunConfig):
        config = loader.load([config])
    planned = plan(config, Purpose.make, run_dir=run_dir)
    config = planned.config
    newest = newest_folder(config, planned.run_dir)
    found = run_state(config, newest)
    if newest.is_live() or found == "begun":
        return newest, False
    folder = folder_after(config, newest, planned.run_dir) if found == "ended" else newest
    with folder.held():
        if folder.exists():
            return folder, False
        fetch_initial(config, folder.model)
        take_rollouts(config, config.experts, folder.demonstrations)
        prepare_model(config.model, folder.model, config.run.seed)
        with closing(open_transport(config, folder, create=True)) as transport:
            begin(transport, config, folder)
    return folder, True


# ------------------------------------------------------------------------------------------------ resume


def delete_leftovers(transport: Transport, config: RunConfig, folder: RunFolder) -> None:
    """Delete what the trainer of a finished run gave up but could not delete, for instance because the machine died."""
    said = read_control(transport).trimmed
    if said is None:
        return
    before = undeleted(said, transport)
    checkpoints = CheckpointStore(open_store(config, folder))
    for error in delete_trimmed(said, transport, checkpoints, compacts=config.retention is not None):
        say_aside(f"{error}; what retention gave up may still be there, resume once more")
    after = undeleted(said, transport)
    if gone := {topic: count - after.get(topic, 0) for topic, count in before.items() if count > after.get(topic, 0)}:
        found = ", ".join(f"{count:,} of {topic}" for topic, count in gone.items())
        say_aside(f"deleted what the last trainer had given up and left: offsets {found}")


def reopen(
    transport: Transport, folder: RunFolder, before: RunConfig, config: RunConfig, back_to: int | None = None
) -> None:
    """Revoke the records that end or stop the run, and the versions after `back_to`.

    ConfigError if the run has nothing more to do, or would continue with other data.
    """
    check_beginnings(transport, folder.run_id, WHOLE)
    with closing(Observer(transport)) as observer:
        observer.catch_up()
        control, version = observer.control, observer.curve.version
    version = version if back_to is None else min(version, back_to)
    retries = any(request.expires_at > time.time() for request in control.retries.values())
    if control.finished is not None and (why := nothing_more(control.finished, version, before, config, retries)):
        delete_leftovers(transport, config, folder)
        raise ConfigError(f"{shown_path(folder.path)}: {why}")
    if config.feedback is not None:  # a run of an older release lacks some
        transport.admin.ensure_topics(wanted_topics(config))
    if control.manifest is not None:
        make_as_recorded(config.model, folder.model, config.run.seed, control.manifest.digests)
        model = prepare_model(config.model, folder.model, config.run.seed)
        with kept_in(folder.index):
            digests = data_digests(config, model)
        check_same_run(control.manifest, config, digests)
    check_log(transport, config, folder.run_id, begun=True)
    complete_log(transport, config)
    if config.experts is not None and config.experts.source is not None:
        take_rollouts(config, config.experts, folder.demonstrations)
        load_demonstrations(transport, config, folder, config.experts, say=say_aside)
    imported = config.run.imported_from is not None
    if imported and control.ended is None:
        raise ConfigError(
            f"{shown_path(folder.path)}: its import is not complete; do the command that began it, `rftstream rescore` "
            "or `replay --into`, again first"
        )
    if back_to is not None:
        roll_back(transport, open_store(config, folder), folder.run_id, back_to)
    records = []
    for key, message in (("finished", control.finished), ("end", control.ended)):
        if message is not None and not (imported and key == "end"):
            records.append(NewRecord("control", 0, key.encode(), None))
    if control.state is not None and control.state.state is not DesiredState.running:
        state = RunState(state=DesiredState.running, by="resume", since=time.time())
        records.append(codec.to_record(state, "control", 0, run=folder.run_id))
    if records:
        commit_once(transport, f"{folder.run_id}.resume", records)


def nothing_more(
    finished: RunFinished, version: int, before: RunConfig, config: RunConfig, retries: bool = False
) -> str | None:
    """Return why a finished run has nothing left to do under its changed settings, or None if it has something.

    `retries`: there is a request to put dead groups back.
    """
    old, new = before.run, config.run
    if config.steps is not None and version >= config.steps:
        more = (
            f"run.steps={max(2 * version, version + 1)}"
            if not config.stages
            else f"stages.{len(config.stages) - 1}.steps={config.stages[-1].steps + 10}"
        )
        return f"is finished with {version} of {config.steps} steps; give more, e.g. --set {more}"
    if finished.reason == "imported":
        return "has trained all that was imported into it"
    if finished.reason == "hours" and new.hours is not None and new.hours <= (old.hours or 0):
        return f"is finished after {old.hours} hours; give more, e.g. --set run.hours={2 * (old.hours or 1):g}"
    if finished.reason == "reward" and new.stop_reward is not None and new.stop_reward == old.stop_reward:
        return f"has reached its reward of {old.stop_reward}; set run.stop_reward higher"
    passes = {name: section.passes for name, section in config.tasksets.items()}
    if (
        finished.reason == "taskset"
        and not retries
        and passes == {name: section.passes for name, section in before.tasksets.items()}
    ):
        return "has gone through its tasksets; give more passes, e.g. --set tasksets.NAME.passes=2"
    return None
