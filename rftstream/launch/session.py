"""One session of a run: from the start of its processes here to the end of the last one, under the run's lock."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, TextIO, cast

from rftstream.algorithms.requirements import trained_spec
from rftstream.config.loader import to_dict
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import RftError
from rftstream.launch.display.progress import Onlooker, ProgressView, open_progress
from rftstream.launch.display.progress_text import paused_line
from rftstream.launch.display.watch import Watch
from rftstream.launch.logging import TextFormatter
from rftstream.launch.result import RunResult, result_of
from rftstream.launch.session_options import SessionOptions
from rftstream.launch.supervisor import Failure, Supervisor, default_spawner, worker_commands
from rftstream.launch.targets import Targets
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import is_light, open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.queries.curves.model_card import write_model_card
from rftstream.queries.datasets.taking import take_rollouts
from rftstream.queries.records.newest_samples import SampleTables
from rftstream.queries.state.disk import disk_bytes
from rftstream.runs.ending import RUN_LOG, note_ending, noting_failure
from rftstream.runs.folder import RunFolder, open_transport
from rftstream.runs.making.create import begin, discard
from rftstream.runs.making.elsewhere import TrainersElsewhere
from rftstream.runs.making.init_from import fetch_initial
from rftstream.runs.modules import changes_of_modules
from rftstream.runs.observer import Observer
from rftstream.service.control_view import ControlView
from rftstream.service.role import Log
from rftstream.trackers import Tracker, open_trackers, trackers_named
from rftstream.trackers.served import News
from rftstream.trackers.tracked import SampleTable, TrackedRun
from rftstream.transport.base import Transport

LOOK_EVERY_S = 0.1


class RunSession:
    """One session: from the start of a run's processes here to the end of the last one.

    A function of `start` holds the run's lock, makes one, and calls `run` once.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, options: SessionOptions) -> None:
        self._config = config
        self._folder = folder
        self._options = options
        self._progress: ProgressView | None = None
        self._trackers: list[Tracker] | None = None
        """The run's trackers. None until the log names the run."""
        self._untold: list[StepRecord | EvalResult] = []
        self._samples: SampleTables | None = None
        self._new_steps = 0
        self._has_begun = False
        """Whether workers may have begun. Signals are counted while they are at work, and not any more afterwards."""
        self._interrupts = 0
        self._signal = ""
        """Name of the last signal that interrupted the session."""
        self._is_answered = False
        self._paused: str | None = None
        """Line of who paused the run, as it was last noted; None if it goes on."""
        self._notes = notes_file(folder)
        self._stream = cast(TextIO, Onlooker(options.stream or sys.stdout, self._unshown))

    def run(self, *, new: bool, notes: Sequence[str] = ()) -> RunResult:
        """Supervise the run until its last process here has ended. `notes` are shown first."""
        try:
            with noting_failure(self._notes):
                for text in notes:
                    self.note(text)
                result = self._run(new=new)
            result = replace(result, disk_bytes=sum(disk_bytes(self._folder).values()))  # all have closed the log
            by = {"interrupted": self._signal, "failed": "error"}.get(result.reason, result.reason)
            note_ending(self._notes, by, result.error, result.exit_code)
            return result
        finally:
            for handler in self._notes.handlers:
                handler.close()

    def _run(self, *, new: bool) -> RunResult:
        transport: Transport | None = None
        spawner = self._options.spawner or default_spawner(self._folder.logs, self.note)
        supervisor = Supervisor(spawner, report=self.note, deadline_s=self._options.deadline_s)
        try:
            if new:
                fetch_initial(self._config, self._folder.model)
                take_rollouts(self._config, self._config.experts, self._folder.demonstrations)
            model = prepare_model(self._config.model, self._folder.model, self._config.run.seed)
            transport = open_transport(self._config, self._folder, create=new)
            if new:
                begin(transport, self._config, self._folder, say=self.note)
            commands = worker_commands(self._config, self._folder, model.folder)
            supervisor.start(
                commands,
                lock_holder=getattr(transport, "lock_holder", None),
                changes=lambda: changes_of_modules(self._config, self._folder),
            )
            result = self._see_to_its_end(supervisor, transport, model, new=new)
            has_data = result.version or any(transport.admin.end_offsets("rollouts").values())
            if new and result.exit_code and not has_data:
                discard(self._folder, transport)
            return result
        except KeyboardInterrupt:
            if new and transport is not None and not self._has_begun and self._folder.exists():
                discard(self._folder, transport)
            raise
        finally:
            supervisor.close()
            if transport is not None:
                transport.close()

    def _see_to_its_end(
        self, supervisor: Supervisor, transport: Transport, model: ModelSpec, *, new: bool
    ) -> RunResult:
        observer = Observer(transport, whole=any(trackers_named(self._config)))  # trackers get all steps
        renderer = open_renderer(model) if is_light(model) else None
        watch = Watch(self._config, transport, observer, supervisor.slots, folder=self._folder, renderer=renderer)
        self._samples = SampleTables(transport, renderer)
        self._progress = open_progress(self._options.progress, watch, self._stream)
        targets = Targets(self._folder.targets_file, self._folder.run_id)
        try:
            with self._signals():
                self._has_begun = True
                if not new:
                    watch.absorb(earlier := observer.catch_up())  # an earlier session has printed these
                    self._track(earlier, observer.control)
                elsewhere = TrainersElsewhere(self._config, observer.curve.settings)
                while not supervisor.all_left:
                    news = self._news(observer)
                    for line in elsewhere.news(observer.curve.settings):
                        self.note(line)
                    self._act_on_interrupts(supervisor)
                    supervisor.poll(observer.control, observer.curve.version)
                    self._progress.update(news)
                    self._note_pause(paused_line(watch))
                    targets.update(supervisor.slots)
                    self._track(news, observer.control)
                    transport.wait([observer.reader], LOOK_EVERY_S)
                self._progress.update(news := self._news(observer))
                self._track(news, observer.control)
        finally:
            if not supervisor.all_left:
                supervisor.kill()
            self._progress.close()
            targets.close(failed=observer.control.finished is None and not self._interrupts)
            self._close_trackers(ended=observer.control.finished is not None)
            observer.close()
        if observer.control.finished is not None:
            self._describe(transport, model, observer.control.finished)
        return self._result(observer, supervisor.failure)

    def _news(self, observer: Observer) -> list[StepRecord | EvalResult]:
        news = observer.poll()
        self._new_steps += sum(isinstance(one, StepRecord) for one in news)
        return news

    def _describe(self, transport: Transport, model: ModelSpec, finished: RunFinished) -> None:
        """Write the model card of the trained model again, since its last evaluation came after the card was first
        written."""
        if not self._folder.final.is_dir():
            return
        spec = trained_spec(self._config, model)
        try:
            write_model_card(Log(transport), self._config, spec, self._folder.final, finished.name.version)
        except (OSError, RftError) as error:  # the run has ended well all the same
            self.note(f"model card: {error}; the one that the trainer wrote stays")

    def _track(self, news: Sequence[StepRecord | EvalResult], control: ControlView) -> None:
        """Pass the news to the trackers. A tracker that fails is dropped: the log has everything, and a display must
        not end a run."""
        self._untold += news
        if self._trackers is None:
            if control.manifest is None:
                return
            self._trackers = self._open_trackers(control.manifest.created_at)
        told: list[News] = [*self._untold, *self._samples_for(self._untold)]
        self._untold = []
        for tracker in list(self._trackers):
            try:
                tracker.update(told)
            except Exception as error:
                self._trackers.remove(tracker)
                self.note(f"{type(tracker).__name__}: {error}; no longer written, `rftstream plot --tensorboard` does")

    def _samples_for(self, news: Sequence[StepRecord | EvalResult]) -> list[SampleTable]:
        if self._samples is None or not any(tracker.shows_samples for tracker in self._trackers or ()):
            return []
        try:
            return self._samples.take(news)
        except RftError:  # curves do not wait for a log that cannot be read now
            return []

    def _close_trackers(self, *, ended: bool) -> None:
        for tracker in self._trackers or ():
            try:
                tracker.close(ended=ended)
            except Exception as error:
                self.note(f"{type(tracker).__name__}: {error}; perhaps not all is there, but `rftstream plot` has it")

    def _open_trackers(self, created_at: float) -> list[Tracker]:
        run = TrackedRun(folder=self._folder.path, created_at=created_at, config=to_dict(self._config))
        try:
            return open_trackers(self._config, run, self.note)
        except Exception as error:
            self.note(f"trackers: {error}; none is written")
            return []

    def _act_on_interrupts(self, supervisor: Supervisor) -> None:
        if self._interrupts and not supervisor.stopping:
            self.note(
                f"stopping: {self._options.deadline_s:g} s to finish what is in hand; ctrl-C again ends it at once"
            )
            self._is_answered = True
            supervisor.stop()
        elif self._interrupts > 1 and not supervisor.killed:
            self.note("ended at once, as asked")
            supervisor.kill()

    def _result(self, observer: Observer, failure: Failure | None) -> RunResult:
        reason, exit_code = self._reason(observer.control, failure)
        error, began = failure.text if failure is not None else None, self._options.began
        return result_of(self._folder, observer, reason, exit_code, began, error, new_steps=self._new_steps)

    def _reason(self, control: ControlView, failure: Failure | None) -> tuple[str, int]:
        if control.finished is not None:
            return control.finished.reason, control.finished.exit_code or (failure.exit_code if failure else 0)
        if failure is not None:
            return "failed", failure.exit_code
        return ("interrupted", 0 if self._interrupts == 1 else 1) if self._interrupts else ("left", 1)

    def note(self, text: str) -> None:
        """Write a line to logs/run.log and show it in the progress view."""
        self._notes.warning(text)
        if self._progress is not None:
            self._progress.note(text)
        else:
            print(text, file=self._stream, flush=True)

    def _note_pause(self, paused: str | None) -> None:
        """Write to logs/run.log that the run was paused, and that it goes on; the progress view says so by itself."""
        if paused != self._paused:
            self._notes.info(paused or "not paused any more")
            self._paused = paused

    def _unshown(self, text: str) -> None:
        self._notes.warning(text)
        with suppress(OSError):
            print(f"rftstream: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Count ctrl-C and similar signals. Only the main thread can catch them.

        A second signal that comes before the first was handled counts as the same one, since the program that started
        this process (uv run, timeout) forwards it, too.
        """

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._interrupts = 2 if self._is_answered else 1
            self._signal = signal.Signals(signum).name

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


class _QuietHandler(logging.FileHandler):
    """A file handler that ignores a full disk: the note is still shown, though it is not saved."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # of opening the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the library calls it so
        pass


def notes_file(folder: RunFolder) -> logging.Logger:
    """Return the logger of logs/run.log, which holds the supervisor's messages."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    logger = logging.Logger("rftstream.run")  # one logger for each run, outside the tree that users configure
    handler = _QuietHandler(folder.logs / RUN_LOG, encoding="utf-8", delay=True)
    handler.setFormatter(TextFormatter("run"))
    logger.addHandler(handler)
    return logger
