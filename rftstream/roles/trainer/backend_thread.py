"""The trainer's backend, which lives in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

from rftstream.backends.base import Backend

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class BackendThread:
    """A backend, and the thread in which all its methods are called. The trainer's step makes it and calls `open` at
    each recovery, then `load` or `begin_anew`; before anything else that changes the weights it sets `is_touched`;
    `close` comes last."""

    def __init__(self, backend: Backend, executor: Executor) -> None:
        """`executor`: of one thread."""
        self.backend = backend
        self.executor = executor
        self.is_touched = False
        """Whether the backend has trained or loaded anything since it was opened."""
        self._is_open = False

    def asked(self, function: Callable[Given, Answer]) -> Callable[Given, Answer]:
        """Return a function that calls the given one in the thread of the backend and waits for the answer."""

        def ask(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            return self.executor.submit(function, *args, **kwargs).result()

        return ask

    def open(self) -> None:
        """Open the backend unless it is open."""
        if not self._is_open:
            self.asked(self.backend.open)()
            self._is_open = True

    def load(self, folder: Path) -> None:
        """Give the backend the state of a checkpoint."""
        self.is_touched = True
        self.asked(self.backend.load)(folder)

    def begin_anew(self) -> None:
        """Bring the backend back to the state that it was opened with."""
        if self.is_touched:
            self.asked(self.backend.close)()
            self.asked(self.backend.open)()
            self.is_touched = False

    def close(self) -> None:
        """Close the backend and end the thread."""
        if self._is_open:
            self.asked(self.backend.close)()
        self.executor.shutdown()
