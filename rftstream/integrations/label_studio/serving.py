"""The bridge's process: it makes rounds until it is stopped, and waits while a side cannot be reached."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rftstream import faults
from rftstream.errors import ConfigError, LabelStudioError, ProducerLost, TransportError
from rftstream.integrations.label_studio.bridge import Bridge, RoundReport
from rftstream.integrations.label_studio.bridged_run import BridgedRun
from rftstream.integrations.label_studio.client import LabelStudio, PersonalToken
from rftstream.launch.health import Health, HealthServer
from rftstream.runs.folder import RunFolder, open_run

log = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0
"""Most seconds between two rounds while a side cannot be reached."""


def run_once(run: Path, *, url: str, token: PersonalToken, timeout_s: float, source: str) -> RoundReport:
    """Make one round. LabelStudioError or TransportError if a side cannot be reached."""
    side = BridgedRun(open_run(run), source)
    with contextlib.closing(side), _alone(side.run.folder, source):
        side.begin()
        return Bridge(side, LabelStudio(url, token, timeout_s=timeout_s)).round()


def serve(
    run: Path,
    *,
    url: str,
    token: PersonalToken,
    timeout_s: float,
    source: str,
    every_s: float,
    host: str,
    port: int | None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Make rounds until SIGTERM or SIGINT. `port` serves /livez. `ready` is called with that address, or with an empty
    text. ConfigError if the token is refused."""
    health, ended = Health(), threading.Event()
    server = LabelStudio(url, token, timeout_s=timeout_s)
    token.read()  # report a bad token at once

    def end(*_: object) -> None:
        ended.set()
        server.cancel()  # not in the middle of a commit to the log

    side = BridgedRun(open_run(run), source)
    faults.arm("label-studio", side.run.folder.logs / "faults")
    with contextlib.closing(side), _alone(side.run.folder, source), contextlib.ExitStack() as stack:
        address = ""
        if port is not None:
            served = HealthServer(health, port=port, host=host, option="--port")
            stack.callback(served.close)
            address = f"http://{host}:{served.port}/livez"
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, end)
        if side.run.config.feedback is None:
            log.warning("%s: the run file has no [feedback], so nobody is asked anything", run)
        ready(address)
        make_rounds(side, Bridge(side, server, beat=health.beat), health, ended, every_s)


def make_rounds(side: BridgedRun, bridge: Bridge, health: Health, ended: threading.Event, every_s: float) -> None:
    """Make rounds until `ended` is set, with longer and longer pauses while they fail."""
    has_begun, failures, trouble = False, 0, ""
    while not ended.is_set():
        before, trouble = trouble, ""
        try:
            if not has_begun:
                side.begin()
                has_begun = True
            report = bridge.round()
            health.update(report.to_json())
            if report.did_something:
                log.info("%s", report.to_text())
        except ProducerLost as error:  # the votes may have been written or not: only the log can tell
            has_begun, trouble = False, f"{error}; another bridge may work on this run"
        except (LabelStudioError, TransportError) as error:
            trouble = str(error)
        if ended.is_set():
            return
        if trouble != before:
            log.log(logging.WARNING if trouble else logging.INFO, "%s", trouble or "all can be reached again")
        failures = failures + 1 if trouble else 0
        pause_s = min(max(MAX_PAUSE_S, every_s), every_s * 2 ** min(failures, 10))
        health.beat()
        ended.wait(pause_s * random.uniform(0.5, 1.0) if failures else every_s)


@contextlib.contextmanager
def _alone(folder: RunFolder, source: str) -> Iterator[None]:
    """Keep a second bridge on this machine away. The log fences bridges on other machines."""
    path = folder.index / f"label-studio-{source}.lock"
    try:
        folder.index.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # the folder cannot be written, and the bridge can do without the lock
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path}: another bridge to Label Studio works on this run, expected one; end it first, or give each "
                "server a --source of its own"
            ) from None
        yield
    finally:
        os.close(descriptor)
