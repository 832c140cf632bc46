"""Dead groups that are put back: requests on `control`, each of which admits the group once with the next attempt
number.

The headers of `tasks` tell which attempts were admitted; they are read when the first request comes. If retention has
deleted the tasks, the headers of `outcomes` tell it; they are read when a request comes, for the groups of that
request. Few groups are ever requested. A finished request is withdrawn in the transaction that admits its tasks."""

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
    """Id of the group, with the number of the new attempt."""
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
    """Groups with an attempt above 0 whose tasks are on the log. `Retries` makes it, asks whether it contains a group,
    and adds admitted groups. It reads the log at the first question, which seldom comes."""

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
        """Add a group whose tasks are on the log now."""
        if self._is_read and not group.endswith("/0"):  # otherwise the group is found by reading
            self._groups.add(group)


class Retries:
    """The dead groups that are to be put back. The feeder's step makes it at each recovery and passes records from the
    log: requests to `asked` and `taken_back`, outcomes to `decided`, and its own committed tasks to `admitted`. For
    each transaction it calls `next` until that returns None."""

    def __init__(self, log_: Log) -> None:
        self._asked: dict[bytes, _Asked] = {}
        """Requests by key, in order."""
        self._log = log_
        self._results: dict[str, str | None] = {}
        """Groups with a request -> their result; None without an outcome."""
        self._admitted = AdmittedAttempts(log_)

    def __len__(self) -> int:
        return len(self._asked)

    def asked(self, request: Request, key: bytes) -> None:
        """Add a request, if it asks to put a group back."""
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
        """Forget a request that was withdrawn, by the user or because it is done."""
        self._asked.pop(key, None)

    def decided(self, outcome: GroupOutcome) -> None:
        """Apply the outcome of a group."""
        if outcome.group_id in self._results and not outcome.late:
            self._results[outcome.group_id] = outcome.result

    def _look_up(self) -> None:
        """Read the outcomes of groups that were requested for the first time, by their headers. The first record of the
        buffer about a group decides it."""
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
        """Record that the tasks of a group are on the log."""
        self._admitted.add(group)

    def next(self, now: float, answered: list[bytes]) -> Retry | None:
        """Return the next group to put back, or None. Keys of requests that this completes, or that were completed
        before, are added to `answered`.

        A request for a group that is not known to be dead waits, since its outcome may not have been read yet."""
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
