"""What a sandbox takes and gives, whoever runs it: limits, jobs, ends, and the protocol of back ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from rftstream.errors import RftError

MIB = 1 << 20


class SandboxError(RftError):
    """A sandbox failed by no fault of the program in it. The program is unscorable."""


class BoxRefused(SandboxError):
    """Files do not fit into a box, or are too large or too many to be taken out of it."""


class Isolation(StrEnum):
    """How far programs are kept apart from the user who runs them. Anything but `full` is weaker."""

    full = "full"
    """Programs run as a user of their own, where this process may change its user."""
    shared_user = "shared_user"
    """Programs run as the user of this process. For machines that let only root make user namespaces."""


class Outcome(StrEnum):
    """The kinds of results that a program can have."""

    passed = "passed"
    """The output is the expected one."""
    failed = "failed"
    """The program's fault: wrong, crashed, or at one of its limits."""
    unscorable = "unscorable"
    """Our fault: the sandbox failed, or the machine was too busy."""
    finished = "finished"
    """It ended by itself with status 0, and nothing was expected, so nothing was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program. At any of them the program is killed, and has failed."""

    wall_s: float = 10.0
    """Seconds from start to end. Seconds in which the program waits for a processor because of others do not count."""
    cpu_s: float = 10.0
    """Processor seconds of all its processes."""
    memory_bytes: int = 512 * MIB
    """Memory of all its processes, with what it writes to its folders."""
    disk_bytes: int = 64 * MIB
    """Most bytes that the program may write to its folders, /tmp and /dev/shm in all."""
    output_bytes: int = 4 * MIB
    """Most bytes that the program may print, to stdout and to stderr each, and send as values."""
    processes: int = 64
    """Processes and threads at once."""
    stack_bytes: int = 64 * MIB
    """Stack of its first thread."""
    call_s: float = 10.0
    """Processor seconds of one call of a function."""

    @property
    def hard_s(self) -> float:
        """Return the seconds after which it is killed however busy the machine is. It has not failed then."""
        return max(5 * self.wall_s, self.wall_s + 20.0)


Stopped = Literal["wall", "cpu", "memory", "output", "overload", "stop", "done"]

Mode = Literal["script", "calls", "check", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to run in a sandbox. `run` makes jobs."""

    mode: Mode
    """script: Python text as a program. calls: functions of it. check: a test of a function of it, in another sandbox.
    command: `argv`."""
    source: str = ""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    function: str = ""
    calls: tuple[str, ...] = ()
    """For calls: the arguments of each call, a list in the form of `inside.plain`."""
    test: str = ""
    context: str = ""
    prelude: str = ""
    """Trusted text that runs before a Python program, in its module, and before a test. Its errors do not matter, and
    it does not define `function`."""
    limits: Limits = Limits()
    bounds_addresses: bool = True
    """Whether the limit of memory also bounds addresses. Java and Node.js reserve more than they use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a program ended, and what came out of it. A sandbox makes it; `run` judges it."""

    exit_code: int | None
    """Status, or the negative number of the signal that ended it."""
    stopped: Stopped | None = None
    """Why it was killed, or None. stop: its user asked for it; done: its partner has ended."""
    stdout: bytes = b""
    stderr: bytes = b""
    frames: tuple[bytes, ...] = ()
    """Frames that it sent, as `inside.programs` describes them."""
    verdict: bytes | None = None
    """For a check: the frame that the test sent to the judge."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    delay_s: float = 0.0
    """Seconds in which others had the processor, if the program came to its limit."""
    max_rss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxFile:
    """A file that goes into a sandbox or comes out of it."""

    name: str
    """Path below the home folder."""
    data: bytes
    mode: int = 0o644


class Sandbox(Protocol):
    """One box: a fresh file system and fresh processes, for one program or for several that belong together.

    A back end makes it in `create`. Its user calls `put`, `run` and `get` in any order, from one thread, and then
    `close`. Whatever a call raises as SandboxError, `close` has to be called.

        with contextlib.closing(backend.create()) as box:
            box.put([BoxFile(name="main.c", data=text)])
            end = box.run(Job(mode="command", argv=("gcc", "main.c")))
            files = box.get(["a.out"])
    """

    def put(self, files: Sequence[BoxFile]) -> None:
        """Write files below the home folder. BoxRefused if they do not fit."""

    def get(self, names: Sequence[str] | None = None, *, max_bytes: int = 64 * MIB) -> list[BoxFile]:
        """Return regular files below the home folder, or all of them. Files that are not there are left out. BoxRefused
        if they are too large or too many."""

    def run(self, job: Job) -> JobEnd:
        """Run a program to its end. All processes that it started are gone by then."""

    def close(self) -> None:
        """End the box. Nothing of it is left."""


class SandboxBackend(Protocol):
    """Makes sandboxes. It may be used by many threads at once."""

    def create(self, *, disk_bytes: int = 64 * MIB) -> Sandbox:
        """Return a new sandbox. Wait for a free place if all are in use. SandboxError if there can be none."""

    def close(self) -> None:
        """End all that it holds."""
