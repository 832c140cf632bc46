"""An event loop in a separate thread: code without asyncio uses it to drive engines that need asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread. Its owner makes it, passes it work with `call`, `run` and `soon`, and ends it
    with `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the loop has ended."""
        return self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, wait for its end, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop and await it from the caller's. Cancelling the caller cancels it."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop's thread, after all earlier requests, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel everything that still runs, and end the loop and its thread."""
        if self.closed:
            return
        self.call(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class PendingCall:
    """A coroutine that is started once and polled until it has ended. A policy makes it."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None

    def ask(self, loop: LoopThread, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Start the coroutine on the first call. Return whether it has ended, or raise its exception."""
        if self._future is None:
            self._future = loop.begin(work())
        if not self._future.done():
            return False
        future, self._future = self._future, None
        future.result()
        return True


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
