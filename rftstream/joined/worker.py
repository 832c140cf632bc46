"""The role's thread of a joined loop, and what all joined loops share."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # its hook at the end comes after the one below
import itertools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rftstream.backends.joined import LoopLeft
from rftstream.config.sections import RunConfig
from rftstream.desk import AnswerRefused, Desk
from rftstream.errors import RftError
from rftstream.launch.host import DEADLINE_S, Worker
from rftstream.launch.joining import WAIT_S, StoppedError
from rftstream.runs.folder import RunFolder
from rftstream.service.service import Service

log = logging.getLogger(__name__)

_numbers = itertools.count()


class RoleThread:
    """The thread in which a role runs for a joined loop. `join` makes it and calls `start`; the loop calls `close`."""

    def __init__(self, role: str, config: RunConfig, folder: RunFolder, desk: Desk) -> None:
        number, host = next(_numbers), socket.gethostname().partition(".")[0]
        self.process = f"{role}-joined-{host}-{os.getpid()}" + (f"-{number}" if number else "")
        self._desk = desk
        self._worker = Worker(
            config=config,
            folder=folder,
            role=role,
            process=self.process,
            device=None,
            stop=lambda: desk.stops,
            deadline_s=DEADLINE_S,
            wait_s=WAIT_S,
            parent=None,
            desk=desk,
            after_tick=self._ticked,
        )
        self._thread = threading.Thread(target=self._work, name=self.process, daemon=True)

    def start(self) -> None:
        """Start the role, and wait until it works. Its errors are raised."""
        self._thread.start()
        # At the end of the interpreter Python waits for the threads of executors. Those of the role wait for the loop,
        # which may have raised outside of a `with` block.
        close = weakref.WeakMethod(self.close)
        threading._register_atexit(lambda: (own := close()) and own())  # type: ignore[attr-defined]
        desk = self._desk
        try:
            desk.wait(lambda: desk.has_begun or desk.has_ended)
        except BaseException:  # ctrl-C
            desk.stop()
            raise
        desk.check()

    def close(self) -> None:
        """Let the role commit what was answered, give back the rest, and leave."""
        self._desk.leave()
        self._thread.join()

    def _work(self) -> None:
        error: BaseException | None = RftError("the role's thread has died without saying why")
        try:
            self._worker.run(metrics_port=0)
            error = None
        except (StoppedError, LoopLeft):
            error = None
        except RftError as found:
            error = found
            log.info("%s: %s", self.process, found)
        except BaseException as found:
            error = found
            log.exception("%s", self.process)
        finally:  # nothing else wakes the loop
            self._desk.end(error)

    def _ticked(self, service: Service) -> None:
        if service.view.manifest is not None and not self._desk.has_begun:
            with self._desk.changed:
                self._desk.has_begun = True
                self._desk.notify()


def plain_number(value: Any, what: str) -> float:
    """Return a number that a loop hands in; a tensor with one element is a number, too. AnswerRefused for others."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise AnswerRefused(f"{what}: got a {type(value).__name__}, expected a number") from None


def named_numbers(values: Any, what: str, number: Callable[[Any, str], float] = plain_number) -> dict[str, float]:
    """Return the numbers by name that a loop hands in. `number` reads each. AnswerRefused for others."""
    if not isinstance(values, Mapping):
        raise AnswerRefused(f"{what}: got a {type(values).__name__}, expected a dict of numbers by name")
    return {str(name): number(value, f"{what}.{name}") for name, value in values.items()}


class JoinedLoop:
    """Base of joined loops. `rftstream.join` makes a subclass; use it in a `with` block, or call `close`."""

    _desk: Desk

    def __init__(self, desk: Desk, thread: RoleThread | None = None) -> None:
        self._desk, self._thread = desk, thread

    @property
    def process(self) -> str:
        """The name of this worker in `status`, logs and claims."""
        return "" if self._thread is None else self._thread.process

    @property
    def has_ended(self) -> bool:
        """Whether no more work will come: the run has finished, or `stop` was called."""
        return self._desk.has_ended or self._desk.stops

    def stop(self) -> None:
        """Leave: loops over work end, and what is not answered is given back. Any thread and any signal handler may
        call it."""
        self._desk.stop()

    def close(self) -> None:
        """Commit what was handed in, give back the rest, and leave the run. Errors of the role are raised."""
        if self._thread is not None:
            self._thread.close()
        self._desk.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        num_left = self._desk.num_taken
        try:
            self.close()
        except BaseException:
            if error is None:
                raise
            return
        if isinstance(error, KeyboardInterrupt):
            text = "%s: interrupted; it has left the run in order, what was handed in counts, and %d in hand went back"
            log.warning(text, self.process, num_left)

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "works"
        return f"<{type(self).__name__} {self.process}: {state}>"
