"""All roles of a run in one process: a manual clock, an in-memory log, a seeded scheduler, faults between any steps.

Everything that could differ between two runs comes from the seed: which process goes next, what goes wrong when, how
long a dead one stays away. The same seed gives the same log, record for record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rftstream.config.sections import RunConfig
from rftstream.contracts.control import DesiredState, RunState
from rftstream.errors import ProducerLost, RftError, TransactionAborted, TransportError
from rftstream.queries.dead import read_dead, stored_rollouts
from rftstream.roles import role_specs
from rftstream.runs.requests import retry_request
from rftstream.runs.services import build_service
from rftstream.service.role import Log
from rftstream.service.role_spec import RoleKind, RoleSpec
from rftstream.service.service import Service
from rftstream.testing.faults import AFTER_COMMIT, BETWEEN, FaultPlan, Faults, Kill, PowerLoss
from rftstream.testing.foreign import ForeignWriter
from rftstream.testing.memory_run import START_TIME_S, MemoryRun

DRAIN_S = 30.0
"""For a process that was told to leave; then it is ended as it is."""

RESTARTED = {1}
"""Exit codes after which a supervisor starts a process again. Of 3 it makes the end of the run: a log that does not
answer for a moment must not lead to it."""

TAKEN_OVER = 5

MAX_HELD = 2
"""Processes that may stand still in the middle of a step at once: each is a frame on Python's stack."""

STORY_LINES = 60


@dataclass(slots=True)
class SimulatedProcess:
    name: str
    role: str
    service: Service | None = None
    wake_at: float = 0.0
    """Earliest time of its next tick, or of its start if it is not running."""
    paused_until: float = 0.0
    held: bool = False
    """Stands still in the middle of a step."""
    leave_by: float | None = None
    """It was told to leave, and is ended then."""
    starts: int = 0
    exit_code: int | None = None
    """Set once it has ended for good."""


class Simulation(MemoryRun):
    """A run with as many workers of each role as the config says, and of your own `roles` beside them."""

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
        """`tick_s`: how far each tick moves the clock. `watch` is called after every commit and every tick; what it
        raises ends the simulation."""
        super().__init__(config, folder=folder, marks=True)
        self.seed = seed
        self.random = Random(seed)
        self.log.fault = self._at_producer
        self.store.fault = self._at
        self.plan = FaultPlan(faults, self.random)
        self.watch = watch
        self.forgot: Callable[[], None] | None = None
        """Called when the power was lost, and with it some of the log."""
        self.processes: list[SimulatedProcess] = []
        self.num_ticks = 0
        self.story: list[str] = []
        """What happened beside the ordinary, to be read when a seed fails."""
        self._restart_s = restart_s
        self._tick_s = tick_s
        self._current: SimulatedProcess | None = None
        self._num_held = 0
        self._seen_changes = 0
        self._asked = DesiredState.running
        self._agenda: list[tuple[float, Callable[[], None]]] = []
        self._foreign = ForeignWriter(self.transport("somebody"), self.folder.run_id, Random(f"foreign {seed}"))
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
        """Until every process has ended by itself (or `until`), or one ended in a way that ends the run."""
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
        """The process whose exit code ends the run, if there is one."""
        return next((one for one in self.processes if one.exit_code not in (None, 0, TAKEN_OVER)), None)

    def step(self, until: float | None = None) -> None:
        """One tick of one process, chosen by the seed among those that are due; time moves on (up to `until`) if
        there is none."""
        now = self.clock.now()
        self._keep_agenda(now)
        free = [one for one in self.processes if one.exit_code is None and not one.held]
        due = [one for one in free if one.wake_at <= now and one.paused_until <= now]
        if due:
            self._tick(self.random.choice(due))
            self.clock.advance(self._tick_s)
            return
        times = [max(one.wake_at, one.paused_until) for one in free] + [at for at, _ in self._agenda]
        if until is not None:
            times.append(until)
        self.clock.advance(min(times) - now + 1e-6)

    def add(self, role: str) -> SimulatedProcess:
        """One more process of the role, beside those that live."""
        number = sum(one.role == role for one in self.processes)
        process = SimulatedProcess(f"{role}-{number}", role, wake_at=self.clock.now())
        self.processes.append(process)
        return process

    def find(self, name: str) -> SimulatedProcess:
        return next(process for process in self.processes if process.name == name)

    def kill(self, process: SimulatedProcess, reason: str = "killed") -> None:
        """SIGKILL; it starts again a while later."""
        self.tell(process, reason)
        self._end(process)

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """So long from now somebody outside of the run does this, for whom nothing goes wrong."""

        def do() -> None:
            current, self._current = self._current, None
            what()
            self._current = current

        self._agenda.append((self.clock.now() + seconds, do))

    def restart(self, process: SimulatedProcess) -> None:
        """SIGTERM; it starts again a while after it has left."""
        if process.service is not None and process.leave_by is None:
            self.tell(process, "told to leave")
            process.service.drain()
            process.leave_by = self.clock.now() + DRAIN_S
            process.wake_at = self.clock.now()

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.tell(process, f"stands still for {seconds:.1f} s")
        process.paused_until = self.clock.now() + seconds

    def ask(self, state: DesiredState) -> None:
        """What a user asks of the run."""
        self._asked = state
        self.story.append(f"{self._time()} the user: {state}")
        current, self._current = self._current, None  # nothing goes wrong for the user
        self.put("control", RunState(state=state, by="user", since=self.clock.now()))
        self._current = current

    def retry_dead(self) -> None:
        """A user asks for up to four groups to be put back: those that are dead, whatever was done with them before,
        and one that may not be."""
        current, self._current = self._current, None
        log = Log(self.transport())
        groups = [group.group_id for group in read_dead(log, now=self.clock.now()).groups]
        chosen = self.random.sample(groups, min(3, len(groups)))
        tasks = self.records("tasks")
        if tasks:
            chosen.append((self.random.choice(tasks).header("group_id") or b"").decode())
        stored = stored_rollouts(log, chosen)
        expires_at = self.clock.now() + self.random.choice([1.0, 1000.0])
        self.story.append(f"{self._time()} the user: put back {', '.join(stored)}")
        for group, places in stored.items():
            self.put("control", retry_request(group, places if self.random.random() < 0.8 else (), expires_at))
        self._current = current

    def write_foreign(self) -> None:
        """Somebody writes what is none of his."""
        current, self._current = self._current, None
        self.story.append(f"{self._time()} somebody: {self._foreign.write()}")
        self._current = current

    # ------------------------------------------------------------------------------------------ processes

    def _tick(self, process: SimulatedProcess) -> None:
        self.num_ticks += 1
        before, self._current = self._current, process
        try:
            if process.service is None:
                self._start(process)
            if process.service is not None:
                idle = process.service.tick()
                process.wake_at = self.clock.now() + idle
                self._at(BETWEEN)
        except Kill as kill:
            self.kill(process, f"killed {kill}")
        except PowerLoss as loss:
            if self._num_held:  # others stand still in the middle of a step, outside this one
                raise
            self._lose_power(str(loss))
        except RftError as error:
            self._failed(process, error)
        finally:
            self._current = before
        if process.service is not None:
            self._look_at_end(process)
        self._wake()
        if self.watch is not None:
            self.watch()

    def _start(self, process: SimulatedProcess) -> None:
        process.starts += 1
        service = build_service(
            self._own_roles.get(process.role, process.role),
            config=self.config,
            folder=self.folder,
            transport=self.log.connect(process.name),
            clock=self.clock,
            process=f"{process.name}.{process.starts}",
            simulated=True,
            own_store=self.store,
        )
        try:
            service.start()
        except TransportError:
            service.close()
            process.wake_at = self.clock.now() + 1.0
        else:
            process.service = service

    def _look_at_end(self, process: SimulatedProcess) -> None:
        assert process.service is not None
        leaving = process.leave_by is not None
        if process.service.done:
            process.service.close()
            # a process that leaves because the run is finished is not started again, told to leave or not
            if leaving and process.service.finished is None:
                self._end(process)
            else:
                process.service, process.exit_code = None, 0
        elif process.leave_by is not None and self.clock.now() > process.leave_by:
            process.service.close()
            self._end(process)

    def _end(self, process: SimulatedProcess) -> None:
        process.service, process.leave_by, process.paused_until = None, None, 0.0
        process.wake_at = self.clock.now() + self._restart_s * (0.5 + self.random.random())

    def _failed(self, process: SimulatedProcess, error: RftError) -> None:
        self.tell(process, f"exit {error.exit_code}: {error}")
        if error.exit_code in RESTARTED:
            self._end(process)
        else:
            process.service, process.exit_code = None, error.exit_code

    def _wake(self) -> None:
        """What the log has for somebody ends his waiting, as `Transport.wait` does."""
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

    # ------------------------------------------------------------------------------------------ faults

    def _at_producer(self, point: str, process: str) -> None:
        if self._current is None or process != self._current.name:  # who only looks on
            return
        if point == AFTER_COMMIT and self.watch is not None:
            self.watch()
        self._at(point)

    def _at(self, point: str) -> None:
        """One of the points at which something may go wrong for the current process."""
        process = self._current
        if process is None:  # not a process of the run
            return
        match self.plan.draw(point, process.role):
            case "kills":
                raise Kill(point)
            case "pauses":
                seconds = 40 * self.random.random()
                self.pause(process, seconds)
                if point != BETWEEN:
                    self._hold(process, seconds, point)
            case "aborts":
                self.tell(process, f"refused {point}")
                raise TransactionAborted(f"simulated: refused {point}")
            case "unknowns":
                self.tell(process, f"a commit with an unknown result, {point}")
                raise ProducerLost("simulated: the result of the commit is unknown")
            case "silences":
                self.tell(process, f"no answer, {point}")
                raise TransportError("simulated: no answer")
            case "restarts":
                self.restart(process)
            case "takeovers":
                role = self.random.choice([one.role for one in self.processes if one.role in self._singles()])
                self.tell(self.add(role), "started beside another")
            case "joins":
                self.tell(
                    self.add(
                        self.random.choice([spec.name for spec in role_specs() if spec.kind is RoleKind.concurrent])
                    ),
                    "joins",
                )
            case "user_pauses" if self._asked is not DesiredState.draining:
                self.ask(DesiredState.paused)
                self._agenda.append((self.clock.now() + 20 * self.random.random(), self._unpause))
            case "drains":
                self.ask(DesiredState.draining)
            case "retries":
                self.retry_dead()
            case "strangers":
                self.write_foreign()
            case "power_losses":
                raise PowerLoss(point)

    def _lose_power(self, point: str) -> None:
        transactions = self.log.transactions
        num_kept = self.random.randint(transactions.num_durable, len(transactions.history))
        lost = len(transactions.history) - num_kept
        self.story.append(f"{self._time()} the power is lost {point}, and {lost} transactions with it")
        for process in self.processes:
            if process.exit_code is None:
                self._end(process)
        self.log.lose_power(num_kept)
        if self.forgot is not None:
            self.forgot()
        if lost:
            self.ask(self._asked)  # the user sees that it is lost, too

    def _singles(self) -> set[str]:
        return {spec.name for spec in role_specs() if spec.kind is RoleKind.single}

    def _hold(self, process: SimulatedProcess, seconds: float, point: str) -> None:
        """The process stands still in the middle of a step, while the others go on."""
        if self._num_held >= MAX_HELD:
            return
        until = self.clock.now() + seconds
        process.held = True
        self._num_held += 1
        try:
            while self.clock.now() < until:
                self.step(until)
        finally:
            self._num_held -= 1
            process.held = False
        self.tell(process, f"goes on {point}")

    def _unpause(self) -> None:
        if self._asked is DesiredState.paused:
            self.ask(DesiredState.running)

    def _keep_agenda(self, now: float) -> None:
        if self._agenda:
            due = [what for at, what in self._agenda if at <= now]
            self._agenda = [(at, what) for at, what in self._agenda if at > now]
            for what in due:
                what()

    # ------------------------------------------------------------------------------------------ the story

    def tell(self, process: SimulatedProcess, what: str) -> None:
        self.story.append(f"{self._time()} {process.name}: {what}")

    def to_text(self) -> str:
        """What happened, and where everybody stands."""
        states = [
            f"{one.name}: "
            + (
                f"ended with {one.exit_code}"
                if one.exit_code is not None
                else str(one.service.health())
                if one.service is not None
                else "not running"
            )
            for one in self.processes
        ]
        return "\n".join(
            [f"seed {self.seed}, {self.num_ticks} ticks, {self._time()} s", *self.story[-STORY_LINES:], *states]
        )

    def _time(self) -> str:
        return f"{self.clock.now() - START_TIME_S:9.3f}"
