"""Runs on a broker whose roles are driven in the test's own process, one after the other: the log is the real one, and
nothing waits for an interpreter to start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rftstream.clock import SystemClock
from rftstream.launch.start import reopen
from rftstream.roles import role_specs
from rftstream.runs.folder import RunFolder, open_transport, read_config
from rftstream.runs.making.create import write_config
from rftstream.runs.services import build_service, role_context
from rftstream.service.service import Service
from rftstream.testing.conformance_tests.bench import PATIENCE_S
from rftstream.testing.memory_run import ManualClock
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

IDLE_S = 0.03
"""Most seconds that are waited for records when no role has anything to do."""
TURN_S = 0.01


class RealClock(SystemClock):
    """Time passes for a driven run as it does here."""

    def advance(self, seconds: float) -> None:
        """It does so by itself."""


class Driven:
    """One process of a role, as far as the log can tell. `DrivenRun.start` makes it."""

    def __init__(self, run: DrivenRun, role: str, process: str) -> None:
        self.role = role
        self.transport = open_transport(run.config, run.folder, user=role)
        context = role_context(
            config=run.config, folder=run.folder, transport=self.transport, clock=run.clock, process=process,
            simulated=True,
        )  # fmt: skip
        self.service: Service = build_service(role, context)

    @property
    def done(self) -> bool:
        return self.service.done

    def die(self) -> None:
        """End without a word more: nothing that is in hand is finished, nothing is committed."""
        self.transport.close()

    def leave(self) -> None:
        """End as a process does."""
        self.service.close()
        self.transport.close()


class DrivenRun:
    """A run that `rftstream run --no-workers` has made, or any other of a folder. A test makes it, calls `play`, and
    `close` in the end; in between it may start, kill and stop roles."""

    def __init__(self, place: Workplace, path: str | Path, *, settings: Sequence[str] = ()) -> None:
        self.place = place
        self.folder = RunFolder(place.folder / path)
        self.config = read_config(self.folder, settings)
        self.clock: ManualClock | RealClock = ManualClock(time.time())
        self.workers: list[Driven] = []

    @classmethod
    def make(
        cls, place: Workplace, name: str, servers: str | None, *settings: str, text: str | None = None, more: str = ""
    ) -> DrivenRun:
        """Make the run of this name, of FAKE or another `text` with these settings; `more` stands below `[transport]`.
        Without `servers` its log is an embedded one."""
        named = FAKE.replace('"tiny"', f'"{name}"') if text is None else text.replace("{name}", name)
        kind = "" if servers is None else f'kind = "kafka"\nservers = "{servers}"\n'
        place.write("tiny.toml", named + kind + more)
        made = place.look("run", "tiny.toml", "--no-workers", *sets(*settings))
        assert made.code == 0, made.err
        return cls(place, f"runs/{name}")

    @property
    def view(self) -> RunView:
        return self.place.view(self.folder.path)

    def start(self, role: str, process: str = "") -> Driven:
        """Start one more process of the role."""
        self.workers.append(Driven(self, role, process or f"{role}-{len(self.workers)}"))
        return self.workers[-1]

    def start_all(self, *without: str) -> None:
        """Start as many processes of each role as the config says."""
        for spec in role_specs():
            for _ in range(spec.count(self.config) if spec.name not in without else 0):
                self.start(spec.name)

    def kill(self, worker: Driven) -> None:
        self.workers.remove(worker)
        worker.die()

    def stop(self, worker: Driven) -> None:
        """Let it finish what it has in hand, and leave."""
        worker.service.drain()
        self.play(lambda: worker.done)
        self.workers.remove(worker)
        worker.leave()

    def play(self, until: Callable[[], bool] | None = None) -> None:
        """Let all roles work in turns, until all have ended by themselves or `until` is true."""
        patience = time.monotonic() + PATIENCE_S
        while not (until() if until is not None else all(one.done for one in self.workers)):
            assert time.monotonic() < patience, [one.service.health() for one in self.workers]
            self.turn()

    def turn(self) -> None:
        """One slice of work of each role, in TURN_S of their clock: how long it takes here tells them nothing."""
        self.clock.advance(TURN_S)
        idle_s = [one.service.tick() for one in self.workers if not one.done]
        if idle_s and min(idle_s) > 0:
            open_ones = [one for one in self.workers if not one.done]
            if open_ones:
                open_ones[0].service.wait(min(*idle_s, IDLE_S))

    def close(self) -> None:
        """Let all leave."""
        while self.workers:
            self.workers.pop().leave()

    def to_the_end(self, *without: str, is_alone: bool = True) -> Any:
        """Start all roles, play to the end, and return the audit's report, which is fine."""
        try:
            self.start_all(*without)
            self.play()
        finally:
            self.close()
        return self.view.assert_nothing_lost(is_alone=is_alone)

    def resume(self, *settings: str) -> None:
        """Go on with it, as `rftstream resume` does before it starts processes."""
        config = read_config(self.folder, settings)
        transport = open_transport(config, self.folder)
        try:
            reopen(transport, self.folder, self.config, config)
        finally:
            transport.close()
        write_config(config, self.folder)
        self.config = config
