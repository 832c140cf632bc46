"""The command of an engine, such as `docker` or `kubectl`, and what places say to shells through it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from rftstream.environments.places.base import last_lines
from rftstream.environments.places.processes import OUTPUT_BYTES, communicate, end_process, read_up_to
from rftstream.errors import ConfigError, HostedCodeError, HostError
from rftstream.sandbox.cgroups import start_time

LABEL = "rftstream.place"
"""Label of all that is made for places: `HOST PID START UNTIL` of its owner."""
COMMAND_S = 120.0
"""Largest number of seconds of one command of the engine, except builds and what a place runs."""
AWAY_S = 300.0
"""Seconds for which an engine that has answered before is waited for."""
AWAY_LOOK_S = 2.0
WRONG_MACHINE = "exec format error"
"""Words of the kernel for programs of another processor."""
READY = "rftstream-ready"
KEEPER = f"echo {READY}; exec cat >/dev/null"
"""First process of a container. It ends with its stdin, and the container with it."""
SHELL = f"""
rft_kept=$(mktemp) || rft_kept=/dev/null
if command -v bash >/dev/null; then $rft_as bash -c "$1"; else $rft_as sh -c "$1"; fi >"$rft_kept" 2>&1 </dev/null
rft_code=$?
tail -c {OUTPUT_BYTES} "$rft_kept"; rm -f "$rft_kept"
"""
"""Runs a command, by bash as Harbor does, and leaves its exit code in $rft_code. Its output goes through a file: a
process that the command leaves in the background would keep a pipe open. $rft_as may begin another user's command."""
KILL = 'for one in /proc/[0-9]*; do grep -qs "$1" "$one/environ" && kill -9 "${one#/proc/}"; done 2>/dev/null; true'
"""Ends all processes with a mark among their variables."""


Made = TypeVar("Made")


def name_owner(life_s: float) -> str:
    """Return this process as the owner of what may be removed by others after so many seconds."""
    return f"{socket.gethostname()} {os.getpid()} {start_time(os.getpid())} {time.time() + life_s:.0f}"


def is_abandoned(owner: str) -> bool:
    """Return whether an owner on this machine is dead, or has had its time."""
    host, pid, started, until = owner.split()
    is_dead = host == socket.gethostname() and start_time(int(pid)) != started
    return is_dead or time.time() > float(until)


class EngineCommand:
    """Runs the command of an engine. `DockerPlaces` and `KubernetesPlaces` are ones."""

    def __init__(
        self, program: str, *, what: str, unreachable: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """`what` is to be installed if there is no program. `unreachable`: words of a program that reaches nothing.
        `variables`: more of its environment."""
        self._program, self._what, self._unreachable = program, what, unreachable
        self._own = dict(variables or {})
        self._has_answered = False
        self._is_away = False
        """Whether the newest command that failed has reached no engine."""
        self._left: set[str] = set()
        """Names of places that could not be removed."""

    def removal(self, name: str) -> list[str]:
        """Return the words that remove a place, whatever its state."""
        raise NotImplementedError

    async def remove(self, name: str) -> None:
        """Remove a place. One that cannot be is tried again by `remove_left`."""
        try:
            await self.ask(*self.removal(name))
        except HostError:
            self._left.add(name)

    async def remove_left(self) -> None:
        """Remove what could not be removed before."""
        for name in list(self._left):
            self._left.discard(name)
            await self.remove(name)

    async def when_back(self, make: Callable[[], Awaitable[Made]]) -> Made:
        """Return what is made. While an engine that has answered before does not, it is waited for."""
        while True:
            try:
                return await make()
            except HostError:
                if not self._is_away:
                    raise
                await self._wait_until_back()

    async def _wait_until_back(self) -> None:
        """Return when the engine answers. ConfigError if it does not."""
        until = time.monotonic() + AWAY_S
        while self._is_away:
            with contextlib.suppress(HostError):
                code, output = await self.call(["version"])
                if code and time.monotonic() > until:
                    raise self._no_engine(output)
            if self._is_away:
                await asyncio.sleep(AWAY_LOOK_S)

    async def ask(self, *arguments: str, data: bytes = b"", most: int = OUTPUT_BYTES) -> str:
        """Return the output of a command of the engine, its last `most` bytes. HostError if it fails, ConfigError if
        there is no engine."""
        code, output = await self.call(list(arguments), data, most=most)
        if code:
            raise self.error(output)
        return output

    async def call(
        self,
        arguments: Sequence[str],
        data: bytes = b"",
        *,
        timeout_s: float | None = COMMAND_S,
        most: int = OUTPUT_BYTES,
    ) -> tuple[int, str]:
        """Return the exit code and the output of a command of the engine. HostError if it does not end."""
        process = await self.spawn(arguments)
        try:
            async with asyncio.timeout(timeout_s):
                output = await communicate(process, data, most)
                code = await process.wait()
        except TimeoutError:
            raise HostError(f"{self._program} {arguments[0]}: no end within {timeout_s:g} s") from None
        finally:
            await end_process(process)
        if code < 0:
            raise HostError(f"{self._program} {arguments[0]} was killed by signal {-code}")
        if not code:
            self._has_answered, self._is_away = True, False
        return code, output

    async def read(self, arguments: Sequence[str], max_bytes: int, what: str) -> bytes:
        """Return what a command writes, up to a number of bytes. HostError if that takes too long."""
        process = await self.spawn(arguments, errors=asyncio.subprocess.DEVNULL)
        assert process.stdout
        try:
            async with asyncio.timeout(COMMAND_S):
                return await read_up_to(process.stdout, max_bytes)
        except TimeoutError:
            raise HostError(f"the place: {what} is not read within {COMMAND_S:g} s") from None
        finally:
            await end_process(process)

    async def spawn(
        self,
        arguments: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        errors: int = asyncio.subprocess.STDOUT,
    ) -> asyncio.subprocess.Process:
        """Start a command of the engine. ConfigError if the engine is not installed, HostedCodeError for arguments or
        variables that no command can have, HostError if this machine can start no process now."""
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                self._program,
                *arguments,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                env={**os.environ, **(variables or {}), **self._own},
                start_new_session=True,  # a Ctrl-C is for rftstream, which then closes its places
            )
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", errno.E2BIG)  # a ValueError is about a NUL
            if number == errno.E2BIG:
                raise HostedCodeError(
                    f"{self._program} {arguments[0]}: {error}; expected words and variables without NUL, of at "
                    "most 128 KiB each: the agent's prompt is one"
                ) from None
            if number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise HostError(f"{self._program} {arguments[0]}: cannot be started now: {error}") from None
            raise ConfigError(
                f"environments.harbor.engine: {self._program!r} cannot be run: {error}; install {self._what}, or name "
                "the command"
            ) from None

    def error(self, output: str) -> Exception:
        """Return the error of a command of the engine that failed with this output."""
        if any(one in output for one in self._unreachable):
            if not self._has_answered:
                return self._no_engine(output)
            self._is_away = True
        return HostError(f"{self._program}: {last_lines(output)}")

    def _no_engine(self, output: str) -> ConfigError:
        return ConfigError(
            f"environments.harbor.engine: {self._program!r} reaches no engine: {last_lines(output)}; start it, and let "
            "this user use it"
        )
