"""From a seed to what goes wrong in a run, and when: role, point and occurrence, or version and moment."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SINGLES = ("feeder", "buffer", "trainer", "evaluator")
SHARED = ("explorer", "verifier")
COUNTS = {"explorer": 2}
"""Processes of a role that the run starts; of the others one."""

COMMIT_POINTS = ("before_commit", "in_commit", "after_commit", "before_start", "after_start")
WEIGHT_POINTS = ("object_written", "before_checkpoints", "checkpoint_files_written", "checkpoint_manifest_written")

LARGE = {
    "embedded": ("stopped worker", "zombie", "two at once", "machine", "full disk", "stopped writer"),
    "kafka": (
        "stopped worker", "zombie", "two at once", "machine", "lost broker", "lost controller", "rolling restart",
        "stopped broker",
    ),
}  # fmt: skip
"""Each schedule has one of these, by its seed, beside kills and workers that come and go."""

AWAY_S = 13.0
"""Longer than a session lasts, and than the supervisor lets a stopped process hold the write lock."""

CALL_POINTS = ("call_received", "call_sampled", "call_committed", "call_answered")
AGENTS_SHARE = 0.3

LAST_VERSION, LAST_SHORT = 12, 5
"""Nothing begins at a later one: in a whole schedule, in a short one."""

NUM_TASKS, NUM_SHORT = 88, 36
"""Groups of a run that a schedule befalls: in a whole one, in a short one."""


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Something done from outside."""

    version: int
    """When the run has come to this version."""
    delay_s: float
    what: str
    """kill, kill host, join, leave, or one of LARGE."""
    target: str = ""
    """Process, role or broker."""

    def __str__(self) -> str:
        return f"at version {self.version} + {self.delay_s:.2f} s: {self.what} {self.target}".rstrip()


@dataclass(frozen=True, slots=True)
class Point:
    """Something that a process does to itself (rftstream.faults)."""

    role: str
    point: str
    occurrence: int
    action: str = "kill"

    @property
    def name(self) -> str:
        return f"{self.role}.{self.point}.{self.occurrence}"

    def __str__(self) -> str:
        return f"{self.role}:{self.point}:{self.occurrence}:{self.action}"


@dataclass(frozen=True, slots=True)
class Schedule:
    log: str
    seed: int
    points: tuple[Point, ...]
    events: tuple[Event, ...]
    retention: bool = False
    """Whether the run deletes from its log meanwhile."""
    agents: bool = False
    """Whether most rollouts are made by agents, elsewhere and in hosts."""
    short: bool = False
    """Whether it befalls a run of half the length, without agents."""

    @property
    def again(self) -> str:
        """The command."""
        if self.short:
            return f"python -m tests.faults --log {self.log} --seed {self.seed} --schedules 1 --short"
        return f"make faults LOG={self.log} SEED={self.seed} SCHEDULES=1"

    @property
    def num_tasks(self) -> int:
        """Groups of the run."""
        return NUM_SHORT if self.short else NUM_TASKS

    def __str__(self) -> str:
        kept = ", short" * self.short + ", with agents" * self.agents + ", with retention" * self.retention
        return "\n".join([f"schedule {self.seed} on {self.log}{kept}", *map(str, self.points), *map(str, self.events),
                          f"again: {self.again}"])  # fmt: skip


CALM = Schedule("embedded", 0, (), ())
"""Nothing goes wrong."""


def draw(log: str, seed: int, *, short: bool = False) -> Schedule:
    random = Random(f"faults {log} {seed}")
    last = LAST_SHORT if short else LAST_VERSION
    large = LARGE[log][seed % len(LARGE[log])]
    version = random.randint(1, 4 if not short else 2)
    event, own = _large(large, version, random)
    roles = [*SINGLES, *SHARED]
    points = {point.name: point for point in own}
    for role in random.sample(roles, random.randint(1, 3)):
        point = _point(role, random)
        points.setdefault(point.name, point)
    events = [event] if event is not None else []
    for role in random.sample(roles, random.randint(1, 3)):
        number = random.randrange(COUNTS.get(role, 1))
        events.append(_event("kill", f"{role}-{number}", random, last))
    if random.random() < 0.5:
        events.append(_event("join", random.choice(SHARED), random, last))
    if random.random() < 0.5:
        events.append(_event("leave", f"{random.choice(SHARED)}-0", random, last))
    retention = random.random() < 0.3
    own = Random(f"agents {log} {seed}")  # so that schedules without them stay what they were
    has_agents = own.random() < AGENTS_SHARE and not short
    if has_agents:
        for _ in range(own.randint(1, 3)):
            point = Point("explorer", own.choice(CALL_POINTS), own.randint(1, 4))
            points[point.name] = point
        events += [_event("kill host", f"explorer-{own.randrange(2)}", own, last) for _ in range(own.randint(0, 2))]
    return Schedule(log, seed, tuple(points.values()), tuple(sorted(events)), retention, has_agents, short)


def _point(role: str, random: Random) -> Point:
    point = random.choice([*COMMIT_POINTS, *WEIGHT_POINTS, *WEIGHT_POINTS] if role == "trainer" else COMMIT_POINTS)
    most = 1 if point.endswith("_start") else 3 if "checkpoint" in point else 12
    return Point(role, point, random.randint(1, most))


def _event(what: str, target: str, random: Random, last: int) -> Event:
    return Event(random.randint(1, last), round(random.random(), 2), what, target)


def _large(what: str, version: int, random: Random) -> tuple[Event | None, list[Point]]:
    delay_s = round(random.random(), 2)
    role = random.choice(SINGLES[:3])
    match what:
        case "stopped worker":
            return Event(version, delay_s, what, random.choice(["explorer-0", "explorer-1", "verifier-0"])), []
        case "zombie":
            if random.random() < 0.4:
                return Event(version, delay_s, what, role), []
            point = Point(role, random.choice(COMMIT_POINTS[:3]), random.randint(4, 8), "stop")
            return Event(version, 0.0, what, f"{role} {point.name}"), [point]
        case "stopped writer":
            return None, [Point(random.choice([*SINGLES[:3], *SHARED]), "in_commit", random.randint(2, 8), "stop")]
        case "two at once":
            return Event(version, delay_s, what, role), []
        case "machine":
            return Event(version, delay_s, what, random.choice(["all", "all", "supervisor"])), []
        case "lost broker" | "stopped broker":
            return Event(version, delay_s, what, str(random.randint(1, 3))), []
        case _:
            return Event(version, delay_s, what), []
