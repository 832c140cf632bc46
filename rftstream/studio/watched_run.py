"""Follows one run for the studio: one thread keeps catalog, history and status, and another reads bodies. A third sees
whether the run goes on, since a look of the first takes long where much is to be read, or the machine is busy.

A transport belongs to one thread, so each of the first two opens the run itself. None writes to the run, and nothing
waits for them: a page shows the last known state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rftstream.config.sections import RunConfig
from rftstream.contracts.feedback import Feedback
from rftstream.data.feedback.fold import GroupStatus
from rftstream.errors import ConfigError, RftError
from rftstream.queries.catalog.counts import CatalogCounts
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.finding import find_vote_statuses
from rftstream.queries.catalog.moments import Moment, find_moment
from rftstream.queries.curves.history import HistoryReader
from rftstream.queries.people.feedback import FeedbackRecords, FeedbackView
from rftstream.queries.records.shown import PLAIN, CompletionReader, open_reader
from rftstream.queries.state.following import RunFollower, with_present_state
from rftstream.queries.state.status import Status
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.notes import RunNotes
from rftstream.runs.writes.feedback import VoteRevisions
from rftstream.service.role import Log

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

PERIOD_S = 1.0
"""Seconds between two polls of a run that somebody looks at."""
IDLE_PERIOD_S = 15.0
"""Seconds between two polls of a run that nobody looks at."""
LOOKED_AT_S = 30.0
"""Seconds after a request for which a run counts as looked at."""
NO_NOTES = RunNotes(RunFolder(Path(os.devnull)))
BEHIND_S = 10.0
"""Seconds behind a run that goes on from which pages say so."""
OVER = ("finished", "stopped")
"""States of a run whose log grows no more."""
PEOPLE_S = 10.0
"""Seconds after which votes are judged again, even without new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The state of a run at the last poll. `WatchedRun` replaces it as a whole."""

    revision: int = 0
    """Number that grows with each change. Browsers are notified of it."""
    status: Status | None = None
    counts: CatalogCounts | None = None
    """Counts of the catalog. None: there is no catalog, since the run has not begun."""
    share_read: float = 0.0
    """Share of the log that the catalog has read, 0 to 1."""
    is_read: bool = False
    """Whether the catalog has read all that the log held when the studio began. Until then a count of 0 and an empty
    list say nothing."""
    num_texts_left: int = 0
    """Rollouts whose texts the catalog has still to read."""
    error: str = ""
    """Why the run cannot be read now; empty if it can."""
    read_at: float = 0.0
    """Time at which the newest look at the log began, in seconds since 1970; 0 before its end."""
    was_over: bool = False
    """Whether the run was over when that look began, so that the log has no more than it found."""


class WatchedRun:
    """Follows one run. The studio makes one for each run, calls `start`, and at the end `stop`.

    `look` runs a function in the thread that may read bodies; `catalog` opens the catalog for a page; `moment` finds
    the moment that a page requests.
    """

    def __init__(self, name: str, open_it: Callable[[], OpenRun]) -> None:
        """`name`: the run's name in addresses. `open_it` opens the run; each thread calls it once."""
        self.name = name
        self.snapshot = RunSnapshot()
        self.listener: Callable[[], None] = lambda: None
        """Called in the following thread after each change."""
        self._open = open_it
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"look-{name}")
        self._mine: OpenRun | None = None
        self._reader: CompletionReader | None = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Held while the snapshot is replaced."""
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._asked_at = 0.0
        self._follower: RunFollower | None = None
        self.place = name
        """The run's folder, for commands in any shell on this host; its name before the first look."""
        self._has_folder = False
        """Whether the run had a folder on this host when it was opened."""
        self.feedback = FeedbackRecords()
        """The records that `people` has read."""
        self._notes: RunNotes | None = None
        self.revisions = VoteRevisions()
        """Newest votes of annotators, for code in `look` that writes votes."""

    @property
    def config(self) -> RunConfig | None:
        """Return the settings of the run; None before the first look."""
        return None if self._follower is None else self._follower.run.config

    @property
    def history(self) -> HistoryReader | None:
        """Return steps, evaluations and announcements so far; None before the first look."""
        return None if self._follower is None else self._follower.history

    @property
    def notes(self) -> RunNotes:
        """Return the notes of people. There are none before the first look."""
        follower = self._follower
        if self._notes is None and follower is not None:
            self._notes = RunNotes(follower.run.folder)
        return self._notes or NO_NOTES

    # ------------------------------------------------------------------------------------------ following

    def start(self) -> None:
        """Begin to follow the run in two threads."""

        def watch_state() -> None:
            while not self._stopped.wait(PERIOD_S):
                if _is_recent(self._asked_at):
                    with contextlib.suppress(RftError):  # the next look says it
                        self.check_state()

        for name, target in (("follow", self._follow), ("state", watch_state)):
            self._threads.append(threading.Thread(target=target, name=f"{name}-{self.name}", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End all threads and close what they opened."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        if not self._threads:
            self._close_followed()
        self._pool.submit(self._close_mine).result()
        self._pool.shutdown()

    def touch(self) -> None:
        """Record that somebody looks at the run, so that it is polled more often."""
        is_new = not _is_recent(self._asked_at)
        self._asked_at = time.monotonic()
        if is_new:
            self._wake.set()

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                self.follow_once()
                self._wake.wait(PERIOD_S if _is_recent(self._asked_at) else IDLE_PERIOD_S)
                self._wake.clear()
        finally:
            self._close_followed()

    def check_state(self) -> None:
        """Record at once if a session of the run has begun or ended. Only one thread calls it, or a test."""
        status, follower = self.snapshot.status, self._follower
        if status is None or follower is None or status.live == follower.run.folder.is_live():
            return
        found = self.look(lambda run, _: with_present_state(status, run))
        with self._lock:
            self.snapshot = replace(self.snapshot, status=found, revision=self.snapshot.revision + 1)
        self.listener()
        self._wake.set()

    def follow_once(self) -> None:
        """Poll the run once, and record the changes. Only the following thread calls it, or a test."""
        try:
            found = self._look_at_it()
        except RftError as error:
            found = replace(self.snapshot, error=str(error))
        except Exception as error:  # an error of ours must not end the pages of other runs
            log.exception("%s: cannot be looked at", self.name)
            found = replace(self.snapshot, error=f"{type(error).__name__}: {error}")
        with self._lock:
            known = self.snapshot
            changed = bool(self.behind_s() and not found.error)  # pages said that they were behind
            changed = changed or _changed(known, found)
            same = replace(known, read_at=found.read_at, was_over=found.was_over)
            self.snapshot = replace(found, revision=known.revision + 1) if changed else same
        if changed:
            self.listener()

    def _look_at_it(self) -> RunSnapshot:
        if self._follower is None:
            self._follower = RunFollower(self._open())
            self._has_folder = self._follower.run.folder.path.is_dir()
            self.place = shlex.quote(str(self._follower.run.folder.path.absolute()))
        if self._has_folder and not (path := self._follower.run.folder.path).is_dir():
            self._close_followed()
            self._pool.submit(self._close_mine)
            raise ConfigError(f"{path}: the run folder is gone; if it was moved, start a studio on its new place")
        began = time.time()
        found = self._follower.look(self._notes_progress)
        if found.has_more:
            self._wake.set()
        return replace(
            self.snapshot,
            status=with_present_state(found.status, self._follower.run),
            counts=found.counts,
            share_read=found.share_read,
            is_read=self.snapshot.is_read or found.is_read,
            num_texts_left=self._follower.updater.texts.num_left,
            error="",
            read_at=began,
            was_over=found.status.state in OVER,
        )

    def behind_s(self) -> float:
        """Return how many seconds a page is behind a run that goes on, or that ended since the newest look; 0 if they
        are few."""
        snapshot = self.snapshot
        since = time.time() - snapshot.read_at
        grows = snapshot.status is not None and not (snapshot.was_over and snapshot.status.state in OVER)
        return since if grows and since > BEHIND_S else 0.0

    def _notes_progress(self) -> bool:
        """Tell during the first look how much is read. Return whether the look should end early."""
        follower, known = self._follower, self.snapshot
        share = known.share_read if follower is None or not follower.updater.total else follower.share_read
        if known.status is None and share != known.share_read:
            with self._lock:
                self.snapshot = replace(known, share_read=share, revision=known.revision + 1)
            self.listener()
        return self._stopped.is_set()

    def _close_followed(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    # ------------------------------------------------------------------------------------------ asking

    def look(self, question: Callable[[OpenRun, CompletionReader], Answer]) -> Answer:
        """Call a function with the run's log, in the thread that may read bodies. Any other thread may call this, and
        waits."""
        return self._pool.submit(self._asked, question).result()

    def _asked(self, question: Callable[[OpenRun, CompletionReader], Answer]) -> Answer:
        if self._mine is None:
            self._mine = self._open()
        if self._reader is None or self._reader is PLAIN:
            self._reader = open_reader(self._mine, dims=False)
        if self.config is not None and self.config is not self._mine.config:  # as the follower knows them now
            self._mine = replace(self._mine, config=self.config)
        return question(self._mine, self._reader)

    def people(self) -> FeedbackView:
        """Return the questions and votes of the run. They are judged again if there are new ones, or after PEOPLE_S,
        since the state of a group decides the effect of a vote on it."""

        def statuses(votes: Sequence[Feedback]) -> Mapping[str, GroupStatus]:
            catalog = self.catalog()
            if catalog is None:
                return {}
            with catalog:
                return find_vote_statuses(catalog, votes)

        def read(run: OpenRun, _: object) -> FeedbackView:
            return self.feedback.view(Log(run.transport), run.config, statuses, for_s=PEOPLE_S)

        return self.look(read)

    def _close_mine(self) -> None:
        if self._mine is not None:
            self._mine.transport.close()
            self._mine = None

    def catalog(self) -> CatalogReader | None:
        """Open the catalog for a page, which closes it. None if there is no catalog yet."""
        follower = self._follower
        return None if follower is None else follower.updater.open_catalog()

    def moment(self, text: str) -> Moment:
        """Return the moment that a page requests; an empty text is now. ConfigError explains an invalid one."""
        return Moment() if self.history is None else find_moment(text, self.history)


def _is_recent(asked_at: float) -> bool:
    return time.monotonic() - asked_at < LOOKED_AT_S


def _changed(before: RunSnapshot, after: RunSnapshot) -> bool:
    """Return whether anything that a page shows has changed."""
    if before.status is None or after.status is None or before.error != after.error:
        return before != after
    return (
        before.counts != after.counts
        or (before.share_read, before.num_texts_left) != (after.share_read, after.num_texts_left)
        or before.status.to_json() != after.status.to_json()
    )
