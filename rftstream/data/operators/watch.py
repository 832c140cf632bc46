"""A watch over hanging operators: feeder or buffer waits for them, and nothing else would report it."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback

log = logging.getLogger(__name__)

HANGS_AFTER_S = 5.0
"""Seconds after which a silent operator is named in the log; again after twice the time, and so on."""

STUCK_AFTER_S = 30.0
"""Seconds without any other Python code running after which faulthandler prints the stack of an operator."""


class OperatorWatch:
    """Names operators that do not answer. `workers/feeder.py` and `workers/buffer.py` make one each and pass it to the
    pipeline, which calls `asked` and `answered`. The watch has its own thread, since the role's thread waits for the
    operator.

    A loop in C, such as an endless regular expression, blocks that thread as well. Then faulthandler prints the stack;
    the name of the problem follows when the operator has answered."""

    def __init__(self, hangs_after_s: float = HANGS_AFTER_S, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._hangs_after_s = hangs_after_s
        self._stuck_after_s = stuck_after_s
        self._asked: tuple[str, float, int] | None = None
        """The call in progress: the operator and problem, when the call began, and its thread."""
        self._said: tuple[str, float, int] | None = None
        """The call that the last complaint was about."""
        self._next_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> OperatorWatch:
        """Start watching. Return itself."""
        self._thread = threading.Thread(target=self._look_on, name="operator-watch", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if sys.stderr is not None:
            faulthandler.cancel_dump_traceback_later()

    def asked(self, what: str) -> None:
        """Record that an operator is called. `what` names it and the problem or group."""
        self._asked = what, time.monotonic(), threading.get_ident()

    def answered(self) -> None:
        """Record that it has answered; log a message if it took long."""
        asked, self._asked = self._asked, None
        if asked is not None and (took := time.monotonic() - asked[1]) > self._hangs_after_s:
            log.warning("%s: the operator took %.1f s to answer", asked[0], took)

    def _look_on(self) -> None:
        while not self._ended.wait(self._hangs_after_s / 5):
            self._arm()
            asked = self._asked
            if asked is None:
                continue
            if asked is not self._said:
                self._said, self._next_s = asked, self._hangs_after_s
            since = time.monotonic() - asked[1]
            if since >= self._next_s:
                self._next_s *= 2
                frame = sys._current_frames().get(asked[2])
                where = traceback.extract_stack(frame)[-1] if frame is not None else None
                place = "" if where is None else f" (now at {where.filename}:{where.lineno})"
                log.error("%s: the operator has not answered for %.0f s, and all wait for it%s", asked[0], since, place)

    def _arm(self) -> None:
        """Let faulthandler print the stacks unless this is called again in time."""
        try:
            faulthandler.dump_traceback_later(self._stuck_after_s, file=sys.stderr)
        except (AttributeError, ValueError, OSError, RuntimeError):  # there is no stderr with a descriptor
            return
