"""All roles of a run in one process: a manual clock, an in-memory log, a seeded scheduler, faults between any steps.

Everything that could differ between two runs comes from the seed: the order of processes, the faults, the time until a
dead process starts again. The same seed gives the same log, record for record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random

from rftstream.config.sections import RunConfig
from rftstream.contracts.control import DesiredState, RunState
from rftstream.errors import ProducerLost, RftError, TransactionAborted, TransportError
from rftstream.queries.records.dead import read_dead, stored_rollouts
from rftstream.roles import role_specs
from rftstream.runs.services import build_service, role_context
from rftstream.runs.writes.requests import retry_request
from rftstream.service.role import Log
from rftstream.service.role_spec import RoleKind, RoleSpec
from rftstream.service.service import Service
from rftstream.testing.devices import MemoryDevice, MemoryLock
from rftstream.testing.faults import (
    AFTER_COMMIT,
    BETWEEN,
    FaultPlan,
    Faults,
    Kill,
    PowerLoss,
    joining_roles,
    role_names,
)
from rftstream.testing.foreign import ForeignWriter
from rftstream.testing.memory_run import START_TIME_S, Agenda, ManualClock, MemoryRun
from rftstream.testing.processes import SimulatedProcess

DRAIN_S = 30.0
"""Seconds for a process that was told to leave. After them it is killed."""

RESTARTED = {1}
"""Exit codes after which a supervisor starts a process again. After code 3 it ends the run, so a log that does not
answer for a moment must not lead to that code."""

TAKEN_OVER = 5

MAX_HELD = 2
"""Most processes that may be halted in the middle of a step at once, since each is a frame on Python's stack."""

SUMMARY_EVERY = 3
"""Records after which a topic gets a new summary: few, so that short runs also have many summaries."""

STORY_LINES = 60


class Simulation(MemoryRun):
    """A run with the config's number of workers for each role, and with your own `roles` beside them.

    A test makes it and calls `run`, or `step` by step. In between it may call `kill`, `pause` and similar methods.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        folder: Path,
        seed: int = 0,
        faults: Faults = Faults(),  # noqa: B008  # it is frozen
        restart_s: float = 1.0,
        tick_s: float = 0.001,
        watch: Callable[[], None] | None = None,
        roles: Sequence[RoleSpec] = (),
    ) -> None:
        """Make all processes. `tick_s` is the time by which each tick advances the clock. `watch` is called after every
        commit and every tick; its exception ends the simulation."""
        super().__init__(config, folder=folder, marks=True)
        self.seed = seed
        self.random = Random(seed)
        self.plan = FaultPlan(faults, self.random)
        self.watch = watch
        self.forgot: Callable[[], None] | None = None
        """Called after a power loss that lost a part of the log."""
        self.processes: list[SimulatedProcess] = []
        self.num_ticks = 0
        self.story: list[str] = []
        """Lines on unusual events, to be read when a seed fails."""
        self._restart_s = restart_s
        self._tick_s = tick_s
        self._seen_changes = 0
        self._agenda = Agenda()
        self.asked = DesiredState.running
        """State of the run that the user requested last."""
        self.faults = FaultInjector(self)
        self.log.fault = self.faults.at_producer
        self.store.fault = self.faults.at
        self.device = MemoryDevice()
        """The device of all processes, if they share one (`trainer.colocate`)."""
        self._own_roles = {spec.name: spec for spec in roles}
        for spec in roles:
            self.transport().admin.commit_initial(spec.name, spec.positions)
        for role, count in self._counts().items():
            for _ in range(count):
                self.add(role)

    def _counts(self) -> Mapping[str, int]:
        return {spec.name: spec.count(self.config) for spec in (*role_specs(), *self._own_roles.values())}

    # ------------------------------------------------------------------------------------------ driving

    def run(self, max_ticks: int = 30_000, until: Callable[[], bool] | None = None) -> None:
        """Step until every process has ended by itself (or `until` is true), or until one ends in a way that ends the
        run."""
        try:
            while self.failed is None and any(process.exit_code is None for process in self.processes):
                if until is not None and until():
                    return
                assert self.num_ticks < max_ticks, "the run does not end"
                self.step()
        except BaseException as error:
            error.add_note(self.to_text())
            raise

    @property
    def failed(self) -> SimulatedProcess | None:
        """Return the process whose exit code ends the run, or None."""
        return next((process for process in self.processes if process.exit_code not in (None, 0, TAKEN_OVER)), None)

    def step(self, until: float | None = None) -> None:
        """Do one tick of a process, which the seed chooses among the due ones. If none is due, advance the time (up to
        `until`)."""
        now = self.clock.now()
        for task in self._agenda.take_due(now):
            task()
        free = [process for process in self.processes if process.exit_code is None and not process.held]
        due = [one for one in free if one.wake_at <= now and one.paused_until <= now]
        if due:
            self._tick(self.random.choice(due))
            self.clock.advance(self._tick_s)
            return
        times = [max(one.wake_at, one.paused_until) for one in free] + self._agenda.times()
        if until is not None:
            times.append(until)
        self.clock.advance(min(times) - now + 1e-6)

    def add(self, role: str) -> SimulatedProcess:
        """Add one more process of the role, beside the live ones."""
        number = sum(process.role == role for process in self.processes)
        process = SimulatedProcess(f"{role}-{number}", role, wake_at=self.clock.now())
        self.processes.append(process)
        return process

    def find(self, name: str) -> SimulatedProcess:
        """Return the process of this name."""
        return next(process for process in self.processes if process.name == name)

    def kill(self, process: SimulatedProcess, reason: str = "killed") -> None:
        """Kill the process as by SIGKILL. It starts again some time later."""
        self.note(f"{process.name}: {reason}")
        self.end(process)

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` a number of seconds from now, as a user outside of the run. This caller has no faults."""

        def do() -> None:
            with self.faults.spared():
                what()

        self._agenda.add(self.clock.now() + seconds, do)

    def restart(self, process: SimulatedProcess) -> None:
        """Send the process a SIGTERM. It starts again some time after it has left."""
        if process.service is not None and process.leave_by is None:
            self.note(f"{process.name}: told to leave")
            process.service.drain()
            process.leave_by = self.clock.now() + DRAIN_S
            process.wake_at = self.clock.now()

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """Stop the process as by SIGSTOP, and continue it after a number of seconds."""
        self.note(f"{process.name}: stands still for {seconds:.1f} s")
        process.paused_until = self.clock.now() + seconds

    def ask(self, state: DesiredState) -> None:
        """Write a user's request for a state of the run."""
        self.asked = state
        self.note(f"the user: {state}")
        with self.faults.spared():
            self.put("control", RunState(state=state, by="user", since=self.clock.now()))

    # ------------------------------------------------------------------------------------------ processes

    def _tick(self, process: SimulatedProcess) -> None:
        self.num_ticks += 1
        with self.faults.befalling(process):
            try:
                if process.service is None:
                    self._start(process)
                if process.service is not None:
                    idle = process.service.tick()
                    process.wake_at = self.clock.now() + idle
                    self.faults.at(BETWEEN)
            except Kill as kill:
                self.kill(process, f"killed {kill}")
            except PowerLoss as loss:
                if self.faults.num_held:  # others are halted in the middle of a step, outside this one
                    raise
                self.faults.lose_power(loss)
            except RftError as error:
                self._failed(process, error)
        if process.service is not None:
            self._look_at_end(process, process.service)
        if process.service is None:
            self.device.ended(process.name)
        self._wake()
        if self.watch is not None:
            self.watch()

    def _start(self, process: SimulatedProcess) -> None:
        process.starts += 1
        try:
            context = role_context(
                config=self.config,
                folder=self.folder,
                transport=self.log.connect(process.name),
                clock=self.clock,
                process=f"{process.name}.{process.starts}",
                simulated=True,
                summary_every=SUMMARY_EVERY,
                own_store=self.store,
                open_lock=lambda _: MemoryLock(self.device, process.name),
            )
            process.service = build_service(self._own_roles.get(process.role, process.role), context)
        except TransportError:
            process.wake_at = self.clock.now() + 1.0

    def _look_at_end(self, process: SimulatedProcess, service: Service) -> None:
        leaving = process.leave_by is not None
        if service.done:
            service.close()
            # a process that leaves because the run is finished is not started again, told to leave or not
            if leaving and service.view.finished is None:
                self.end(process)
            else:
                process.service, process.exit_code = None, 0
        elif process.leave_by is not None and self.clock.now() > process.leave_by:
            service.close()
            self.end(process)

    def end(self, process: SimulatedProcess) -> None:
        """End the process without a shutdown. It starts again some time later."""
        self.device.ended(process.name)
        process.service, process.leave_by, process.paused_until = None, None, 0.0
        process.wake_at = self.clock.now() + self._restart_s * (0.5 + self.random.random())

    def _failed(self, process: SimulatedProcess, error: RftError) -> None:
        self.note(f"{process.name}: exit {error.exit_code}: {error}")
        if error.exit_code in RESTARTED:
            self.end(process)
        else:
            process.service, process.exit_code = None, error.exit_code

    def _wake(self) -> None:
        """End the waits of processes for which the log has new data, as `Transport.wait` does."""
        if self._seen_changes == self.log.num_changes:
            return
        self._seen_changes = self.log.num_changes
        now = self.clock.now()
        for other in self.processes:
            if other.service is None or other.held or other.paused_until > now or other.wake_at <= now:
                continue
            with self.log.changed:
                if any(source.has_data() for source in other.service.sources()):  # type: ignore[union-attr]
                    other.wake_at = now

    # ------------------------------------------------------------------------------------------ the story

    def note(self, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{_since_start(self.clock)} {what}")

    def to_text(self) -> str:
        """Return the events, and the state of every process."""
        states = [
            f"{process.name}: "
            + (
                f"ended with {process.exit_code}"
                if process.exit_code is not None
                else str(process.service.health())
                if process.service is not None
                else "not running"
            )
            for process in self.processes
        ]
        return "\n".join(
            [
                f"seed {self.seed}, {self.num_ticks} ticks, {_since_start(self.clock)} s",
                *self.story[-STORY_LINES:],
                *states,
            ]
        )


class FaultInjector:
    """Executes the faults of a simulation's plan, and the actions of users and foreign writers.

    `Simulation` makes it. Log and store call `at_producer` and `at` at each point of a possible fault. The fault
    happens to the process that is ticking.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._run = simulation
        self.current: SimulatedProcess | None = None
        """The process that faults befall now; None if they befall nobody."""
        self.num_held = 0
        """Number of processes that are halted in the middle of a step."""
        self._foreign = ForeignWriter(
            simulation.transport("somebody"), simulation.folder.run_id, Random(f"foreign {simulation.seed}")
        )

    @contextmanager
    def befalling(self, process: SimulatedProcess | None) -> Iterator[None]:
        """Direct the faults inside this block to `process`, or to no process."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before

    def spared(self) -> AbstractContextManager[None]:
        """Prevent faults inside this block, for actions from outside of the run."""
        return self.befalling(None)

    def at_producer(self, point: str, process: str) -> None:
        """Pass a point of this process's producer, if the process is the one that is ticking."""
        if self.current is None or process != self.current.name:  # the caller only reads
            return
        if point == AFTER_COMMIT and self._run.watch is not None:
            self._run.watch()
        self.at(point)

    def at(self, point: str) -> None:
        """Pass a point of a possible fault for the current process."""
        process = self.current
        if process is None:  # not a process of the run
            return
        match self._run.plan.draw(point, process.role):
            case "kills":
                raise Kill(point)
            case "pauses":
                seconds = 40 * self._run.random.random()
                self._run.pause(process, seconds)
                if point != BETWEEN:
                    self._hold(process, seconds, point)
            case "aborts":
                self._run.note(f"{process.name}: refused {point}")
                raise TransactionAborted(f"simulated: refused {point}")
            case "unknowns":
                self._run.note(f"{process.name}: a commit with an unknown result, {point}")
                raise ProducerLost("simulated: the result of the commit is unknown")
            case "silences":
                self._run.note(f"{process.name}: no answer, {point}")
                raise TransportError("simulated: no answer")
            case "restarts":
                self._run.restart(process)
            case "takeovers":
                singles = role_names(RoleKind.single)
                role = self._run.random.choice([other.role for other in self._run.processes if other.role in singles])
                self._run.note(f"{self._run.add(role).name}: started beside another")
            case "joins":
                self._run.note(f"{self._run.add(self._run.random.choice(joining_roles(self._run.config))).name}: joins")
            case "user_pauses" if self._run.asked is not DesiredState.draining:
                self._run.ask(DesiredState.paused)
                self._run.at(20 * self._run.random.random(), self._unpause)
            case "drains":
                self._run.ask(DesiredState.draining)
            case "retries":
                self._retry_dead()
            case "strangers":
                self._write_foreign()
            case "power_losses" | "whole_power_losses" as name:
                raise PowerLoss(point, whole=name == "whole_power_losses")

    def lose_power(self, loss: PowerLoss) -> None:
        """End all processes, and lose some of the newest transactions."""
        transactions = self._run.log.transactions
        num_kept = self._run.random.randint(transactions.num_durable, len(transactions.history))
        num_kept = transactions.num_durable if loss.whole else num_kept
        lost = len(transactions.history) - num_kept
        self._run.note(f"the power is lost {loss}, and {lost} transactions with it")
        for process in self._run.processes:
            if process.exit_code is None:
                self._run.end(process)
        self._run.log.lose_power(num_kept)
        if self._run.forgot is not None:
            self._run.forgot()
        if lost:
            self._run.ask(self._run.asked)  # the user sees that the request was lost

    def _hold(self, process: SimulatedProcess, seconds: float, point: str) -> None:
        """Halt the process in the middle of a step, while the others continue."""
        if self.num_held >= MAX_HELD:
            return
        until = self._run.clock.now() + seconds
        process.held = True
        self.num_held += 1
        try:
            while self._run.clock.now() < until:
                self._run.step(until)
        finally:
            self.num_held -= 1
            process.held = False
        self._run.note(f"{process.name}: goes on {point}")

    def _unpause(self) -> None:
        if self._run.asked is DesiredState.paused:
            self._run.ask(DesiredState.running)

    def _retry_dead(self) -> None:
        """Request, as a user, that up to four groups are put back: dead ones, and one that may not be dead."""
        with self.spared():
            log = Log(self._run.transport())
            groups = [group.group_id for group in read_dead(log, now=self._run.clock.now()).groups]
            chosen = self._run.random.sample(groups, min(3, len(groups)))
            tasks = self._run.records("tasks")
            if tasks:
                chosen.append((self._run.random.choice(tasks).header("group_id") or b"").decode())
            stored = stored_rollouts(log, chosen)
            expires_at = self._run.clock.now() + self._run.random.choice([1.0, 1000.0])
            self._run.note(f"the user: put back {', '.join(stored)}")
            for group, places in stored.items():
                self._run.put(
                    "control", retry_request(group, places if self._run.random.random() < 0.8 else (), expires_at)
                )

    def _write_foreign(self) -> None:
        """Write a record on a topic that belongs to another writer."""
        with self.spared():
            self._run.note(f"somebody: {self._foreign.write()}")


def _since_start(clock: ManualClock) -> str:
    return f"{clock.now() - START_TIME_S:9.3f}"
