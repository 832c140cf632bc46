"""One program in a box, seen from outside: its descriptors, its output, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rftstream.frames import FrameReader
from rftstream.sandbox.base import MIB, Job, JobEnd, SandboxError, Stopped
from rftstream.sandbox.inside import wire
from rftstream.sandbox.place import SandboxPlace

GRACE_S = 20.0
"""Seconds after a program's hardest limit until a box that does not answer counts as broken."""
THREAD_BYTES = 128 * MIB
"""Address space that the C library reserves for the heap of a thread, and does not use."""


class ProgramRun:
    """One run of a program. A LocalSandbox makes it and calls `start` and `end`; another thread may call `stop`."""

    def __init__(
        self, place: SandboxPlace, channel: socket.socket, pidfd: int, job: Job, partner: socket.socket | None = None
    ) -> None:
        self._place, self._channel, self._pidfd, self._job, self._partner = place, channel, pidfd, job, partner
        self._is_test = job.mode == "check"
        self._judged = {"frames"} if job.mode == "calls" or self._is_test or partner is not None else {"stdout"}
        """Outputs that are compared. Other output of the program is dropped beyond its limit."""
        self._outputs: dict[int, bytearray] = {}
        self._names: dict[int, str] = {}
        self._stopped: Stopped | None = None
        self._lock = threading.Lock()
        self._has_ended = self._has_started = False
        self._selector = selectors.DefaultSelector()
        self._before = place.memory_events()

    def start(self) -> None:
        """Start the program."""
        self._place.bound(self._job.limits)
        self._before = self._place.memory_events()
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

    def stop(self, why: Stopped) -> None:
        """Have the program killed. Its end then gives the reason `why`, unless it has already ended."""
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
        """Forget a started program. Its box is ended next."""
        self._close()

    def _follow(self) -> dict[str, Any]:
        """Read all output until the program has ended and its pipes are closed. Return how it ended."""
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
            if self._is_out_of_memory():
                return {"exit": -9, "stopped": "memory", "error": ""}
            raise SandboxError(f"sandbox: the box is gone: {error}") from None
        finally:
            with self._lock:
                self._has_ended = True
        return answer

    def _is_out_of_memory(self) -> bool:
        """Return whether the kernel killed one of the program's processes at its limit. SandboxError if the kernel
        killed it below the limit: the machine ran out of memory."""
        now = self._place.memory_events()
        if now.kills > self._before.kills and now.hits == self._before.hits:
            raise SandboxError("sandbox: the machine ran out of memory, and not the program")
        return now.kills > self._before.kills

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, 1 << 18)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            return
        kept = self._outputs[descriptor]
        room = self._job.limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room and self._names[descriptor] in self._judged:
            self.stop("output")

    def _ended(self, answer: dict[str, Any]) -> JobEnd:
        stopped = answer["stopped"]
        if stopped in (None, "stop"):  # otherwise it reached a limit before anybody asked for its end
            stopped = self._stopped
        if stopped is None and answer["exit"] == -signal.SIGXCPU:
            stopped = "cpu"
        if stopped is None and answer["exit"] != 0 and self._is_out_of_memory():
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
        "call_s": job.limits.call_s, "prelude": job.prelude,
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
    """Yield the frames; nothing if the data is not made of frames. An incomplete last frame is left out."""
    with contextlib.suppress(ValueError):
        yield from (body for body in FrameReader(most).feed(data) if body)
