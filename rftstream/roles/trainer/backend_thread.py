"""The trainer's backend, which is used in its own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

from rftstream.backends.base import Backend

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class BackendThread:
    """A backend, and the thread in which all its methods are called. The trainer's step makes it. At each recovery it
    calls `open`, then `load` or `begin_anew`. It sets `is_touched` before any other change of the weights. `close`
    comes last."""

    def __init__(self, backend: Backend, executor: Executor) -> None:
        """`executor` must have one thread."""
        self.backend = backend
        self.executor = executor
        self.is_touched = False
        """Whether the backend has trained or loaded anything since it was opened."""
        self._is_open = False

    def asked(self, function: Callable[Given, Answer]) -> Callable[Given, Answer]:
        """Return a function that calls the given one in the backend's thread and waits for the result."""

        def ask(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            return self.executor.submit(function, *args, **kwargs).result()

        return ask

    def open(self) -> None:
        """Open the backend unless it is open."""
        if not self._is_open:
            self.asked(self.backend.open)()
            self._is_open = True

    def give_up(self) -> None:
        """Let a backend that waits for somebody else, in its thread or in that of the checkpoints, wait no more. The
        next recovery gives it another state."""
        if self.is_touched and hasattr(self.backend, "give_up"):
            self.backend.give_up()

    def stop_update(self) -> None:
        """Ask a backend that can leave a batch half trained to do so."""
        if hasattr(self.backend, "stopping"):
            self.backend.stopping.ask()

    def note_step(self, version: int) -> None:
        """Tell a backend with a loop of somebody else that a version is on the log."""
        if hasattr(self.backend, "note_step"):
            self.backend.note_step(version)

    def load(self, folder: Path) -> None:
        """Load the state of a checkpoint into the backend."""
        self.is_touched = True
        self.asked(self.backend.load)(folder)

    def begin_anew(self) -> None:
        """Reset the backend to the state in which it was opened."""
        if self.is_touched:
            self.asked(self.backend.close)()
            self.asked(self.backend.open)()
            self.is_touched = False

    def close(self) -> None:
        """Close the backend and end the thread."""
        if self._is_open:
            self.asked(self.backend.close)()
        self.executor.shutdown()
