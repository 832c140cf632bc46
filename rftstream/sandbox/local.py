"""Sandboxes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rftstream.frames import FrameReader
from rftstream.sandbox import cgroups, layers
from rftstream.sandbox.base import MIB, BoxFile, BoxRefused, Job, JobEnd, Limits, SandboxError
from rftstream.sandbox.inside import wire
from rftstream.sandbox.place import SandboxPlace, end_box

GRACE_S = 20.0
"""Seconds after the hardest limit of a program, after which a box that says nothing is broken."""
THREAD_BYTES = 128 * MIB
"""Addresses that the C library reserves for the heap of a thread, and does not use."""
MAX_FILES = 4096

_numbers = itertools.count(1)
"""Numbers of places. Those of all back ends of a process differ, as their cgroups are named by them."""
JUDGE_LIMITS = Limits(output_bytes=MIB)


class LocalBackend:
    """Makes sandboxes with bubblewrap. `default_backend` makes one for a process; a server makes one, too.

    At most `slots` programs run at once; others wait, which does not count for their limits. Tests that call a
    candidate run in places of their own, so that a candidate never waits for its test.
    """

    def __init__(self, *, slots: int = 0, readable: Sequence[str] = ()) -> None:
        if (problem := layers.missing_text()) is not None:
            raise SandboxError(problem)
        self._parents = cgroups.find_parents()
        if self._parents is not None:
            cgroups.sweep(self._parents)
        slots = slots or len(os.sched_getaffinity(0))
        self._programs = _Places(slots, lambda: self._start(readable))
        self._judges = _Places(slots, lambda: self._start(readable))

    def create(self, *, disk_bytes: int = 64 * MIB) -> LocalSandbox:
        """Return a new sandbox."""
        return LocalSandbox(self._programs, self._judges, disk_bytes)

    def close(self) -> None:
        """End all warm interpreters. Those of boxes that are in use end when the boxes do."""
        self._programs.close()
        self._judges.close()

    def _start(self, readable: Sequence[str]) -> SandboxPlace:
        return SandboxPlace(next(_numbers), readable=tuple(readable), parents=self._parents)


class _Places:
    """A number of places, each started when it is first needed. Who asks first is given one first."""

    def __init__(self, most: int, start: Callable[[], SandboxPlace]) -> None:
        self._num_free = most
        self._waiting: deque[threading.Event] = deque()
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[SandboxPlace] = []
        self._is_closed = False

    def take(self) -> SandboxPlace:
        """Return a place that nobody uses. Wait until there is one."""
        self._wait()
        try:
            with self._lock:
                if self._is_closed:
                    raise SandboxError("sandbox: it was closed")
                if self._idle:
                    return self._idle.pop()
            return self._start()
        except BaseException:
            self._release()
            raise

    def _wait(self) -> None:
        with self._lock:
            if self._num_free > 0:
                self._num_free -= 1
                return
            self._waiting.append(turn := threading.Event())
        try:
            turn.wait()
        except BaseException:
            with self._lock:
                was_given = turn.is_set()
                if not was_given:
                    self._waiting.remove(turn)
            if was_given:
                self._release()
            raise

    def _release(self) -> None:
        """Hand a free place to who waits longest. A semaphore would let others overtake for as long as they come."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._num_free += 1

    def give_back(self, place: SandboxPlace, *, is_clean: bool) -> None:
        """Take a place back. One that is not clean is closed."""
        with self._lock:
            keep = is_clean and not self._is_closed
            if keep:
                self._idle.append(place)
        if not keep:
            place.close()
        self._release()

    def close(self) -> None:
        """Close all places that nobody uses, and the others when they come back."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for place in idle:
            place.close()


class LocalSandbox:
    """A box of a place. A LocalBackend makes it."""

    def __init__(self, programs: _Places, judges: _Places, disk_bytes: int) -> None:
        self._programs, self._judges = programs, judges
        try:
            self._place, self._channel, self._pidfd = self._make(disk_bytes)
        except SandboxError:  # the warm interpreter may have died since the place was used: another one, once
            self._place, self._channel, self._pidfd = self._make(disk_bytes)
        self._is_closed = False

    def put(self, files: Sequence[BoxFile]) -> None:
        """Write files below the home folder."""
        head = {"do": "put", "files": [[file.name, len(file.data), file.mode] for file in files]}
        for file in files:
            if file.name.startswith("/") or ".." in file.name.split("/"):
                raise SandboxError(f"sandbox: {file.name!r} is no path below the home folder")
        answer, _ = self._asked(head, b"".join(file.data for file in files))
        if "refused" in answer:
            raise BoxRefused(f"sandbox: a file cannot be put in: {answer['refused']}")

    def get(self, names: Sequence[str] | None = None, *, max_bytes: int = 64 * MIB) -> list[BoxFile]:
        """Return regular files below the home folder."""
        head = {"do": "get", "names": names, "max_bytes": max_bytes, "max_files": MAX_FILES}
        answer, body = self._asked(head)
        if "refused" in answer:
            raise BoxRefused(f"sandbox: {answer['refused']}")
        files, position = [], 0
        for name, size, mode in answer["files"]:
            files.append(BoxFile(name=name, data=body[position : position + size], mode=mode))
            position += size
        return files

    def run(self, job: Job) -> JobEnd:
        """Run a program to its end."""
        if job.mode == "check":
            return self._check(job)
        return _ProgramRun(self._place, self._channel, self._pidfd, job).end()

    def close(self) -> None:
        """End the box, and give its place back."""
        if not self._is_closed:
            self._is_closed = True
            self._programs.give_back(self._place, is_clean=end_box(self._channel, self._pidfd))

    def _make(self, disk_bytes: int) -> tuple[SandboxPlace, socket.socket, int]:
        place = self._programs.take()
        try:
            place.bound(memory_bytes=512 * MIB, processes=64)
            return place, *place.make_box(disk_bytes)
        except BaseException:
            self._programs.give_back(place, is_clean=False)
            raise

    def _asked(self, head: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        try:
            wire.send(self._channel, head, body)
            answer, data, _ = wire.receive(self._channel)
        except OSError as error:
            raise SandboxError(f"sandbox: the box is gone: {error}") from None
        if "error" in answer:
            raise SandboxError(f"sandbox: {answer['error']}")
        return answer, data

    def _check(self, job: Job) -> JobEnd:
        """Run the program here, and its test in another box. A socket between them carries calls."""
        place = self._judges.take()
        is_clean = False
        ours, theirs = socket.socketpair()
        try:
            place.bound(memory_bytes=JUDGE_LIMITS.memory_bytes, processes=JUDGE_LIMITS.processes)
            channel, pidfd = place.make_box(JUDGE_LIMITS.disk_bytes)
            try:
                # the program's watch says when time is up: a test that waits for it sees nothing of its delays
                memory_bytes, wall_s = JUDGE_LIMITS.memory_bytes, job.limits.hard_s
                limits = replace(job.limits, memory_bytes=memory_bytes, output_bytes=MIB, wall_s=wall_s)
                test = _ProgramRun(place, channel, pidfd, replace(job, limits=limits), partner=theirs)
                program = _ProgramRun(
                    self._place, self._channel, self._pidfd, replace(job, mode="script"), partner=ours
                )
                return _run_both(program, test)
            finally:
                is_clean = end_box(channel, pidfd)
        finally:
            ours.close()
            theirs.close()
            self._judges.give_back(place, is_clean=is_clean)


def _run_both(program: _ProgramRun, test: _ProgramRun) -> JobEnd:
    """Run the test to its end, and then end the program. If that comes to one of its limits, the test ends with it."""
    program.start()
    try:
        test.start()
    except BaseException:
        program.abandon()
        raise
    found: list[JobEnd | BaseException] = []

    def follow_program() -> None:
        found.append(end := _caught(program.end))
        if isinstance(end, BaseException) or end.stopped not in (None, "done"):
            test.stop("done")

    follow = threading.Thread(target=follow_program, name="sandbox-program", daemon=True)
    follow.start()
    try:
        judged = test.end()
    finally:
        program.stop("done")
        follow.join()
    end = found[0]
    if isinstance(end, BaseException):
        raise end
    stopped = judged.stopped if end.stopped == "done" else end.stopped
    return replace(
        end, verdict=judged.verdict, stopped=stopped, wall_s=judged.wall_s, stderr=end.stderr + judged.stderr
    )


def _caught(function: Callable[[], JobEnd]) -> JobEnd | BaseException:
    try:
        return function()
    except BaseException as error:
        return error


class _ProgramRun:
    """One program in a box, seen from outside: its descriptors, what it wrote, and its end."""

    def __init__(
        self, place: SandboxPlace, channel: socket.socket, pidfd: int, job: Job, partner: socket.socket | None = None
    ) -> None:
        self._place, self._channel, self._pidfd, self._job, self._partner = place, channel, pidfd, job, partner
        self._is_test = job.mode == "check"
        self._outputs: dict[int, bytearray] = {}
        self._names: dict[int, str] = {}
        self._stopped: str | None = None
        self._lock = threading.Lock()
        self._has_ended = self._has_started = False
        self._selector = selectors.DefaultSelector()
        self._kills = 0

    def start(self) -> None:
        """Start the program."""
        limits = self._job.limits
        self._place.bound(memory_bytes=limits.memory_bytes, processes=limits.processes)
        self._kills = self._place.num_kills()
        self._has_started = True
        theirs: list[int] = []
        try:
            theirs.append(_readable(self._job.stdin))
            for name in ("stdout", "stderr"):
                theirs.append(self._pipe(name))
            if self._partner is not None:
                theirs.append(os.dup(self._partner.fileno()))
            if self._job.mode == "calls" or self._is_test:
                theirs.append(self._pipe("frames"))
            wire.send(self._channel, _head(self._job, self._place.polls, self._partner is not None), b"", theirs)
        except OSError as error:
            self._close()
            raise SandboxError(f"sandbox: the box is gone: {error}") from None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
            if self._partner is not None:
                self._partner.close()
        self._selector.register(self._channel, selectors.EVENT_READ)

    def stop(self, why: str) -> None:
        """Have the program killed. Its end then names `why`, unless it has ended already."""
        with self._lock:
            if self._stopped is None and not self._has_ended:
                self._stopped = why
                with contextlib.suppress(OSError):
                    wire.send(self._channel, {"do": "stop"})

    def end(self) -> JobEnd:
        """Wait for the end, and return it. SandboxError if the sandbox failed."""
        if not self._has_started:
            self.start()
        try:
            answer = self._follow()
            if answer.get("stopped") == "error" or answer.get("error"):
                raise SandboxError(f"sandbox: the program could not begin: {answer['error']}")
            return self._ended(answer)
        finally:
            self._close()

    def abandon(self) -> None:
        """Forget a program that was started, whose box is ended next."""
        self._close()

    def _follow(self) -> dict[str, Any]:
        """Read all that comes until the program has ended and its pipes, too. Return how it ended."""
        until = time.monotonic() + self._job.limits.hard_s + GRACE_S
        answer: dict[str, Any] | None = None
        while answer is None or len(self._selector.get_map()) > 0:
            left_s = until - time.monotonic()
            if left_s <= 0:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                raise SandboxError("sandbox: the box says nothing any more")
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._channel:
                    self._selector.unregister(self._channel)
                    answer = self._answer()
                else:
                    self._read(key.fd)
        return answer

    def _answer(self) -> dict[str, Any]:
        try:
            answer, _, _ = wire.receive(self._channel)
        except OSError as error:
            if self._place.num_kills() > self._kills:
                return {"exit": -9, "stopped": "memory", "error": ""}
            raise SandboxError(f"sandbox: the box is gone: {error}") from None
        finally:
            with self._lock:
                self._has_ended = True
        return answer

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, 1 << 18)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            return
        kept = self._outputs[descriptor]
        room = self._job.limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.stop("output")

    def _ended(self, answer: dict[str, Any]) -> JobEnd:
        stopped = self._stopped or answer["stopped"]
        if stopped is None and answer["exit"] == -signal.SIGXCPU:
            stopped = "cpu"
        if stopped is None and answer["exit"] != 0 and self._place.num_kills() > self._kills:
            stopped = "memory"
        named = {name: bytes(self._outputs[descriptor]) for descriptor, name in self._names.items()}
        frames = tuple(_frames(named.get("frames", b""), self._job.limits.output_bytes))
        return JobEnd(
            exit_code=answer["exit"],
            stopped=stopped,
            stdout=named.get("stdout", b""),
            stderr=named.get("stderr", b""),
            frames=() if self._is_test else frames,
            verdict=frames[0] if self._is_test and frames else None,
            **{name: answer[name] for name in ("wall_s", "cpu_s", "delay_s", "max_rss_bytes") if name in answer},
        )

    def _pipe(self, name: str) -> int:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        os.fchmod(theirs, 0o622)  # so that a program can open /dev/stdout, which its user does not own
        self._outputs[ours], self._names[ours] = bytearray(), name
        self._selector.register(ours, selectors.EVENT_READ)
        return theirs

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._channel:
                os.close(key.fd)
        self._selector.close()


def _head(job: Job, polls: bool, has_partner: bool) -> dict[str, Any]:
    limits = asdict(job.limits)
    threads_bytes = job.limits.processes * (job.limits.stack_bytes + THREAD_BYTES)
    addresses = job.limits.memory_bytes + 256 * MIB + threads_bytes if job.bounds_addresses else 0
    limits |= {"hard_s": job.limits.hard_s, "file_bytes": job.limits.disk_bytes, "address_bytes": addresses}
    mode = "serve" if has_partner and job.mode != "check" else job.mode
    return {
        "do": "run", "mode": mode, "limits": limits, "polls": polls, "source": job.source if mode != "check" else "",
        "argv": job.argv, "environment": dict(job.environment), "function": job.function, "calls": job.calls,
        "test": job.test if mode == "check" else "", "context": job.context if mode == "check" else "",
        "call_s": job.limits.call_s,
    }  # fmt: skip


def _readable(data: bytes) -> int:
    """Return a descriptor from which these bytes can be read, and through which nothing can be changed."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    written = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(written, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(written, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.fchmod(written, 0o444)
        return os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)


def _frames(data: bytes, most: int) -> Iterator[bytes]:
    """Yield the frames, or none if what came is not made of frames. One that is not whole at the end is left out."""
    with contextlib.suppress(ValueError):
        yield from (body for body in FrameReader(most).feed(data) if body)


_default: tuple[int, LocalBackend] | None = None
_default_lock = threading.Lock()


def default_backend() -> LocalBackend:
    """Return the sandboxes of this process. They are made when first needed. SandboxError if there can be none."""
    global _default
    with _default_lock:
        if _default is None or _default[0] != os.getpid():
            _default = (os.getpid(), LocalBackend())
        return _default[1]
