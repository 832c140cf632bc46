"""The faults of a simulated run, with their numbers. The seed decides what happens when."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from random import Random

from rftstream.config.sections import RunConfig
from rftstream.roles import role_specs
from rftstream.service.role_spec import RoleKind

BETWEEN = "between two ticks"
BEFORE_START = "before_start"
BEFORE_COMMIT = "before_commit"
IN_COMMIT = "in_commit"
MARKING = "marking"
AFTER_COMMIT = "after_commit"
QUESTION = "question"


class Kill(BaseException):
    """A simulated SIGKILL: the process does nothing more."""


class PowerLoss(BaseException):
    """A simulated power loss: all processes end at once, and the newest records of the log may be lost."""

    def __init__(self, point: str, *, whole: bool = False) -> None:
        """`whole`: nothing of the log survives but what is durable."""
        super().__init__(point)
        self.whole = whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The most faults of each kind in a simulation. The seed chooses among those that are possible at a point."""

    share: float = 0.02
    """Chance of a fault at each point. Points: between two ticks of a process; before and after each commit, while it
    is open and while it is marked; before and after each start of a producer and each object that is put into the
    store; before each request to the log, each snapshot of a membership and each deletion."""
    roles: tuple[str, ...] = ()
    """Roles whose processes may have faults. Empty: all roles."""
    kills: int = 0
    """A process is killed (SIGKILL), and started again some time later."""
    pauses: int = 0
    """A process is not ticked for up to 40 s, from any point. That is long enough for its session to expire and a
    successor to start."""
    restarts: int = 0
    """A process gets SIGTERM. It finishes its work in progress, leaves, and is started again."""
    takeovers: int = 0
    """A second process of a single role is started while the first one lives."""
    joins: int = 0
    """One more explorer or verifier is started, and stays."""
    aborts: int = 0
    """A commit fails and nothing of it is visible, or a producer cannot be started at that time."""
    unknowns: int = 0
    """A commit fails, but may have succeeded, or may succeed later."""
    silences: int = 0
    """A request to the log (ends, positions) is not answered, or the marks of a commit come late."""
    user_pauses: int = 0
    """A user pauses the run, and continues it up to 20 s later."""
    drains: int = 0
    """A user drains the run."""
    retries: int = 0
    """A user requests that groups are put back: dead ones, some of them a second time, and sometimes one that is not
    dead."""
    strangers: int = 0
    """A foreign writer writes a record on a topic that belongs to a role (testing/foreign.py)."""
    power_losses: int = 0
    """All processes end at once. The newest commits may be missing, as with an embedded log."""


_WHERE = {
    "kills": None,
    "pauses": None,
    "restarts": {BETWEEN},
    "takeovers": {BETWEEN},
    "joins": {BETWEEN},
    "aborts": {BEFORE_COMMIT, IN_COMMIT, BEFORE_START},
    "unknowns": {BEFORE_COMMIT, IN_COMMIT, MARKING, AFTER_COMMIT},
    "silences": {QUESTION, MARKING},
    "user_pauses": {BETWEEN},
    "drains": {BETWEEN},
    "retries": {BETWEEN},
    "strangers": {BETWEEN},
    "power_losses": None,
}
"""Kind of fault -> the points at which it is possible; None: all points."""


class FaultPlan:
    """Draws the faults of a simulation from its seed. The FaultInjector calls it at each point."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self._share = faults.share
        self._roles = faults.roles
        self._left = Counter({name: count for name, count in asdict(faults).items() if name in _WHERE and count})
        self._random = random
        self.happened: Counter[str] = Counter()

    def draw(self, point: str, role: str) -> str | None:
        """Return the fault of a process of this role at this point, or None."""
        if not self._left or (self._roles and role not in self._roles) or self._random.random() >= self._share:
            return None
        possible = [name for name in sorted(self._left) if (where := _WHERE[name]) is None or point in where]
        if not possible:
            return None
        name = self._random.choice(possible)
        self.happened[name] += 1
        self._left[name] -= 1
        self._left += Counter()  # drops what is used up
        return name

    def stop(self) -> None:
        """Produce no more faults."""
        self._left.clear()


class FaultScript(FaultPlan):
    """A plan of given faults in order. Each happens at its point."""

    def __init__(self, *steps: tuple[str, str | None, str, int]) -> None:
        """Take steps of: point, role (None: any), kind, and how often the point is passed before."""
        super().__init__(Faults(), Random(0))
        self._steps = list(steps)

    def draw(self, point: str, role: str) -> str | None:
        """Return the next fault of the script if it belongs to this point, else None."""
        if not self._steps or point != self._steps[0][0] or self._steps[0][1] not in (None, role):
            return None
        where, who, name, skipped = self._steps.pop(0)
        if skipped:
            self._steps.insert(0, (where, who, name, skipped - 1))
            return None
        self.happened[name] += 1
        return name

    def stop(self) -> None:
        """Drop the rest of the script."""
        self._steps.clear()


def joining_roles(config: RunConfig) -> list[str]:
    """Return the concurrent roles that have input."""
    concurrent = RoleKind.concurrent
    return [spec.name for spec in role_specs() if spec.kind is concurrent and (spec.consumes or spec.chosen(config))]


def role_names(kind: RoleKind) -> list[str]:
    """Return the names of the roles of a kind."""
    return [spec.name for spec in role_specs() if spec.kind is kind]
