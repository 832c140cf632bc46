"""The hosts of an explorer: which process an environment gets, and when processes start and end.

One event loop in its own thread drives all hosts of a process. So they do not depend on the loops and threads of their
callers.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import threading
import uuid
from pathlib import Path
from typing import Any

from rftstream.environments.hosts.host import CLOSE_S, Host, HostSettings, places_of
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostStartTimeout
from rftstream.loops import LoopThread

ADAPTERS = {
    "gymnasium": "gymnasium.py:GymnasiumEnvironment",
    "textarena": "textarena.py:TextArenaEnvironment",
    "textarena_self_play": "textarena.py:self_play",
    "openenv": "openenv.py:OpenEnvEnvironment",
    "ors": "ors.py:OrsEnvironment",
    "verifiers": "verifiers.py:run",
}
"""Name of an adapter -> its file in `adapters/` and the object in it: a class, or an agent's function."""

STUCK_S = 5.0
"""Seconds in which an abandoned call may still return, before an otherwise idle host is ended."""

NO_PATIENCE_S = 0.001
"""Seconds to wait for `close` of an environment that hangs in another call. It closes when that call returns."""


TASKS = "tasks"
"""Name of an adapter's function that yields the tasks of an environment."""
PAGE = 500
"""Tasks of one answer."""
MAX_TASKS_BYTES = 256 << 20
"""Largest size of all tasks of an environment, in bytes."""


def target_path(target: str) -> str:
    """Return the target for the host to import: an adapter's file, a file with its full path, or `module:Thing`
    unchanged."""
    if target in ADAPTERS:
        return _adapter_path(ADAPTERS[target])
    place, _, name = target.rpartition(":")
    if not place:
        raise ConfigError(
            f"environments: target: got {target!r}, expected module:Thing, file.py:Thing, or one of "
            f"{', '.join(sorted(ADAPTERS))}"
        )
    if not place.endswith(".py"):
        return target
    found = next((path for path in places_of(place) if path.is_file()), None)
    if found is None:
        raise ConfigError(f"environments: target: got {target!r}, but there is no file {place!r}; name its whole path")
    return f"{found}:{name}"


def _adapter_path(adapter: str) -> str:
    return str(Path(__file__).parent / "adapters" / adapter)


class HostPool:
    """Up to `processes` hosts of one kind.

    `pool_of` makes it. `session` returns a session, which takes a place in a host and starts the host if necessary. A
    host that died is replaced when the next session opens, and a host that has been empty for `idle_timeout_s` is
    ended."""

    def __init__(self, settings: HostSettings, loop: LoopThread, name: str) -> None:
        self.loop = loop
        self._settings = settings
        self._name = name
        self._hosts: list[Host] = []
        self._starting: dict[Host, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._is_closed = False

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that have not ended."""
        return tuple(host for host in self._hosts if host.end is None)

    def session(self, target: str) -> HostSession:
        """Return a session for code that a host imports. Its owner opens it."""
        return HostSession(self, target)

    async def place(self, key: str, target: str) -> Host:
        """Return a host that has imported `target`, and count `key` as one of its environments."""
        host = self._choose()
        host.keys.add(key)
        try:
            await asyncio.shield(self._starting[host])
            await host.prepare(target)
        except BaseException:
            self.release(host, key)
            raise
        return host

    def _choose(self) -> Host:
        if self._is_closed:
            raise HostError(f"{self._name}: closed")
        self._hosts = [host for host in self._hosts if host.end is None]
        self._starting = {host: task for host, task in self._starting.items() if host.end is None or host.keys}
        usable = [host for host in self._hosts if not host.stuck]
        best = min(usable, key=lambda host: len(host.keys), default=None)
        if best is not None and (not best.keys or len(self._hosts) >= self._settings.processes):
            return best
        if best is None and len(self._hosts) >= 2 * self._settings.processes:
            return min(self._hosts, key=lambda host: len(host.keys))  # all hosts hang, and no more may start
        host = Host(self._settings, f"{self._name}-{next(self._numbers)}")
        self._hosts.append(host)
        self._starting[host] = asyncio.create_task(self._start(host))
        return host

    async def _start(self, host: Host) -> None:
        try:
            await host.start()
        except BaseException as error:
            host.end = host.end or str(error)
            raise

    def release(self, host: Host, key: str) -> None:
        """Record that a session is over. An empty host is ended: soon if one of its calls hangs, otherwise after a long
        idle time."""
        host.keys.discard(key)
        if host.end is not None:
            self._starting.pop(host, None)
        elif not host.keys:
            loop = asyncio.get_running_loop()
            host.idle_since = loop.time()
            for wait_s in (STUCK_S, self._settings.idle_timeout_s):
                loop.call_later(wait_s, self._end_if_idle, host)

    def _end_if_idle(self, host: Host) -> None:
        """End a host that has been empty for long enough."""
        wait_s = STUCK_S if host.stuck else self._settings.idle_timeout_s
        idle_s = asyncio.get_running_loop().time() - host.idle_since
        if host.keys or host.end is not None or host not in self._hosts or idle_s < wait_s - 0.001:
            return
        self._hosts.remove(host)
        task = asyncio.create_task(host.close(0.0 if host.stuck else CLOSE_S))
        self._starting[host] = task
        task.add_done_callback(lambda _: self._starting.pop(host, None))

    async def close(self) -> None:
        """End all hosts."""
        self._is_closed = True
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(host.close(0.0 if host.stuck else CLOSE_S) for host in self._hosts))
        self._starting.clear()


class HostSession:
    """One environment, or one run of an agent, in a host. `HostPool.session` makes it. Its owner calls `open`, then
    `call` any number of times, and `close` or `leave` at the end, in any event loop."""

    def __init__(self, pool: HostPool, target: str) -> None:
        self._pool = pool
        self._target = target
        self._key = uuid.uuid4().hex
        self._host: Host | None = None

    async def open(self, timeout_s: float) -> None:
        """Take a place in a host. ConfigError if the interpreter or the target does not exist, HostError if no host can
        be started, HostStartTimeout if the target is not imported in time."""
        await self._pool.loop.run(self._open(timeout_s))

    async def _open(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self._host = await self._pool.place(self._key, self._target)
        except TimeoutError:
            raise HostStartTimeout(
                f"{self._target}: not imported within {timeout_s:g} s (start_timeout_s); the import goes on"
            ) from None

    async def call(self, do: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Return the host's answer. HostError if the host dies, HostTimeout if it takes too long, HostedCodeError if
        the foreign code raises."""
        assert self._host, "opened before"
        return await self._pool.loop.run(self._host.call(do, self._key, timeout_s, target=self._target, **fields))

    async def close(self, timeout_s: float) -> None:
        """Let the environment close, and leave the host. Errors of its `close` are in the host's log."""
        await self._pool.loop.run(self._close(timeout_s))

    async def _close(self, timeout_s: float) -> None:
        if self._host is None:
            return
        try:
            hangs = self._key in self._host.stuck.values()
            await self._host.call("close", self._key, NO_PATIENCE_S if hangs else timeout_s)
        except (HostError, HostedCodeError):
            pass
        finally:
            await self._leave()

    async def leave(self) -> None:
        """Leave the host. It knows by itself when an agent's run is over."""
        await self._pool.loop.run(self._leave())

    async def _leave(self) -> None:
        if self._host is not None:
            self._pool.release(self._host, self._key)


def list_tasks(
    pool: HostPool, target: str, options: Any, size: int, start_timeout_s: float, timeout_s: float
) -> tuple[str, ...]:
    """Return the first `size` tasks that an adapter lists, as JSON texts. Errors are those of a session."""

    async def listed() -> list[str]:
        session = pool.session(f"{_adapter_path(ADAPTERS[target]).rpartition(':')[0]}:{TASKS}")
        found, num_bytes = list[str](), 0
        try:
            await session.open(start_timeout_s)
            while (wanted := min(PAGE, size - len(found))) > 0:
                answer = await session.call(TASKS, timeout_s, options=options, count=wanted)
                page = [json.dumps(task) for task in answer["tasks"]]
                found += page
                num_bytes += sum(map(len, page))
                if num_bytes > MAX_TASKS_BYTES:
                    raise HostedCodeError(
                        f"{len(found):,} tasks have {num_bytes >> 20} MiB, expected at most {MAX_TASKS_BYTES >> 20}; "
                        "take fewer by options.size"
                    )
                if len(page) < wanted:
                    break
        finally:
            await session.close(timeout_s)
        return found

    loop = LoopThread("tasks")
    try:
        return tuple(loop.call(listed()))
    finally:
        loop.close()


_LOCK = threading.Lock()
_POOLS: dict[HostSettings, HostPool] = {}
_LOOPS: list[LoopThread] = []


def pool_of(settings: HostSettings) -> HostPool:
    """Return the pool of this process with these settings. The first caller makes it."""
    with _LOCK:
        if not _LOOPS:
            _LOOPS.append(LoopThread("hosts"))
        if settings not in _POOLS:
            _POOLS[settings] = HostPool(settings, _LOOPS[0], f"host-{len(_POOLS) + 1}")
        return _POOLS[settings]


def close_pools() -> None:
    """End all hosts of this process. Later callers get new hosts."""
    with _LOCK:
        pools, loops = list(_POOLS.values()), list(_LOOPS)
        _POOLS.clear()
        _LOOPS.clear()
    for pool in pools:
        pool.loop.begin(pool.close()).result(60.0)
    for loop in loops:
        loop.close()


atexit.register(close_pools)
