"""A process of one role: logs, port, signals, limits, and the loop that ticks the service until it is done.

SIGTERM, SIGINT finish work in progress within a deadline, exit 0; a second signal: exit at once the end of the
supervisor is the end of its workers
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rftstream import faults, metrics
from rftstream.clock import SystemClock
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.desk import Desk
from rftstream.errors import PositionMissing, RftError, TransportError, exit_code_of
from rftstream.launch import logging as logs
from rftstream.launch.health import Health, HealthServer, trained_again
from rftstream.launch.joining import WAIT_S, FilesAsRead, StoppedError, join, wait_until
from rftstream.launch.log_watch import LogWatch
from rftstream.launch.processes import die_with_parent, is_orphan
from rftstream.models.device_lock import FileLock
from rftstream.preflight.plan import Purpose, plan
from rftstream.roles import role_spec
from rftstream.roles.build import role_builder
from rftstream.runs.folder import (
    RunFolder,
    open_transport,
)
from rftstream.runs.log_settings import explained
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.records.losses import check_beginnings
from rftstream.transport.base import Transport

if TYPE_CHECKING:
    from rftstream.contracts.control import RunManifest
    from rftstream.runs.making.elsewhere import FilesHere
    from rftstream.service.service import Service

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""Seconds that a worker may take to finish its work in progress."""
SAME_S = 5.0
"""Seconds after the first signal in which a SIGTERM counts as the same."""
LONGEST_WAIT_S = 0.5
"""Most seconds of one wait for records. Between two waits the worker checks signals and its supervisor."""
COLLECT_EVERY = 20_000
"""Objects that a worker makes and keeps before Python searches them for cycles. With Python's default, 700, the search
took a tenth of the time of an explorer whose agents make many calls, and of a buffer of short rollouts. A trainer gains
nothing."""
_HEALTH_S = 1.0
_MEASURE_S = 5.0
_LAST_RESORT_S = 10.0


class Stop:
    """The request to leave, by SIGTERM or SIGINT. `run_worker` makes it, which installs the handlers. A second signal
    ends the process at once, but for a SIGTERM right after the first: srun and timeout pass on what their sender told
    the worker, too."""

    loading = False
    """Whether the process has nothing in hand and asks nobody for a while, as it loads modules and a model: minutes on
    a busy machine. Then a signal ends it at once, with exit 0."""

    def __init__(self) -> None:
        self._requested = False
        self._first_at = 0.0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.loading:
            log.info("left: stopped while it was loading")
            os._exit(0)
        if not self._requested:
            self._requested, self._first_at = True, time.monotonic()
        elif signum != signal.SIGTERM or time.monotonic() - self._first_at > SAME_S:
            os._exit(128 + signum)

    def __call__(self) -> bool:
        """Return whether a signal has come."""
        return self._requested


def run_worker(
    files: Sequence[Path],
    run_dir: Path | None,
    role: str,
    *,
    say: Callable[[str], None],
    process: str | None = None,
    metrics_port: int | None = None,
    device: str | None = None,
    deadline_s: float = DEADLINE_S,
    wait_s: float = WAIT_S,
    parent: int | None = None,
) -> int:
    """Run one worker of a run until it leaves, and return its exit code. `join` finds the run.

    A worker with a supervisor (`parent`) logs only to stderr, which goes to its file. `say` gets messages until logging
    is set up. TransportError if there is no such run within `wait_s`.
    """
    if parent is not None:
        die_with_parent(parent)
    stop = Stop()
    role_builder(role)  # an unknown role is an error before any wait
    as_read = FilesAsRead(files)
    try:
        config, folder = join(files, run_dir, role=role, wait_s=wait_s, stop=stop, say=say)
    except StoppedError:
        return 0
    stop.loading = True
    if stop():
        return 0
    process = process or f"{role}-{socket.gethostname().partition('.')[0]}-{os.getpid()}"
    own_file = folder.logs / f"{process}.log" if parent is None else None
    logs.setup(process, level=config.log.level, form=config.log.format, file=own_file)
    config = plan(config, Purpose.join, role=role).config
    worker = Worker(
        config=config,
        folder=folder,
        role=role,
        process=process,
        device=device,
        stop=stop,
        deadline_s=deadline_s,
        wait_s=wait_s,
        parent=parent,
        as_read=as_read,
    )
    try:
        faults.arm(role, folder.logs / "faults")
        worker.run(metrics_port)
    except StoppedError:
        return 0
    except RftError as error:
        log.error("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        return error.exit_code
    except Exception as error:
        log.exception("%s", type(error).__name__ + (f": {error}" if str(error) else ""))
        return exit_code_of(error)
    return 0


@dataclass(eq=False, slots=True, kw_only=True)
class Worker:
    """A worker, from the time its run is found until it leaves. `run_worker` makes it and calls `run` once; a joined
    loop does so in a thread of the user's process."""

    config: RunConfig
    folder: RunFolder
    role: str
    process: str
    device: str | None
    stop: Callable[[], bool]
    """Says whether the worker is to leave."""
    deadline_s: float
    wait_s: float
    parent: int | None
    as_read: FilesAsRead = field(default_factory=lambda: FilesAsRead(()))
    desk: Desk | None = None
    """The desk of a joined loop. The process then belongs to its user, and the worker changes nothing else in it."""
    after_tick: Callable[[Service], None] = lambda service: None
    health: Health = field(default_factory=Health, init=False)
    serves: bool = field(default=False, init=False)
    """Whether it serves /metrics."""
    health_at: float = field(default=0.0, init=False)
    measured_at: float = field(default=-_MEASURE_S, init=False)
    log_watch: LogWatch | None = field(default=None, init=False)
    """Checks the settings of the topics in a thread of its own."""

    def run(self, metrics_port: int | None) -> None:
        with ExitStack() as stack:
            if (server := self._serve_health(metrics_port)) is not None:
                stack.callback(server.close)
            self.serves = server is not None
            transport = stack.enter_context(closing(open_transport(self.config, self.folder, user=self.role)))
            try:
                self._run_service(transport)
            except PositionMissing as error:
                reads = role_spec(self.role).reads(self.config)
                raise explained(error, transport, self.config, self.folder.run_id, reads) from None

    def _serve_health(self, port: int | None) -> HealthServer | None:
        if port is None:
            return None
        host = "" if port else "127.0.0.1"  # port 0 is for this machine's own tools
        file, registry = self.folder.logs / f"{self.process}.port", metrics.OfRun(self.folder.run_id)
        server = HealthServer(self.health, port=port, host=host, file=file, registry=registry)
        log.info("serving /metrics and /health", extra={"port": server.port})
        return server

    def _run_service(self, transport: Transport) -> None:
        from rftstream.runs.making.elsewhere import FilesHere

        def control() -> ControlView:
            check_beginnings(transport, self.folder.run_id, ("control",))
            return read_control(transport)

        if role_spec(self.role).makes_the_run:  # this role compares the whole manifest itself
            (manifest,) = self._until(lambda: (control().manifest,), "the log")
            if manifest is not None:
                self._prepare(manifest)
        else:
            manifest = self._until(lambda: control().manifest, "the run's first record (is a feeder alive?)")
            self._check(manifest)
        files = None
        if manifest is not None and not self.folder.exists():
            files = FilesHere(self.role, transport, self.config, self.folder.run_id, log.warning)
            self._check_files(files)
        while not self._serve(transport, files):
            assert files is not None
            self._check_files(files)
        log.info("left: %s", "stopped" if self.stop() else "the run is finished")

    def _serve(self, transport: Transport, files: FilesHere | None) -> bool:
        """Do the role's work until the worker leaves. Return False if it is only to wait for another trainer, since
        the run scores otherwise than its `files`."""
        from rftstream.roles.build import role_builder, service_of
        from rftstream.runs.services import role_context

        context = role_context(
            config=self.config,
            folder=self.folder,
            transport=transport,
            clock=SystemClock(),
            process=self.process,
            device=self.device,
            open_lock=partial(FileLock, look=self._look),
            desk=self.desk,
        )
        role = role_builder(self.role)(context)
        if isinstance(self.stop, Stop):
            self.stop.loading = False
        close = role.step.close
        try:
            service = self._until(lambda: service_of(role, context), "the log")
            close = service.close
            log.info("started", extra={"role": self.role, "pid": os.getpid()})
            if self.role != RoleName.trainer and self.desk is None:
                calm_collector()
            self.log_watch = LogWatch(self.config, self.folder.run_id, role.spec)
            self.log_watch.start(lambda: open_transport(self.config, self.folder, user=self.role))
            return self._loop(service, files)
        finally:
            if self.log_watch is not None:
                self.log_watch.close()
            _close(close)

    def _prepare(self, manifest: RunManifest) -> None:
        """Make the run's model if this machine does not have it, in the same way as the run's start made it."""
        from rftstream.models.folders.made import make_as_recorded

        make_as_recorded(self.config.model, self.folder.model, self.config.run.seed, manifest.digests)

    def _check(self, manifest: RunManifest) -> None:
        """Raise ConfigError if the worker was started with other settings than the run."""
        from rftstream.models.folders.folder import prepare_model
        from rftstream.runs.manifest import check_worker, digests_for

        self._prepare(manifest)
        config, folder = self.config, self.folder.model
        used = digests_for(self.role, config, lambda: prepare_model(config.model, folder, config.run.seed))
        check_worker(manifest, config, used)

    def _check_files(self, files: FilesHere) -> None:
        """Wait until the run is scored as these files say, or begin anew with what they say by now. ConfigError if it
        is not, or would end by them."""

        def ready() -> tuple[list[str]] | None:
            if (lines := files.differences()) is not None:
                return (lines,)
            if self.as_read.have_changed():
                self._begin_anew("the run files have changed: begins anew with them")
            self.health.update({"process": self.process, "role": self.role, "state": f"waiting for {what}"})
            return None

        what = "a trainer with the rewards of these run files"

        try:
            (lines,) = self._until(ready, what)
        except TransportError:
            files.refuse()
            raise
        for line in lines:
            log.warning("works by the run files of this host, which differ from the run's settings: %s", line)

    def _begin_anew(self, why: str) -> None:
        """Let another process go on in the place of this one, with nothing of the settings of before."""
        if self.parent is not None:
            raise RftError(why)  # the supervisor starts it again: this process is a fork, without a command of its own
        log.info("%s", why)
        begin_anew()

    def _loop(self, service: Service, files: FilesHere | None) -> bool:
        """Let the service work until it is done, or the deadline of a signal is over. Return False if it has left its
        work only since the run scores otherwise than its `files`."""
        deadline: float | None = None
        outdated = False
        while not service.done:
            if self.stop() and deadline is None:
                log.info("stopping: finishing what is in hand", extra={"deadline_s": self.deadline_s})
                deadline = time.monotonic() + self.deadline_s
                if self.desk is None:
                    _end_after(self.deadline_s + _LAST_RESORT_S)
                service.drain()
                continue
            if deadline is not None and time.monotonic() > deadline:
                again = trained_again(service.health())
                log.warning("not finished within %g s; a successor does the rest%s", self.deadline_s, again)
                return True
            if files is not None and not outdated:
                with contextlib.suppress(TransportError):  # the next look will tell
                    outdated = files.are_outdated(service.view.claims)
                if outdated:
                    service.drain()
            idle_s = service.tick()
            self.after_tick(service)
            self._beat(service)
            if idle_s > 0 and not service.done:
                service.wait(min(idle_s, LONGEST_WAIT_S))
            self._check_parent()
        return not outdated or deadline is not None

    def _look(self) -> None:
        """Check that there is still a reason to wait for a device. StoppedError if not."""
        self.health.beat()
        if self.stop():
            raise StoppedError
        self._check_parent()

    def _check_parent(self) -> None:
        if is_orphan(self.parent):
            raise RftError("supervisor: it is gone, expected it to outlive its workers; `rftstream resume` goes on")

    def _beat(self, service: Service) -> None:
        self.health.beat()
        if (now := time.monotonic()) - self.health_at >= _HEALTH_S:
            self.health_at = now
            self.health.update({**service.health(), **({} if self.desk is None else {"joined": True})})
        if self.serves and now - self.measured_at >= _MEASURE_S:
            self.measured_at = now
            with contextlib.suppress(TransportError):  # the loop notices it by itself, and reports it
                service.measure()
        if self.log_watch is not None:
            self.log_watch.act(service)

    def _until(self, ready: Callable[[], Any], what: str) -> Any:
        """Wait until `ready`, with a message every few seconds. TransportError if it takes too long."""
        return wait_until(ready, what, wait_s=self.wait_s, stop=self.stop, say=log.info, beat=self.health.beat)


def begin_anew() -> None:
    """Run this process's command again in its place, so that nothing of the settings of before is left."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def calm_collector() -> None:
    """Make Python's cycle collector check only objects made from now on, and less often. A worker calls this once its
    modules, parts and model are loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except RftError as error:
        log.warning("leaving: %s", error)


def _end_after(seconds: float) -> None:
    """End this process after a number of seconds, even if a slice of work has not ended. The worker's successor repeats
    that work."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
