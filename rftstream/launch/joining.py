"""What a worker does before its loop: it waits for a log, and finds its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError, LogRefused, TransportError
from rftstream.runs.folder import (
    RunFolder,
    candidates,
    check_store_is_reached,
    lies_in_folder,
    names_on_log,
    open_transport,
    read_config,
)
from rftstream.service.control_view import read_control

WAIT_S = 120.0
"""Seconds that a worker waits for the run to exist."""
_NEED_WEIGHTS = frozenset({RoleName.explorer, RoleName.evaluator, RoleName.synthesiser, RoleName.trainer})
_LOOK_S = 0.05
_LONGEST_LOOK_S = 0.4
_SAY_S = 5.0


class StoppedError(Exception):
    """A signal came before the worker had any work in progress."""


class FilesAsRead:
    """The texts of a worker's run files at its start."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._texts = self._read()

    def have_changed(self) -> bool:
        """Return whether the files say something else by now, and can be read."""
        if self._read() == self._texts:
            return False
        with suppress(ConfigError):
            loader.load(self._files)
            return True
        return False

    def _read(self) -> list[bytes]:
        return [file.read_bytes() if file.is_file() else b"" for file in self._files]


def join(
    files: Sequence[Path],
    run_dir: Path | None,
    *,
    role: str,
    wait_s: float,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> tuple[RunConfig, RunFolder]:
    """Wait for the run of a worker of this role, and return its folder and the config that it was started with.

    StoppedError if a signal comes first.
    """
    if run_dir is None and len(files) == 1 and RunFolder(files[0].parent).lock_file.is_file():
        run_dir = files[0].parent  # the run's own config.toml means this run, not a run of the file

    def ready() -> tuple[RunConfig, RunFolder] | None:
        if run_dir is not None:
            folder = RunFolder(run_dir.resolve())
            return (read_config(folder), folder) if folder.exists() else None
        config = loader.load(files)
        return _newest_open_run(config, role)

    what = f"a run in {run_dir}" if run_dir is not None else f"a run of {', '.join(map(str, files))}{_sought(files)}"
    found: tuple[RunConfig, RunFolder] = wait_until(ready, what, wait_s=wait_s, stop=stop, say=say)
    if role in _NEED_WEIGHTS:
        check_store_is_reached(*found)
    return found


def _sought(files: Sequence[Path]) -> str:
    """Return where the runs of these files are looked for: a worker whose file has another log waits in vain."""
    config = loader.load(files)
    there = "" if lies_in_folder(config) else f" and at {config.transport.servers}"
    return f" under {Path(config.base) / config.run.folder}{there} ({config.transport.kind} log)"


def _newest_open_run(config: RunConfig, role: str) -> tuple[RunConfig, RunFolder] | None:
    """Return the newest run that has not finished. After a finished run a new one is about to start. A run that was
    started on another host is joined with the run file here as its config."""
    if not (folders := candidates(config, user=role)):
        if names := names_on_log(config, user=role):
            raise TransportError(f"none is called {config.run.name!r}; runs there: {', '.join(sorted(names)[:8])}")
        return None
    newest = folders[-1]
    ours = read_config(newest) if newest.exists() else config
    if newest.is_live():
        return ours, newest
    with closing(open_transport(ours, newest, user=role)) as transport:
        if read_control(transport).finished is None:
            return ours, newest
    raise TransportError(f"{newest.run_id} has ended, and no other run of these files has begun")


def wait_until(
    ready: Callable[[], Any],
    what: str,
    *,
    wait_s: float,
    stop: Callable[[], bool],
    say: Callable[[str], None],
    beat: Callable[[], None] = lambda: None,
) -> Any:
    """Return the first true value of `ready`. Retriable errors of `ready` are waited out. TransportError after
    `wait_s`."""
    began = said = time.monotonic()
    pause_s, told = _LOOK_S, ""
    while True:
        beat()
        trouble = ""
        try:
            if result := ready():
                return result
        except TransportError as error:
            if not error.retriable or isinstance(error, LogRefused):
                raise
            trouble = f" ({error})"
        if stop():
            raise StoppedError
        now = time.monotonic()
        if now - began >= wait_s:
            raise TransportError(f"waited {wait_s:g} s for {what}{trouble}; start `rftstream run`, or give --wait-s")
        if now - said >= _SAY_S:
            said = now
            say(f"waiting for {what}{'' if trouble == told else trouble}: {now - began:.0f} s of {wait_s:g}")
            told = trouble
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
