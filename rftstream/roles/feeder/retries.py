"""Dead groups that are to be put back: requests on `control`, each done once as a group with the next attempt.

Which attempts were admitted is told by `tasks`, of which the headers are read when the first request comes. Where
retention has deleted the tasks, `outcomes` tells it, of which the headers are read when a request comes, for the groups
that it is about: few are ever asked for. A request that is done is taken back in the transaction that
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
    """The group, with the number of the new attempt."""
    taskset: str
    index: int
    stored: Mapping[int, str]
    """Sibling -> place of its rollout on the log, for siblings that need not be sampled again."""


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
        self._log = log_
        self._results: dict[str, str | None] = {}
        """Groups that somebody asks about -> what became of them; None: they have no outcome."""
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
        """Forget a request: it is done, or was taken back."""
        self._asked.pop(key, None)

    def decided(self, outcome: GroupOutcome) -> None:
        """Take the outcome of a group."""
        if outcome.group_id in self._results and not outcome.late:
            self._results[outcome.group_id] = outcome.result

    def _look_up(self) -> None:
        """Read the outcomes of groups that are asked about for the first time, by their headers: a group is decided by
        the first record about it that the buffer wrote."""
        asked = {group for one in self._asked.values() for group in (one.group, next_attempt(one.group))}
        unknown = {group.encode(): group for group in asked.difference(self._results)}
        if not unknown:
            return
        found: dict[str, str | None] = dict.fromkeys(unknown.values())
        for record in self._log.read("outcomes", bodies=False):
            group = unknown.get(record.header("group_id") or b"")
            is_outcome = record.header("contract") == b"group_outcome" and record.header("late") is None
            if group is None or not is_outcome or found[group] is not None:
                continue
            if self._log.is_claimed(record):
                found[group] = (record.header("result") or b"").decode("ascii", "replace")
        self._results |= found

    def admitted(self, group: str) -> None:
        """Note that the tasks of a group are on the log."""
        self._admitted.add(group)

    def next(self, now: float, answered: list[bytes]) -> Retry | None:
        """Return the next group to put back, or None. Keys of requests that are done with it, or were before, go to
        `answered`.

        A request for a group that is not known to be dead waits: its outcome may not have been read yet."""
        self._look_up()
        for key, asked in list(self._asked.items()):
            if key in answered or self._results[asked.group] != GroupResult.dead:
                continue
            if asked.expires_at <= now:
                log.info("%s: the request to put it back has expired", asked.group)
                del self._asked[key]
                continue
            taken = {self._asked[other].group for other in answered}
            answered.append(key)
            group = next_attempt(asked.group)
            if asked.group in taken or self._results[group] is not None or group in self._admitted:
                continue
            return Retry(group, asked.taskset, asked.index, asked.stored)
        return None
