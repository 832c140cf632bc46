"""Dead groups that are to be put back: requests on `control`, each done once as a group with the next attempt.

Which attempts were admitted is told by `tasks`, of which the headers are read when the first request comes. Where
retention has deleted the tasks, `outcomes` tells it. A request that is done is taken back in the transaction that
admits its tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.contracts.control import Request, RequestKind
from rftstream.contracts.ids import next_attempt, split_group_id
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.service.role import Log

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retry:
    """A group to be admitted."""

    group: str
    """With the new attempt."""
    taskset: str
    index: int
    stored: Mapping[int, str]
    """Sibling -> where its rollout stands, for those that need not be sampled again."""


@dataclass(frozen=True, slots=True)
class _Asked:
    group: str
    """The group that died."""
    taskset: str
    index: int
    stored: Mapping[int, str]
    expires_at: float


class AdmittedAttempts:
    """Groups with an attempt above 0 whose tasks are on the log. `Retries` makes it, asks whether a group is in it, and
    adds what is admitted. The log is read when it is asked for the first time, which seldom happens."""

    def __init__(self, log_: Log) -> None:
        self._log = log_
        self._is_read = False
        self._groups: set[str] = set()

    def __contains__(self, group: str) -> bool:
        if not self._is_read:
            groups = {record.header("group_id") or b"" for record in self._log.read("tasks", bodies=False)}
            self._groups = {group.decode() for group in groups if not group.endswith(b"/0")}
            self._is_read = True
        return group in self._groups

    def add(self, group: str) -> None:
        """Take a group whose tasks are on the log now."""
        if self._is_read and not group.endswith("/0"):  # else reading finds it
            self._groups.add(group)


class Retries:
    """The dead groups that are to be put back. The feeder's step makes it at each recovery and tells it what stands on
    the log: `asked` and `taken_back` for requests, `decided` for outcomes, `admitted` for tasks that it commits. For
    each transaction it calls `next` until there is none."""

    def __init__(self, log_: Log) -> None:
        self._asked: dict[bytes, _Asked] = {}
        """Requests by their keys, in order."""
        self._dead: set[str] = set()
        self._decided_attempts: set[str] = set()
        """Groups with an attempt above 0 that have an outcome."""
        self._admitted = AdmittedAttempts(log_)

    def __len__(self) -> int:
        return len(self._asked)

    def asked(self, request: Request, key: bytes) -> None:
        """Take a request, if it is one to put a group back."""
        if request.kind is not RequestKind.retry_dead:
            return
        group, stored = request.arguments.get("group"), request.arguments.get("stored", ())
        parts = split_group_id(group) if isinstance(group, str) else None
        if not isinstance(group, str) or parts is None or not isinstance(stored, list | tuple):
            log.error("request %s: names no group to put back: %r; passed over", request.request_id, group)
            return
        places = {sibling: place for sibling, place in enumerate(stored) if isinstance(place, str)}
        self._asked[key] = _Asked(group, parts[0], parts[2], places, request.expires_at)

    def taken_back(self, key: bytes) -> None:
        """Forget a request: it is done, or whoever asked does not want it any more."""
        self._asked.pop(key, None)

    def decided(self, outcome: GroupOutcome) -> None:
        """Take the outcome of a group."""
        if outcome.result is GroupResult.dead and not outcome.late:
            self._dead.add(outcome.group_id)
        if not outcome.group_id.endswith("/0"):
            self._decided_attempts.add(outcome.group_id)

    def admitted(self, group: str) -> None:
        """Note that the tasks of a group are on the log."""
        self._admitted.add(group)

    def next(self, now: float, answered: list[bytes]) -> Retry | None:
        """Return the next group to put back, or None. Keys of requests that are done with it, or were before, go to
        `answered`.

        A request for a group that is not known to be dead waits: its outcome may not have been read yet."""
        for key, asked in list(self._asked.items()):
            if key in answered or asked.group not in self._dead:
                continue
            if asked.expires_at <= now:
                log.info("%s: the request to put it back has expired", asked.group)
                del self._asked[key]
                continue
            taken = {self._asked[other].group for other in answered}
            answered.append(key)
            group = next_attempt(asked.group)
            if asked.group in taken or group in self._decided_attempts or group in self._admitted:
                continue
            return Retry(group, asked.taskset, asked.index, asked.stored)
        return None
