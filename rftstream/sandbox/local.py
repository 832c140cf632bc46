"""Sandboxes on this machine."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rftstream.sandbox import cgroups, layers
from rftstream.sandbox.base import MIB, BoxFile, BoxRefused, Isolation, Job, JobEnd, Limits, SandboxError
from rftstream.sandbox.inside import wire
from rftstream.sandbox.place import SandboxPlace, end_box
from rftstream.sandbox.program_run import ProgramRun

MAX_FILES = 4096

_numbers = itertools.count(1)
"""Numbers of places. They are unique among all back ends of a process, since cgroups are named by them."""
JUDGE_LIMITS = Limits(output_bytes=MIB)


class LocalBackend:
    """Makes sandboxes with bubblewrap. `default_backend` makes one for a process; a server also makes one.

    At most `slots` programs run at once. Others wait, which does not count towards their limits. Tests that call a
    candidate run in separate places, so that a candidate never waits for its test.
    """

    def __init__(self, *, slots: int = 0, isolation: Isolation = Isolation.full) -> None:
        if (problem := layers.missing_text(isolation)) is not None:
            layers.find_layers.cache_clear()  # the machine may be fixed while this process lives
            raise SandboxError(problem)
        self._isolation = isolation
        self._parents = cgroups.find_parents()
        if self._parents is not None:
            cgroups.sweep(self._parents)
        slots = slots or len(os.sched_getaffinity(0))
        self._programs = _Places(slots, self._start)
        self._judges = _Places(slots, self._start)

    def create(self, *, disk_bytes: int = 64 * MIB) -> LocalSandbox:
        """Return a new sandbox."""
        return LocalSandbox(self._programs, self._judges, disk_bytes)

    def close(self) -> None:
        """End all warm interpreters. An interpreter whose box is in use ends together with the box."""
        self._programs.close()
        self._judges.close()

    def _start(self) -> SandboxPlace:
        return SandboxPlace(next(_numbers), parents=self._parents, isolation=self._isolation)


class _Places:
    """A fixed number of places, each started when first needed. Callers get places in the order of their requests."""

    def __init__(self, most: int, start: Callable[[], SandboxPlace]) -> None:
        self._num_free = most
        self._waiting: deque[threading.Event] = deque()
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[SandboxPlace] = []
        self._is_closed = False

    def take(self) -> SandboxPlace:
        """Return a free place. Wait until there is one."""
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
        """Give a free place to the caller that has waited longest. With a semaphore, newer callers could overtake it
        for ever."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._num_free += 1

    def give_back(self, place: SandboxPlace, *, is_clean: bool) -> None:
        """Take a place back. A place that is not clean is closed."""
        with self._lock:
            keep = is_clean and not self._is_closed
            if keep:
                self._idle.append(place)
        if not keep:
            place.close()
        self._release()

    def close(self) -> None:
        """Close all free places now, and the others when they come back."""
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
        except SandboxError:  # the warm interpreter may have died since the place was last used: try one other place
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
        return ProgramRun(self._place, self._channel, self._pidfd, job).end()

    def close(self) -> None:
        """End the box, and give its place back."""
        if not self._is_closed:
            self._is_closed = True
            self._programs.give_back(self._place, is_clean=end_box(self._channel, self._pidfd))

    def _make(self, disk_bytes: int) -> tuple[SandboxPlace, socket.socket, int]:
        place = self._programs.take()
        try:
            place.bound(Limits())
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
        """Run the program here, and its test in another box. A socket between them carries the calls."""
        place, is_clean = self._judges.take(), False
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                place.bound(JUDGE_LIMITS)
                channel, pidfd = place.make_box(JUDGE_LIMITS.disk_bytes)
                try:
                    # the program's watch decides when time is up: a test that waits for the program does not see its
                    # delays
                    memory_bytes, wall_s = JUDGE_LIMITS.memory_bytes, job.limits.hard_s
                    limits = replace(job.limits, memory_bytes=memory_bytes, output_bytes=MIB, wall_s=wall_s)
                    test = ProgramRun(place, channel, pidfd, replace(job, limits=limits), partner=theirs)
                    job = replace(job, mode="script")
                    program = ProgramRun(self._place, self._channel, self._pidfd, job, partner=ours)
                    return _run_both(program, test)
                finally:
                    is_clean = end_box(channel, pidfd)
        finally:
            self._judges.give_back(place, is_clean=is_clean)


def _run_both(program: ProgramRun, test: ProgramRun) -> JobEnd:
    """Run the test to its end, and then end the program. If the program reaches one of its limits, the test ends as
    well."""
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


_defaults: dict[tuple[int, Isolation], LocalBackend] = {}
_default_lock = threading.Lock()


def default_backend(isolation: Isolation = Isolation.full) -> LocalBackend:
    """Return this process's back end, made when first needed. SandboxError if this machine can have no sandbox."""
    with _default_lock:
        key = (os.getpid(), isolation)
        if key not in _defaults:
            _defaults[key] = LocalBackend(isolation=isolation)
        return _defaults[key]
