"""A whole run on this machine: its folder, its log, its processes, its end. `rftstream.run` and the commands are this.

The order makes a kill at any point harmless: lock, model, log, and config.toml last, for a folder without one is no
run yet, and workers wait for it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rftstream import codec
from rftstream import config as configs
from rftstream.config import RunConfig
from rftstream.errors import ConfigError
from rftstream.messages import DesiredState, EvalResult, RunState, StepRecord
from rftstream.modelfolder import prepare_model
from rftstream.runtime import zygote
from rftstream.runtime.host import add_import_paths
from rftstream.runtime.initial import fetch_initial
from rftstream.runtime.logging import TextFormatter
from rftstream.runtime.manifest import changes_of_resume, check_same_run, data_digests
from rftstream.runtime.observer import ControlView, Observer
from rftstream.runtime.preflight import (
    check_part_names,
    choose_folder,
    newest_folder,
    nothing_more,
    shown_path,
    standing,
)
from rftstream.runtime.processes import PlainSpawner, Spawner
from rftstream.runtime.progress import Progress, Watch, open_progress
from rftstream.runtime.rollback import roll_back
from rftstream.runtime.runs import (
    RunFolder,
    create_log,
    find_run,
    next_folder,
    open_store,
    open_transport,
    read_config,
)
from rftstream.runtime.supervisor import Failure, Supervisor, worker_commands
from rftstream.runtime.targets import Targets
from rftstream.trackers import Tracker, check_trackers, open_trackers
from rftstream.transport.base import NewRecord, Transport

LOOK_EVERY_S = 0.1
DEADLINE_S = 35.0
"""For all to leave; a little more than each of them takes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    run_dir: Path
    steps: int
    """Trained in all, before a resume too."""
    version: int
    reward_first: float | None
    """Mean over the first tenth of the steps; None if nothing was scored."""
    reward_last: float | None
    wall_s: float
    """Of this command, the start of the processes included."""
    reason: str
    """steps, hours, reward, taskset, ...; interrupted, failed."""
    exit_code: int = 0
    final: Path | None = None
    """The trained model, an ordinary Hugging Face model folder."""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def summary(self) -> str:
        """For people."""
        folder = shown_path(self.run_dir)
        lines = [f"{folder}: {self.steps} steps in {self.wall_s:.1f} s; ended by: {self.reason}"]
        if self.reward_first is not None and self.reward_last is not None:
            lines.append(f"reward {self.reward_first:.3f} -> {self.reward_last:.3f} (first and last tenth)")
        if self.final is not None:
            lines.append(f"the model is in {shown_path(self.final)}")
        if not RunFolder(self.run_dir).exists():
            lines.append(f"nothing was begun; the logs are in {folder}/logs")
        elif self.reason == "interrupted" or self.exit_code:
            lines.append(f"go on with: rftstream resume {folder}")
        else:
            lines.append(f"look closer with: rftstream audit {folder}")
        return "\n".join(lines)


def result_of(
    folder: RunFolder, observer: Observer, reason: str, exit_code: int, began: float, error: str | None = None
) -> RunResult:
    """As the log says."""
    curve, finished = observer.curve, observer.control.finished
    return RunResult(
        run_dir=folder.path,
        steps=curve.num_steps,
        version=curve.version,
        reward_first=curve.reward_first(),
        reward_last=curve.reward_last(),
        wall_s=round(time.monotonic() - began, 3),
        reason=reason,
        exit_code=exit_code,
        final=folder.final if finished is not None and folder.final.is_dir() else None,
        error=error,
    )


def run(
    config: RunConfig | str | Path,
    *,
    run_dir: str | Path | None = None,
    progress: str = "auto",
    stream: TextIO | None = None,
    deadline_s: float = DEADLINE_S,
    spawner: Spawner | None = None,
) -> RunResult:
    """A new run, from start to end, or by `run.resume` one that is there. `progress`: auto, live, plain or none, on
    `stream` (stdout).

    ConfigError if the folder's run is live, or neither live nor ended."""
    began = time.monotonic()
    if not isinstance(config, RunConfig):
        config = configs.load([config])
    add_import_paths(config)
    check_part_names(config)
    check_trackers(config)
    if config.run.imported_from is not None:
        raise ConfigError(
            "run.imported_from: is for `rftstream rescore` and `replay --into`, expected none in a run file"
        )
    given = Path(run_dir) if run_dir is not None else None
    if config.run.resume != "never":
        newest = newest_folder(config, given)
        found = standing(config, newest)
        if found == "ended" and config.run.resume == "auto" and (done := _complete(config, newest, began)) is not None:
            return done
        if found != "none":
            before = read_config(newest) if newest.exists() else config
            return _go_on(newest, before, config, progress, stream, deadline_s, spawner, began)
    folder = choose_folder(config, given)
    with folder.held():
        if folder.exists():
            raise ConfigError(f"{folder.path}: another run was started there just now; try again")
        launch = _Launch(config, folder, progress, stream or sys.stdout, deadline_s, spawner, began)
        return launch.run(new=True)


def resume(
    run: str | Path,
    *,
    sets: Sequence[str] = (),
    progress: str = "auto",
    stream: TextIO | None = None,
    deadline_s: float = DEADLINE_S,
    spawner: Spawner | None = None,
) -> RunResult:
    """Goes on with a run that was stopped or died, or adds to a finished one. `sets` change settings."""
    began = time.monotonic()
    folder, before = find_run(run)
    config = read_config(folder, sets) if folder.exists() else configs.load([run], sets=sets)
    add_import_paths(config)
    check_part_names(config)
    check_trackers(config)
    return _go_on(folder, before, config, progress, stream, deadline_s, spawner, began)


def see_to_its_end(run: str | Path, *, progress: str = "auto", stream: TextIO | None = None) -> RunResult:
    """As `resume`, but content with a run that is complete: how that ended."""
    began = time.monotonic()
    folder, config = find_run(run)
    if standing(config, folder) == "ended" and (done := _complete(config, folder, began)) is not None:
        return done
    return resume(run, progress=progress, stream=stream)


def _go_on(
    folder: RunFolder,
    before: RunConfig,
    config: RunConfig,
    progress: str,
    stream: TextIO | None,
    deadline_s: float,
    spawner: Spawner | None,
    began: float,
) -> RunResult:
    """A run that is there already; `config.run.resume` may name the version that it goes back to, once."""
    version = config.run.resume if isinstance(config.run.resume, int) else None
    if version is not None:
        kept = before.run.resume if isinstance(before.run.resume, str) else "never"
        config = configs.replace(config, run__resume=kept)
    with folder.held():
        transport = open_transport(config, folder)
        try:
            reopen(transport, folder, before, config, version)
        finally:
            transport.close()
        write_config(config, folder)
        launch = _Launch(config, folder, progress, stream or sys.stdout, deadline_s, spawner, began)
        for line in changes_of_resume(before, config):
            launch.note(f"changed: {line}")
        if version is not None:
            launch.note(f"goes on from version {version}")
        return launch.run(new=False)


def _complete(config: RunConfig, folder: RunFolder, began: float) -> RunResult | None:
    """Of a run that has ended and would have nothing to do under this config, how it ended; None if it has."""
    before = read_config(folder) if folder.exists() else config
    transport = open_transport(config, folder)
    observer = Observer(transport)
    try:
        observer.catch_up()
        control = observer.control
        assert control.finished is not None
        if nothing_more(control.finished, observer.curve.version, before, config) is None:
            return None
        return result_of(folder, observer, control.finished.reason, control.finished.exit_code, began)
    finally:
        observer.close()
        transport.close()


def create(config: RunConfig | str | Path, *, run_dir: str | Path | None = None) -> tuple[RunFolder, bool]:
    """A run without processes, for workers that others start; and whether it is new.

    The newest one is taken as it is if it has not ended, so that this can be done again at every start of a system."""
    if not isinstance(config, RunConfig):
        config = configs.load([config])
    add_import_paths(config)
    check_part_names(config)
    newest = newest_folder(config, Path(run_dir) if run_dir is not None else None)
    found = standing(config, newest)
    if newest.is_live() or found == "begun":
        return newest, False
    folder = next_folder(config, newest) if found == "ended" else newest
    with folder.held():
        if folder.exists():
            return folder, False
        fetch_initial(config, folder.model)
        prepare_model(config.model, folder.model, config.run.seed)
        transport = open_transport(config, folder, create=True)
        try:
            _begin(transport, config, folder)
        finally:
            transport.close()
    return folder, True


# ------------------------------------------------------------------------------------------------ the folder


def write_config(config: RunConfig, folder: RunFolder) -> None:
    """At once or not at all; whoever sees it sees all of it."""
    partial = folder.config_file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(configs.to_toml(config), encoding="utf-8")
    partial.replace(folder.config_file)


def _begin(transport: Transport, config: RunConfig, folder: RunFolder) -> None:
    """The log of a new run, then the file that makes the folder a run."""
    _check_unused(transport, folder)
    create_log(transport, config)
    write_config(config, folder)


def _check_unused(transport: Transport, folder: RunFolder) -> None:
    """On a log that others share the name may be somebody else's. ConfigError if a run has begun under it."""
    if "control" in transport.admin.topics() and any(transport.admin.end_offsets("control").values()):
        raise ConfigError(
            f"{folder.run_id}: the log has a run of this name already, but {shown_path(folder.path)} is new; take"
            " another name with --run-dir, or delete the topics of the old one"
        )


def _discard(folder: RunFolder, transport: Transport) -> None:
    """Of a run that failed before its first rollout only the logs are of use, and the name stays free."""
    folder.config_file.unlink()
    if not folder.log.exists():
        transport.admin.delete_topics(list(transport.admin.topics()))
    for part in (folder.log, folder.model, folder.path / "weights"):
        shutil.rmtree(part, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ resume


def reopen(
    transport: Transport, folder: RunFolder, before: RunConfig, config: RunConfig, back_to: int | None = None
) -> None:
    """Takes back what said that the run is over or should stop, and the versions after `back_to`. ConfigError if there
    is nothing more to do, or if it would be done with other data."""
    observer = Observer(transport)
    try:
        observer.catch_up()
        control, version = observer.control, observer.curve.version
    finally:
        observer.close()
    version = version if back_to is None else min(version, back_to)
    retries = any(request.expires_at > time.time() for request in control.retries.values())
    if control.finished is not None and (why := nothing_more(control.finished, version, before, config, retries)):
        raise ConfigError(f"{shown_path(folder.path)}: {why}")
    if control.manifest is not None:
        model = prepare_model(config.model, folder.model, config.run.seed)
        check_same_run(control.manifest, config, data_digests(config, model))
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
        producer = transport.producer(f"{folder.run_id}.resume")
        producer.start()
        producer.commit(records)
        producer.close()


# ------------------------------------------------------------------------------------------------ running


class _Launch:
    """One supervised stretch of a run, under its lock."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        progress: str,
        stream: TextIO,
        deadline_s: float,
        spawner: Spawner | None,
        began: float,
    ) -> None:
        self._config = config
        self._folder = folder
        self._progress_kind = progress
        self._stream = stream
        self._deadline_s = deadline_s
        self._began = began
        self._progress: Progress | None = None
        self._trackers: list[Tracker] = []
        self._interrupts = 0
        self._is_answered = False
        self._notes = _notes_file(folder)
        self._spawner = spawner or self._default_spawner()

    def run(self, *, new: bool) -> RunResult:
        transport: Transport | None = None
        try:
            if isinstance(self._spawner, zygote.ZygoteSpawner):
                self._spawner.warm()  # it imports while we prepare
            if new:
                fetch_initial(self._config, self._folder.model)
            model = prepare_model(self._config.model, self._folder.model, self._config.run.seed)
            transport = open_transport(self._config, self._folder, create=new)
            if new:
                _begin(transport, self._config, self._folder)
            result = self._supervise(transport, model.folder)
            if new and result.exit_code and not any(transport.admin.end_offsets("rollouts").values()):
                _discard(self._folder, transport)
            return result
        finally:
            self._spawner.close()
            if transport is not None:
                transport.close()
            for handler in self._notes.handlers:
                handler.close()

    def _default_spawner(self) -> Spawner:
        if zygote.is_supported():
            return zygote.ZygoteSpawner(self._folder.logs / "zygote.log", report=self.note)
        return PlainSpawner()

    def _supervise(self, transport: Transport, model: Path) -> RunResult:
        supervisor = Supervisor(
            worker_commands(self._config, self._folder, model), self._spawner, report=self.note,
            deadline_s=self._deadline_s, lock_holder=_lock_holder(transport),
        )  # fmt: skip
        observer = Observer(transport)
        watch = Watch(self._config, transport, observer, supervisor.slots, title=self._folder.run_id)
        self._progress = open_progress(self._progress_kind, watch, self._stream)
        targets = Targets(self._folder.targets_file, self._folder.run_id)
        self._trackers = open_trackers(self._config, self._folder.path)
        try:
            with self._signals():
                while not supervisor.all_left:
                    news = observer.poll()
                    self._heed_interrupts(supervisor)
                    supervisor.poll(observer.control, observer.curve.version)
                    self._progress.update(news)
                    targets.update(supervisor.slots)
                    self._track(news)
                    transport.wait([observer.reader], LOOK_EVERY_S)
                self._progress.update(news := observer.poll())
                self._track(news)
        finally:
            if not supervisor.all_left:
                supervisor.kill()
            self._progress.close()
            targets.close()
            for tracker in self._trackers:
                tracker.close()
            observer.close()
        if supervisor.failure is not None:
            self._notes.error(supervisor.failure.text)
        return self._result(observer, supervisor.failure)

    def _track(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """A tracker that fails is given up: the log has it all, and showing it must not end a run."""
        for tracker in list(self._trackers):
            try:
                tracker.update(news)
            except Exception as error:
                self._trackers.remove(tracker)
                self.note(f"{type(tracker).__name__}: {error}; no longer written, `rftstream plot --tensorboard` does")

    def _heed_interrupts(self, supervisor: Supervisor) -> None:
        if self._interrupts and not supervisor.stopping:
            self.note(f"stopping: {self._deadline_s:g} s to finish what is in hand; ctrl-C again ends it at once")
            self._is_answered = True
            supervisor.stop()
        elif self._interrupts > 1 and not supervisor.killed:
            self.note("ended at once, as asked")
            supervisor.kill()

    def _result(self, observer: Observer, failure: Failure | None) -> RunResult:
        reason, exit_code = self._reason(observer.control, failure)
        error = failure.text if failure is not None else None
        return result_of(self._folder, observer, reason, exit_code, self._began, error)

    def _reason(self, control: ControlView, failure: Failure | None) -> tuple[str, int]:
        if control.finished is not None:
            return control.finished.reason, control.finished.exit_code or (failure.exit_code if failure else 0)
        if failure is not None:
            return "failed", failure.exit_code
        return ("interrupted", 0 if self._interrupts == 1 else 1) if self._interrupts else ("left", 1)

    def note(self, text: str) -> None:
        """To logs/run.log and to whoever watches."""
        self._notes.warning(text)
        if self._progress is not None:
            self._progress.note(text)
        else:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Counts ctrl-C and its like; in another thread than the main one nothing is caught. One that comes before
        the first was answered is the same one: who started this process passes it on to it, too (uv run, timeout)."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._interrupts = 2 if self._is_answered else 1

        before: dict[signal.Signals, Any] = {}
        try:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                    before[signum] = signal.signal(signum, on_signal)
        except ValueError:
            pass
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _lock_holder(transport: Transport) -> Callable[[], int | None] | None:
    """Asks an embedded log which process holds its write lock."""
    ask = getattr(transport, "lock_holder", None)
    if ask is None:
        return None

    def holder() -> int | None:
        found = ask()
        return None if found is None else int(found.pid)

    return holder


class _QuietHandler(logging.FileHandler):
    """On a full disk a note is shown, though it cannot be kept."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the library calls it so
        pass


def _notes_file(folder: RunFolder) -> logging.Logger:
    """logs/run.log: what the supervisor had to say."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    logger = logging.Logger("rftstream.run")  # one of each run, outside the tree that users configure
    handler = _QuietHandler(folder.logs / "run.log", encoding="utf-8", delay=True)
    handler.setFormatter(TextFormatter("run"))
    logger.addHandler(handler)
    return logger
