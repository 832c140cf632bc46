"""Watches a run's topics beside the work of a worker, and detects changes that would harm the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from rftstream import metrics
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.errors import RecordsDeleted, RftError
from rftstream.runs.log_settings import dangers, in_words, is_lost
from rftstream.service.role_spec import RoleSpec
from rftstream.service.service import Service
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

LOOK_AT_LOG_S = 30.0
"""Seconds between two checks of the settings of the topics that the role reads."""


class LogWatch:
    """Checks the topics that a worker may see, twice a minute, and reports problems at once.

    The checks run in a separate thread with separate clients, since the worker may be busy for minutes: with a long
    step, or with a commit to a log that does not answer. The worker calls `start` first, `act` between two slices of
    work, and `close` last.
    """

    def __init__(self, config: RunConfig, run: str, spec: RoleSpec) -> None:
        self._config, self._run = config, run
        self._reads, self._looks_at_all = spec.reads(config), spec.name == RoleName.feeder
        """The topics that the role reads. The feeder looks at all: some are read by no role that can pause the run."""
        self._found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._closed = threading.Event()

    def start(self, open_log: Callable[[], Transport], *, every_s: float = LOOK_AT_LOG_S) -> None:
        """Check at once, and then every so many seconds. The thread opens the log, and closes it."""
        threading.Thread(target=self._watch, args=(open_log, every_s), name="look at the log", daemon=True).start()

    def look(self, transport: Transport) -> None:
        """Check the topics once. TransportError if the log does not answer."""
        found = dangers(transport, self._config, begun=True, topics=None if self._looks_at_all else self._reads)
        # Rights may hide a topic that the role does not read.
        found = [text for text in found if text.partition(":")[0] in self._reads or not is_lost([text])]
        metrics.WRONG_TOPICS.set(len(found))
        if found:
            hint = "" if is_lost(found) else "; single roles pause the run for it: then `rftstream unpause`"
            log.error("%s%s", in_words(self._run, found), hint)
            self._found.put(found)

    def act(self, service: Service) -> None:
        """Pause the run if the last checks found a danger. RecordsDeleted if a topic was deleted."""
        while not self._found.empty():
            found = self._found.get()
            why = in_words(self._run, found)
            if is_lost(found):
                raise RecordsDeleted(why)
            service.pause_run(why)

    def close(self) -> None:
        """End the thread after its current check."""
        self._closed.set()

    def _watch(self, open_log: Callable[[], Transport], every_s: float) -> None:
        transport: Transport | None = None
        try:
            while not self._closed.is_set():
                try:
                    transport = open_log() if transport is None else transport
                    self.look(transport)
                except RftError as error:  # the worker notices it by itself, and reports it
                    log.debug("the topics were not looked at: %s", error)
                self._closed.wait(every_s)
        finally:
            if transport is not None:
                transport.close()
