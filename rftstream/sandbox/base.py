"""The interface of sandboxes, whatever runs them: limits, jobs, results, and the protocol of back ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from rftstream.errors import RftError

MIB = 1 << 20


class SandboxError(RftError):
    """A sandbox failed, and the program in it is not to blame. The program is unscorable."""


class BoxRefused(SandboxError):
    """Files do not fit into a box, or are too large or too many to be returned."""


class Isolation(StrEnum):
    """How far programs are separated from the user who runs them. Every value other than `full` is weaker."""

    full = "full"
    """Programs run as a separate user, if this process may change its user."""
    shared_user = "shared_user"
    """Programs run as this process's user. For machines on which only root may make user namespaces."""


class Outcome(StrEnum):
    """The kinds of results of a program."""

    passed = "passed"
    """The output is the expected one."""
    failed = "failed"
    """The program is to blame: wrong output, a crash, or a limit reached."""
    unscorable = "unscorable"
    """The program is not to blame: the sandbox failed, or the machine was too busy."""
    finished = "finished"
    """The program ended by itself with status 0, and nothing was expected, so nothing was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program. A program that reaches a limit is killed and has failed."""

    wall_s: float = 10.0
    """Seconds from start to end. Time in which the program waits for a processor because of other programs does not
    count."""
    cpu_s: float = 10.0
    """Processor seconds of all processes together."""
    memory_bytes: int = 512 * MIB
    """Bytes of memory of all processes together, including the files that they write."""
    disk_bytes: int = 64 * MIB
    """Largest number of bytes that the program may write to its folders, /tmp and /dev/shm together."""
    output_bytes: int = 4 * MIB
    """Largest number of bytes that the program may print, to stdout and to stderr each, and send as values."""
    processes: int = 64
    """Largest number of processes and threads at once."""
    stack_bytes: int = 64 * MIB
    """Stack of the first thread, in bytes."""
    call_s: float = 10.0
    """Processor seconds of one function call."""

    @property
    def hard_s(self) -> float:
        """Return the seconds after which the program is killed even on a busy machine. The program has not failed
        then."""
        return max(5 * self.wall_s, self.wall_s + 20.0)


Stopped = Literal["wall", "cpu", "memory", "output", "overload", "stop", "done"]

Mode = Literal["script", "calls", "check", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to run in a sandbox. `run` makes jobs."""

    mode: Mode
    """script: a Python program. calls: calls of its functions. check: a test of one of its functions, which runs in
    another sandbox. command: `argv`."""
    source: str = ""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    function: str = ""
    calls: tuple[str, ...] = ()
    """For calls: the arguments of each call, a list encoded by `inside.plain`."""
    test: str = ""
    context: str = ""
    prelude: str = ""
    """Trusted text that runs before a Python program, in its module, and before a test. Its errors are ignored, and it
    cannot define `function`."""
    limits: Limits = Limits()
    bounds_addresses: bool = True
    """Whether the memory limit also bounds the address space. Java and Node.js reserve more than they use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a program ended, and its output. A sandbox makes it; `run` judges it."""

    exit_code: int | None
    """Exit status, or the negative number of the signal that ended the program."""
    stopped: Stopped | None = None
    """Why the program was killed, or None. stop: its user asked for it; done: its partner has ended."""
    stdout: bytes = b""
    stderr: bytes = b""
    frames: tuple[bytes, ...] = ()
    """Frames that the program sent, as `inside.programs` describes them."""
    verdict: bytes | None = None
    """For a check: the frame that the test sent to the judge."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    delay_s: float = 0.0
    """Seconds in which other programs had the processor, if the program reached its limit."""
    max_rss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxFile:
    """A file that is put into a sandbox or returned from it."""

    name: str
    """Path below the home folder."""
    data: bytes
    mode: int = 0o644


class Sandbox(Protocol):
    """One box: a fresh file system and fresh processes, for one program or several related ones.

    A back end makes it in `create`. Its user calls `put`, `run` and `get` in any order, from one thread, and then
    `close`. `close` has to be called even after a SandboxError.

        with contextlib.closing(backend.create()) as box:
            box.put([BoxFile(name="main.c", data=text)])
            end = box.run(Job(mode="command", argv=("gcc", "main.c")))
            files = box.get(["a.out"])
    """

    def put(self, files: Sequence[BoxFile]) -> None:
        """Write files below the home folder. BoxRefused if they do not fit."""

    def get(self, names: Sequence[str] | None = None, *, max_bytes: int = 64 * MIB) -> list[BoxFile]:
        """Return regular files below the home folder: those with these names, or all. Missing files are left out.
        BoxRefused if the files are too large or too many."""

    def run(self, job: Job) -> JobEnd:
        """Run a program to its end. When this returns, all processes that it started are gone."""

    def close(self) -> None:
        """End the box and remove everything in it."""


class SandboxBackend(Protocol):
    """Makes sandboxes. It may be used by many threads at once."""

    def create(self, *, disk_bytes: int = 64 * MIB) -> Sandbox:
        """Return a new sandbox. Wait for a free place if all are in use. SandboxError if no sandbox can be made."""

    def close(self) -> None:
        """End all sandboxes and processes."""
