"""All roles of a run in one process: a manual clock, an in-memory log, a seeded scheduler, kills between any steps.

Everything that could differ between two runs comes from the seed: which process goes next, who is killed when, how
long a dead one stays away. The same seed gives the same log, record for record.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rftstream import codec
from rftstream.config import RunConfig, replace
from rftstream.errors import RftError
from rftstream.runtime.runs import RunFolder, create_log
from rftstream.runtime.service import Service, build_service
from rftstream.topics import TOPICS
from rftstream.transport.base import Record, Transport
from rftstream.transport.memory import MemoryLog

if TYPE_CHECKING:
    from rftstream.views.audit import AuditReport

log = logging.getLogger(__name__)

START_TIME_S = 1_700_000_000.0
TICK_S = 0.001
"""How far each tick moves the clock."""


class ManualClock:
    """Time that goes on only when told to."""

    def __init__(self, now: float = START_TIME_S) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Kill(BaseException):
    """A simulated SIGKILL: nothing of the process goes on, not even its `finally` of the loop."""


@dataclass(slots=True)
class SimulatedProcess:
    name: str
    role: str
    service: Service | None = None
    wake_at: float = 0.0
    """Earliest time of its next tick, or of its start if it is not running."""
    starts: int = 0
    exit_code: int | None = None
    """Set once it has ended for good."""
    story: list[str] = field(default_factory=list)


class Simulation:
    """A run with `count` explorers and verifiers and one of each other role, as the config says."""

    def __init__(
        self,
        config: RunConfig,
        *,
        folder: Path,
        seed: int = 0,
        kill_share: float = 0.0,
        kills: int = 0,
        restart_s: float = 1.0,
    ) -> None:
        """`kill_share`: chance that a tick or a commit ends in a kill, until `kills` have happened."""
        self.config = replace(config, weights__store=f"memory://{folder.name}-{seed}-{id(self)}")
        self.folder = RunFolder(folder / config.run.name)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.clock = ManualClock()
        self.random = Random(seed)
        self.log = MemoryLog(self.clock.now)
        self.log.fault = self._fault
        self.processes: list[SimulatedProcess] = []
        self.num_kills = 0
        self.num_ticks = 0
        self.story: list[str] = []
        """What happened beside the ordinary, to be read when a seed fails."""
        self._kill_share = kill_share
        self._kills_left = kills
        self._restart_s = restart_s
        self._current: SimulatedProcess | None = None
        create_log(self.log.connect("setup"), self.config)
        for role, count in self._counts().items():
            for number in range(count):
                self.processes.append(SimulatedProcess(f"{role}-{number}", role, wake_at=self.clock.now()))

    def _counts(self) -> Mapping[str, int]:
        config = self.config
        return {
            "feeder": 1, "explorer": config.explorer.count, "verifier": config.verifier.count, "buffer": 1, "trainer": 1,
            "evaluator": config.evaluator.count if config.evaluations else 0,
        }

    # ------------------------------------------------------------------------------------------ driving

    def run(self, max_ticks: int = 1_000_000, until: Callable[[], bool] | None = None) -> None:
        """Until every process has ended by itself (or `until`); AssertionError with the story if it never does."""
        while any(process.exit_code is None for process in self.processes):
            if until is not None and until():
                return
            if self.num_ticks >= max_ticks:
                raise AssertionError("the run does not end:\n" + "\n".join(self.story[-40:]) + "\n" + self._states())
            self.step()

    def step(self) -> None:
        """One tick of one process, chosen by the seed among those that are due; time moves on if none is."""
        alive = [process for process in self.processes if process.exit_code is None]
        due = [process for process in alive if process.wake_at <= self.clock.now()]
        if not due:
            self.clock.advance(min(process.wake_at for process in alive) - self.clock.now() + 1e-6)
            return
        self._tick(self.random.choice(due))
        self.clock.advance(TICK_S)

    def kill(self, process: SimulatedProcess, reason: str = "killed") -> None:
        """SIGKILL; it starts again a while later."""
        self.num_kills += 1
        process.service = None
        process.wake_at = self.clock.now() + self._restart_s * (0.5 + self.random.random())
        self.story.append(f"{self.clock.now() - START_TIME_S:9.3f} {process.name}: {reason}")

    def find(self, name: str) -> SimulatedProcess:
        return next(process for process in self.processes if process.name == name)

    def _tick(self, process: SimulatedProcess) -> None:
        self.num_ticks += 1
        self._current = process
        try:
            if process.service is None:
                self._start(process)
            assert process.service is not None
            idle = process.service.tick()
            self._maybe_kill("between two ticks")
        except Kill as kill:
            self.kill(process, f"killed {kill}")
            return
        except RftError as error:
            self._failed(process, error)
            return
        finally:
            self._current = None
        if process.service.done:
            process.service.close()
            process.exit_code = 0
        process.wake_at = self.clock.now() + idle
        if idle == 0.0:
            for other in self.processes:
                if other.service is not None:
                    other.wake_at = min(other.wake_at, self.clock.now())

    def _start(self, process: SimulatedProcess) -> None:
        process.starts += 1
        process.service = build_service(
            process.role, config=self.config, folder=self.folder, transport=self.log.connect(process.name),
            clock=self.clock, process=f"{process.name}.{process.starts}", simulated=True,
        )
        process.service.start()

    def _failed(self, process: SimulatedProcess, error: RftError) -> None:
        self.story.append(f"{self.clock.now() - START_TIME_S:9.3f} {process.name}: exit {error.exit_code}: {error}")
        if error.exit_code in (1, 3):
            self.kill(process, "restarted after its error")
        else:
            process.exit_code = error.exit_code
            process.service = None

    def _maybe_kill(self, where: str) -> None:
        if self._kills_left > 0 and self.random.random() < self._kill_share:
            self._kills_left -= 1
            raise Kill(where)

    def _fault(self, point: str, process: str) -> None:
        if self._current is not None:
            self._maybe_kill(point)

    def _states(self) -> str:
        return "\n".join(
            f"{process.name}: {'ended ' + str(process.exit_code) if process.exit_code is not None else ''} "
            f"{process.service.health() if process.service else 'not running'}" for process in self.processes)

    # ------------------------------------------------------------------------------------------ looking

    def transport(self) -> Transport:
        return self.log.connect("observer")

    def records(self, topic: str) -> list[Record]:
        from rftstream.runtime.role import Log

        return list(Log(self.transport()).read(topic))

    def messages(self, topic: str) -> list[codec.Message]:
        return [codec.from_record(record) for record in self.records(topic) if record.value is not None]

    def audit(self) -> AuditReport:
        from rftstream.views.audit import audit

        return audit(self.transport())

    def digest(self) -> str:
        """Over every record of every topic."""
        total = hashlib.sha256()
        for topic in sorted(TOPICS):
            for record in self.records(topic):
                total.update(repr(record).encode())
        return total.hexdigest()
