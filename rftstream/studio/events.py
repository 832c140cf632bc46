"""Notifies browsers of changes in a run. Each event has the run's revision as its id. So a browser that was away learns
at once whether it missed something, and gets one event, however often the run changed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rftstream.studio.watched_run import WatchedRun

ALIVE_S = 20.0
"""Seconds between two comments on an idle connection, so that no proxy closes it."""
MAX_LISTENERS = 500
"""Most listeners over all runs. One more is answered with 503."""


class RunEvents:
    """The browsers that listen to the runs of a studio. The app makes one in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Event] = {}
        self.num_listeners = 0

    def attach(self, run: WatchedRun) -> None:
        """Receive a run's changes from now on, in any thread."""

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._told, run.name)

        run.listener = changed

    def _told(self, name: str) -> None:
        """Wake all listeners of the run. Later listeners wait for a new event."""
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            waiting.set()

    async def stream(self, run: WatchedRun, last_id: str) -> AsyncIterator[bytes]:
        """Yield the events of a run as long as the browser listens. `last_id`: the last event that the browser got."""
        self.num_listeners += 1
        try:
            yield b"retry: 2000\n\n"
            seen = last_id or str(run.snapshot.revision)
            while True:
                run.touch()
                waiting = self._waiting.setdefault(run.name, asyncio.Event())
                revision = str(run.snapshot.revision)
                if revision != seen:
                    seen = revision
                    yield f"id: {revision}\nevent: changed\ndata: {revision}\n\n".encode()
                    continue
                try:
                    await asyncio.wait_for(waiting.wait(), ALIVE_S)
                except TimeoutError:
                    # A page that is behind its run is rendered anew, to say so.
                    yield f"event: changed\ndata: {revision}\n\n".encode() if run.behind_s() else b": alive\n\n"
        finally:
            self.num_listeners -= 1
