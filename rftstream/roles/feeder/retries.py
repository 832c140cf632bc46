"""Dead groups that are to be put back: requests on `control`, each done once as a group with the next attempt.

Which attempts were admitted stands on `tasks`, which is read (headers only) when the first request comes, and on
`outcomes`, where retention has deleted the tasks. A request that is done is taken back in the transaction that admits
its tasks.
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
    """That died."""
    stored: Mapping[int, str]
    expires_at: float


class Retries:
    def __init__(self) -> None:
        self._asked: dict[bytes, _Asked] = {}
        """By the key of the request, in order."""
        self._dead: set[str] = set()
        self._decided_attempts: set[str] = set()
        """Groups with an attempt above 0 that have an outcome."""
        self._attempted: set[str] | None = None
        """Groups with an attempt above 0 whose tasks are on the log; None until that has to be known."""
        self._log: Log | None = None

    def __len__(self) -> int:
        return len(self._asked)

    def begin(self, log_: Log) -> None:
        self._log = log_

    def asked(self, request: Request, key: bytes) -> None:
        if request.kind is not RequestKind.retry_dead:
            return
        group, stored = request.arguments.get("group"), request.arguments.get("stored", ())
        if not isinstance(group, str) or split_group_id(group) is None or not isinstance(stored, list | tuple):
            log.error("request %s: names no group to put back: %r; passed over", request.request_id, group)
            return
        places = {sibling: place for sibling, place in enumerate(stored) if isinstance(place, str)}
        self._asked[key] = _Asked(group, places, request.expires_at)

    def taken_back(self, key: bytes) -> None:
        self._asked.pop(key, None)

    def decided(self, outcome: GroupOutcome) -> None:
        if outcome.result is GroupResult.dead and not outcome.late:
            self._dead.add(outcome.group_id)
        if not outcome.group_id.endswith("/0"):
            self._decided_attempts.add(outcome.group_id)

    def admitted(self, group: str) -> None:
        if self._attempted is not None and not group.endswith("/0"):
            self._attempted.add(group)

    def next(self, now: float, answered: list[bytes]) -> Retry | None:
        """The next group to put back. Keys of the requests that are done with it, or were before, go to `answered`.

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
            if asked.group in taken or group in self._decided_attempts or group in self._admitted_attempts():
                continue
            parts = split_group_id(group)
            assert parts is not None
            return Retry(group, parts[0], parts[2], asked.stored)
        return None

    def _admitted_attempts(self) -> set[str]:
        if self._attempted is None:
            assert self._log is not None
            groups = {record.header("group_id") or b"" for record in self._log.read("tasks", bodies=False)}
            self._attempted = {group.decode() for group in groups if not group.endswith(b"/0")}
        return self._attempted
