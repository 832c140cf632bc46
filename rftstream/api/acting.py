"""Starts, stops and continues a run, and makes other runs of it, as the commands do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rftstream.api.reports import RunReports
from rftstream.api.versions import RunVersion
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError, RftError
from rftstream.launch import start
from rftstream.launch.result import RunResult
from rftstream.launch.sessions.replay_into import Replay
from rftstream.launch.sessions.rescore import rescore
from rftstream.launch.start import Settings, as_sets
from rftstream.preflight.plan import Purpose, plan
from rftstream.queries.decisions.comparison import Comparison, compare
from rftstream.replay.again import ReplayReport, replay
from rftstream.runs.folder import OpenRun, lies_in_folder
from rftstream.service.control_view import ControlReader

POLL_S = 0.1


class RunActions(RunReports):
    """Methods that start, stop and continue a run, or make others of it. `Run` is one."""

    _process: subprocess.Popen[bytes] | None = None
    """The supervisor that `start` has started."""

    def version(self, number: int | None = None) -> RunVersion:
        """Return a published version, by default the newest. ConfigError if its weights are not held any more."""
        return RunVersion(self._index.run, number)

    def start(self, *, set: Settings = ()) -> None:  # noqa: A002  as the option of the commands
        """Continue the run in processes of its own, and return once it is live, as `rftstream resume` in another
        terminal would. `set` changes settings. ConfigError if it is live, or has nothing left to do."""
        self._check_is_here()
        if self._index.run.folder.is_live():
            raise ConfigError(f"{self._index.run.folder.path}: this run is live already; stop it first")
        words = [word for one in as_sets(set) for word in ("--set", one)]
        command = [sys.executable, "-m", "rftstream", "resume", str(self._index.run.folder.path), "--progress", "none"]
        control = ControlReader(self._index.run.transport)
        with tempfile.TemporaryFile() as said:  # a pipe would hold up a supervisor that says much
            process = subprocess.Popen(
                [*command, *words], stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
            )
            while process.poll() is None and not (self._index.run.folder.is_live() and control.read().finished is None):
                time.sleep(POLL_S)
            if process.poll():
                said.seek(0)
                raise _error_of(process.returncode, said.read().decode(errors="replace"))
        self._process = process

    def stop(self) -> None:
        """Stop the run cleanly, as ctrl-C does: what is in progress is finished or saved. Return once it has stopped.
        `start` or `resume` continues it. ConfigError if nobody runs it on this host."""
        folder = self._index.run.folder
        if not folder.is_live():
            raise ConfigError(f"{folder.path}: this run is not live on this host, expected one that can be stopped")
        os.kill(int(folder.lock_file.read_text()), signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        """Return once nobody runs the run on this host any more."""
        while self._index.run.folder.is_live():
            time.sleep(POLL_S)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def resume(self, *, set: Settings = (), progress: str = "auto") -> RunResult:  # noqa: A002
        """Continue the run to its end, and return how it ended, as `rftstream resume` does. `set` changes settings.
        `progress`: auto, live, plain or none."""
        self._check_is_here()
        return start.resume(self._index.run.folder.path, sets=as_sets(set), progress=progress)

    def rescore(
        self,
        reward: str | None,
        into: str | Path,
        *,
        set: Settings = (),  # noqa: A002
        new_answers: bool = False,
    ) -> Comparison:
        """Score the rollouts again with another reward, into a new run, and compare both, as `rftstream rescore` does.
        `reward`: a built-in one, module:function, or `feedback`: people's; None: the run's own, mended.
        `new_answers`: by the answers and columns that the data has by now."""
        sets = as_sets(set)
        new = rescore(self._as_it_is(), Path(into), reward=reward, sets=sets, say=_say, new_answers=new_answers)
        with closing(new.transport):
            return compare(self._index.run.transport, new.transport)

    def replay(self, first: int = 0, last: int | None = None, *, device: str | None = None) -> ReplayReport:
        """Train the recorded batches again and compare every digest, as `rftstream replay` does; `equal` says whether
        all are the same."""
        return replay(self._planned(), first=first, last=last, device=device)

    def replay_into(
        self,
        into: str | Path,
        first: int = 0,
        last: int | None = None,
        *,
        set: Settings = (),  # noqa: A002
        without: Sequence[str] = (),
        progress: str = "auto",
        scorer: str = "",
    ) -> RunResult:
        """Train the recorded batches under other settings into a new run, as `rftstream replay --into` does. `without`:
        rollouts or groups to leave out, or `feedback`. `scorer`: the version of the reward whose verdicts count alone:
        `newest`, or its beginning."""
        branch = Replay(
            self._planned(), Path(into), sets=as_sets(set), first=first, last=last, without=without, scorer=scorer
        )
        branch.prepare(_say)
        return branch.train(progress=progress)

    def _planned(self) -> OpenRun:
        run = self._as_it_is()
        return replace(run, config=plan(run.config, Purpose.join, role=RoleName.trainer).config)

    def _check_is_here(self) -> None:
        """Raise ConfigError if this host has neither the run's folder nor its log."""
        if not self._index.run.folder.exists() and lies_in_folder(self._index.run.config):
            raise ConfigError(f"{self._index.run.folder.path}: the run's folder is gone")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _error_of(code: int, said: str) -> RftError:
    """Return the error of a command that has ended with this exit code, with its sentence."""
    lines = [line for line in said.splitlines() if line.startswith("rftstream: ")] or said.splitlines()[-1:]
    text = (lines or [f"rftstream resume exited with {code}"])[-1].removeprefix("rftstream: ")
    return ConfigError(text) if code == ConfigError.exit_code else RftError(text)
