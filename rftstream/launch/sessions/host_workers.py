"""The workers of a run on one host of several, started and started again without the run's supervisor.

`rftstream workers` calls it, and `rftstream launch ssh` starts that on every host. It starts again what dies, as `run`
does, but for one thing: a log that cannot be reached (exit 3) is tried again, since a fleet outlives its brokers.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from rftstream.config import log_users
from rftstream.config.sections import RunConfig
from rftstream.errors import ENDS_THE_RUN, ConfigError, TransportError
from rftstream.launch.host import Stop
from rftstream.launch.joining import WAIT_S, StoppedError, join, wait_until
from rftstream.launch.session_options import DEADLINE_S
from rftstream.launch.supervisor import Supervisor, default_spawner, worker_commands
from rftstream.launch.targets import Targets
from rftstream.preflight.plan import placed_here
from rftstream.runs.folder import RunFolder, open_transport
from rftstream.runs.making.elsewhere import TrainersElsewhere
from rftstream.runs.observer import Observer

LOOK_EVERY_S = 0.1
LOG_UNREACHED = 3


def run_workers(
    files: Sequence[Path],
    run_dir: Path | None,
    wanted: Mapping[str, int],
    *,
    name: str,
    say: Callable[[str], None],
    pid_file: Path | None = None,
    wait_s: float = WAIT_S,
) -> int:
    """Run workers until the run has ended or a signal comes, and return the exit code. `wanted`: role -> number of
    workers; `name`: part of the workers' names that no other host has; `pid_file`: removed at the end.
    """
    stop = Stop()
    try:
        config, folder = join(files, run_dir, role=next(iter(wanted)), wait_s=wait_s, stop=stop, say=say)
        with closing(open_transport(config, folder, user=log_users.READER)) as transport:
            observer = wait_until(lambda: Observer(transport), "the log", wait_s=wait_s, stop=stop, say=say)
            with closing(observer):
                return _supervise(config, folder, files, wanted, name, observer, stop, say, wait_s)
    except StoppedError:
        return 0
    finally:
        if pid_file is not None:
            pid_file.unlink(missing_ok=True)


def _supervise(
    config: RunConfig,
    folder: RunFolder,
    files: Sequence[Path],
    wanted: Mapping[str, int],
    name: str,
    observer: Observer,
    stop: Stop,
    say: Callable[[str], None],
    wait_s: float,
) -> int:
    def report(text: str) -> None:
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    folder.logs.mkdir(parents=True, exist_ok=True)  # the run may have been made on another host
    commands = [
        (role, replace(command, arguments=(*command.arguments, "--wait-s", f"{wait_s:g}")))
        for role, command in worker_commands(placed_here(config, wanted), folder, counts=wanted, host=name, files=files)
    ]
    locks = hold_names(folder.logs, [command.process for _, command in commands])
    supervisor = Supervisor(
        default_spawner(folder.logs, report), report=report, deadline_s=DEADLINE_S,
        ends_the_run=ENDS_THE_RUN - {LOG_UNREACHED},
    )  # fmt: skip
    elsewhere = TrainersElsewhere(config, observer.curve.settings)
    targets = Targets(folder.logs / f"targets-{name}.json", folder.run_id)
    try:
        supervisor.start(commands)
        report(f"workers of {folder.path}: {', '.join(slot.process for slot in supervisor.slots)}")
        while not supervisor.all_left:
            with suppress(TransportError):  # the workers notice it by themselves
                observer.poll()
                for line in elsewhere.news(observer.curve.settings):
                    report(line)
            if stop():
                supervisor.stop()
            supervisor.poll(observer.control, observer.curve.version)
            targets.update(supervisor.slots)
            time.sleep(LOOK_EVERY_S)
    finally:
        if not supervisor.all_left:
            supervisor.kill()
        targets.close(failed=observer.control.finished is None and not stop())
        supervisor.close()
        locks.close()
    if supervisor.failure is None:
        report("the run has ended" if observer.control.finished is not None else "all workers have left")
        return 0
    report(f"ended: {supervisor.failure.text}")
    return supervisor.failure.exit_code


def hold_names(logs: Path, names: Sequence[str]) -> ExitStack:
    """Hold the names of workers until the result is closed, or this process ends. ConfigError if another process holds
    one: two workers of a name write one file of logs, and one that leaves takes the other's port away."""
    with ExitStack() as held:
        for name in names:
            file = held.enter_context((logs / f"{name}.lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--name: {name} is at work here already, started by another `rftstream workers`; give these "
                    "another --name, or end that one first"
                ) from None
        return held.pop_all()
