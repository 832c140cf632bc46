"""The desk between a role and a loop outside of it, such as a user's own sampler (`rftstream.join`).

The role lays work on the desk, in its own thread. The loop takes it in another thread and hands in answers, which the
role collects. The role may withdraw work at any time, for example because another process owns it now. An answer that
comes later counts for nothing. Each side calls only its own methods:

    role   offer -> collect, or withdraw; end
    loop   take -> draft (any number of times) -> answer
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

from rftstream.errors import RftError


class WorkState(Enum):
    """State of a work item."""

    waiting = "waiting"
    """On the desk, for the loop to take."""
    taken = "taken"
    """In the loop's hands."""
    answered = "answered"
    """Answered. The role has not collected the answer, or has."""
    withdrawn = "withdrawn"
    """Not the loop's any more; an answer counts for nothing."""


class WorkItem:
    """Work on a desk. `Desk.offer` makes it."""

    __slots__ = ("answer", "draft", "key", "state", "work")

    def __init__(self, key: str, work: Any) -> None:
        self.key, self.work = key, work
        self.state = WorkState.waiting
        self.draft: Any = None
        """Part of the answer that the loop has saved."""
        self.answer: Any = None


class Desk:
    """Work of one role for one loop. `rftstream.join` makes it for both sides. A played loop of a simulation uses it
    from the role's own thread, and never waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards everything here. Subclasses add their own facts under it."""
        self.has_begun = False
        """Whether the role works."""
        self.has_ended = False
        """Whether no more work will come."""
        self.stops = False
        """Whether the loop wants to leave. The role then gives back what is not answered."""
        self.error: BaseException | None = None
        """Why the role has ended; None if it ended as it should, or has not."""
        self._open: dict[str, WorkItem] = {}
        self._answered: list[WorkItem] = []
        self.num_taken = 0
        """Number of open items in the loop's hands."""
        self._listeners: set[Callable[[], object]] = set()
        self.was_told = False
        """Whether the loop was told that there will be no more work."""
        self._has_news = False
        """Whether items were laid on the desk since the loop was last woken."""

    # ------------------------------------------------------------------------------------------ for the role

    def offer(self, key: str, work: Any) -> WorkItem:
        """Lay a work item on the desk. No two open items share a key. A loop that waits is woken by `collect`, once for
        all items: threads that wake for each one take the processor from each other."""
        item = WorkItem(key, work)
        with self.changed:
            self._open[key] = item
            self._has_news = True
        return item

    def find(self, key: str) -> WorkItem | None:
        """Return an open item, which has no answer yet."""
        return self._open.get(key)

    def withdraw(self, key: str) -> None:
        """Take an item back, also from the loop's hands. Unknown keys are ignored."""
        with self.changed:
            items = [item for item in self._answered if item.key == key]
            self._answered = [item for item in self._answered if item.key != key]
            if (item := self._open.pop(key, None)) is not None:
                items.append(item)
            for item in items:
                self.num_taken -= item.state is WorkState.taken
                item.state = WorkState.withdrawn

    def collect(self, wait_s: float = 0.0) -> list[WorkItem]:
        """Return the items that were answered, each once. Wait at most `wait_s` seconds for the answers to all that
        are on the desk: a role that wakes for each one alone takes the processor from the loop."""
        with self.changed:
            if self._has_news:
                self.notify()
            if wait_s:
                self.changed.wait_for(lambda: (self._answered and not self._open) or self.stops, wait_s)
            answered, self._answered = self._answered, []
        return answered

    @property
    def num_active(self) -> int:
        """Number of items that are open, or answered and not collected."""
        return len(self._open) + len(self._answered)

    def wait(self, until: Callable[[], object]) -> None:
        """Wait until something is true that a change of the desk may make true."""
        with self.changed:
            self.changed.wait_for(until)

    def end(self, error: BaseException | None = None) -> None:
        """Hand out no more work. Open items are withdrawn. `error` is raised in the loop."""
        with self.changed:
            for item in self._open.values():
                item.state = WorkState.withdrawn
            self._open.clear()
            self.num_taken = 0
            self.has_ended = True
            self.error = self.error or error
            self.notify()

    def notify(self) -> None:
        """Wake everybody who waits for a change. The caller holds `changed`."""
        self._has_news = False
        self.changed.notify_all()
        listeners, self._listeners = self._listeners, set()
        for listener in listeners:
            listener()

    # ------------------------------------------------------------------------------------------ for the loop

    def take(self, most: int = 1, *, wait_s: float | None = None) -> list[WorkItem]:
        """Return up to `most` waiting items, oldest first. Wait for the first one, at most `wait_s` seconds. Empty if
        the time is over, or if there will be no more. Errors of the role are raised."""
        with self.changed:
            self.changed.wait_for(self._can_take, wait_s)
            return self._take(most)

    async def take_async(self, most: int = 1) -> list[WorkItem]:
        """Return the same as `take`, and let other tasks of the event loop work meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            with self.changed:
                if self._can_take():
                    return self._take(most)
                has_changed = asyncio.Event()
                wake = partial(loop.call_soon_threadsafe, has_changed.set)
                self._listeners.add(wake)
            try:
                await has_changed.wait()
            finally:  # an event loop that was interrupted is closed, and waking it is an error
                with self.changed:
                    self._listeners.discard(wake)

    def take_back(self) -> None:
        """Lay what the loop has in hand on the desk again, for a new loop: the old one was interrupted."""
        with self.changed:
            for item in self._open.values():
                item.state = WorkState.waiting
            self.num_taken = 0
            self.notify()

    def draft(self, item: WorkItem, draft: Any) -> bool:
        """Replace what there is of an answer. Return False if the item was withdrawn."""
        with self.changed:
            self._check_own(item)
            if item.state is not WorkState.withdrawn:
                item.draft = draft
            return item.state is not WorkState.withdrawn

    def answer(self, item: WorkItem, answer: Any) -> bool:
        """Hand in an answer. Return False if the item was withdrawn. Errors of the role are raised."""
        with self.changed:
            self.check()
            self._check_own(item)
            if item.state is WorkState.withdrawn:
                return False
            self.num_taken -= item.state is WorkState.taken
            item.state, item.answer = WorkState.answered, answer
            del self._open[item.key]
            self._answered.append(item)
            if not self._open:
                self.notify()
        return True

    def stop(self) -> None:
        """Ask the role to leave."""
        with self.changed:
            self.stops = True
            self.notify()

    def leave(self) -> None:
        """Note that the loop is gone: nothing more is answered."""
        self.stop()

    def check(self) -> None:
        """Raise the error by which the role ended, if there is one."""
        if self.error is not None:
            raise self.error

    def _check_own(self, item: WorkItem) -> None:
        if item.state is not WorkState.withdrawn and self._open.get(item.key) is not item:
            raise AnswerRefused("it belongs to another loop that has joined, expected work that this one has given out")

    def _can_take(self) -> bool:
        return self.has_ended or self.stops or len(self._open) > self.num_taken

    def _take(self, most: int) -> list[WorkItem]:
        self.check()
        if self.has_ended or self.stops:
            self.was_told = True
            return []
        found = list(islice((item for item in self._open.values() if item.state is WorkState.waiting), most))
        for item in found:
            item.state = WorkState.taken
        self.num_taken += len(found)
        return found


class AnswerRefused(RftError, ValueError):
    """An answer of a loop cannot be used. Nothing of it reaches the log, and the work stays in hand."""
