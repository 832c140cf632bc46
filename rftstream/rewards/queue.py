"""The work of a scorer: requests without a reply, the number of their tries, and which of them may be tried now."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rftstream.contracts.verdicts import with_environment
from rftstream.error_kinds import last_line
from rftstream.rewards.away import SUMMARY_S, Absences, pause_s
from rftstream.rewards.base import ScoreReply, ScoreRequest
from rftstream.rewards.breaker import FINAL_REASONS, HUNG_IN_A_ROW, SLOW_SHARE, Breaker, is_slow
from rftstream.rewards.frames import ScoreItem, ScoreOutcome

logger = logging.getLogger(__name__)

HELD_SHARE = 0.25
"""Share of the time limit that a rollout waits at most for the probe of a given-up reward."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """Work without a reply: one request, or those of a group. `ScoringQueue.submit` makes it."""

    number: int
    requests: tuple[ScoreRequest, ...] = field(repr=False)
    absent: Mapping[int, str] | None = None
    """The other siblings of a group, and why they are missing; None for a single rollout."""
    tries: int = 0
    detail: str = ""
    """Detail of the last try."""
    tries_away: int = 0
    """Tries that do not count, since a service was known to be away."""
    alone: bool = False
    """Whether the request is sent alone, since it may have spoilt a batch, or is a probe."""
    batch: int = -1
    """Number of the first item in the request's batch."""
    held_at: float = 0.0
    over_limit: tuple[int, ...] = ()
    """Parts of the reward whose limits the policy's answer exceeded (ScoreItem.over_limit)."""

    @property
    def request(self) -> ScoreRequest:
        """Return the request, or the first one of a group."""
        return self.requests[0]

    def score_item(self, *, with_tokens: bool = True) -> ScoreItem:
        """Return the item for a child, with the tokens of the rollouts or without."""
        inputs, numbers = tuple(one.item for one in self.requests), tuple(one.sibling for one in self.requests)
        if not with_tokens:
            inputs = tuple(replace(item, segments=()) if item.segments else item for item in inputs)
        if self.absent is None:
            return ScoreItem(self.number, self.reward, inputs, self.over_limit)
        return ScoreItem(self.number, self.reward, inputs, self.over_limit, numbers, dict(self.absent))

    @property
    def reward(self) -> str:
        """Return the name of the taskset or evaluation whose reward scores the rollout."""
        return self.request.taskset

    @property
    def group_id(self) -> str:
        """Return the rollout's group, or the request's id if it has no group."""
        return self.request.group_id or self.request.request_id

    @property
    def rollout_id(self) -> str:
        """Return the id of the rollout in the log."""
        return self.request.rollout_id or self.request.request_id


class ScoringQueue:
    """The requests of a scorer, which makes the queue.

    The scorer calls `submit` for each request. It calls `prepare` and then takes the requests to begin from `waiting`.
    It reports the end of each try: `ended`, `failed`, `batch_failed` or `not_tried`. It takes the replies from
    `finished`.
    """

    def __init__(self, *, tries: int, timeout_s: float, now: Callable[[], float]) -> None:
        """Make an empty queue. `now` returns the seconds of a clock that never goes back."""
        self.waiting: deque[Pending] = deque()
        """Requests to begin now, in order."""
        self.finished: list[ScoreReply] = []
        self.scorers: dict[str, tuple[str, str]] = {}
        """Name of the reward -> scorer and version."""
        self.given: Collection[str] = ()
        """Names of rewards that take the reward of the environment, which is then part of their version."""
        self._tries = tries
        self._timeout_s = timeout_s
        self._now = now
        self._active: dict[int, Pending] = {}
        self._held: dict[str, deque[Pending]] = {}
        """Name of the reward -> requests that wait for the result of its probe."""
        self._breakers: dict[str, Breaker] = {}
        self._probe_at: dict[str, float] = {}
        """Name of a reward whose service is away -> when it is asked again."""
        self._absences: dict[str, Absences] = {}
        self._next_number = 0

    @property
    def num_active(self) -> int:
        """Return the number of requests without a reply."""
        return len(self._active)

    def find(self, number: int) -> Pending | None:
        """Return the request with this number, or None if it has its reply."""
        return self._active.get(number)

    def submit(self, *requests: ScoreRequest, absent: Mapping[int, str] | None = None) -> None:
        """Accept a request, or those of a group with the siblings that are absent."""
        pending = Pending(number=self._next_number, requests=requests, absent=absent)
        self._next_number += 1
        self._active[pending.number] = pending
        self._queue(pending)

    def prepare(self, *, ready: bool = True) -> None:
        """Let a probe begin if a reward is suspected, and reply to requests that waited too long for a probe. Time in
        which no child is `ready` to begin does not count, since one that replaces another may load a model first."""
        for reward, absences in self._absences.items():
            if (summary := absences.take_summary(self._now())) is not None:
                logger.warning(
                    "%s: in the last %g s its service refused or was away %d more times, for %.1f s together, while "
                    "others waited (last: %s); ask it less at once (max_concurrent, verifier.processes)",
                    self._name(reward),
                    SUMMARY_S,
                    *summary,
                    self._breakers[reward].detail,
                )
        for reward, held in self._held.items():
            for pending in held if not ready else ():
                pending.held_at = self._now()
            breaker = self._breakers[reward]
            if held and breaker.probe is None and self._probe_at.get(reward, -math.inf) <= self._now():
                probe = breaker.choose(held)
                held.remove(probe)
                breaker.probe, probe.alone = probe.number, True
                self.waiting.appendleft(probe)
            for pending in [one for one in held if breaker.given_up and self._give_up_at(one) <= self._now()]:
                held.remove(pending)
                self._give_up(pending, breaker)

    def next_at(self) -> float | None:
        """Return the time at which `prepare` will next begin a probe or give up a request. None: it has nothing to do
        before a try ends."""
        times = [
            self._probe_at[reward]
            for reward, held in self._held.items()
            if held and reward in self._probe_at and self._breakers[reward].probe is None
        ]
        given_up = [held for reward, held in self._held.items() if self._breakers[reward].given_up]
        return min([*times, *(self._give_up_at(pending) for held in given_up for pending in held)], default=None)

    # ------------------------------------------------------------------------------------------ how a try ended

    def ended(self, pending: Pending, outcomes: Sequence[ScoreOutcome], *, seconds: float) -> None:
        """Record that a try ended by itself after these seconds: with a score of each rollout, or with a reason for its
        absence. A group is tried again as a whole."""
        failed = [one for one in outcomes if one.score is None and one.reason not in FINAL_REASONS]
        if failed:
            why = next((one for one in failed if one.away), failed[0])
            self.failed(pending, why.reason or "error", why.detail, seconds=seconds, outcomes=outcomes, away=why.away)
            return
        pending.tries += 1
        self._close(pending.reward)
        self._reply(pending, outcomes)

    def failed(
        self,
        pending: Pending,
        reason: str,
        detail: str,
        *,
        seconds: float = math.inf,
        outcomes: Sequence[ScoreOutcome] = (),
        away: bool = False,
    ) -> None:
        """Record that a try ended without a score. `seconds` is the duration of an error. The default means that there
        was no error: the process was lost. `outcomes`: those of all siblings, some of which may have a score. `away`: a
        service is away. That counts as a try of the first one alone, until the reward is given up or a rollout has been
        the probe too often: its answer may be what brings the service down."""
        pending.tries += 1
        pending.detail = detail
        pending.alone |= reason != "timeout" or seconds == math.inf  # a batch outlives a late answer of its own
        given_up = False
        if away or is_slow(reason, seconds, SLOW_SHARE * self._timeout_s):
            was_away = pending.reward in self._probe_at
            given_up = self._suspect([pending], reason, detail, away=away).given_up
            if away and was_away and not given_up and pending.tries_away + 1 < HUNG_IN_A_ROW:
                pending.tries_away += 1
                pending.tries -= 1
        else:
            self._close(pending.reward)
        tries = pending.tries if given_up else self._tries
        if seconds == math.inf:
            logger.warning(
                "%s: %s: %s (try %d of %d); its process was replaced",
                pending.rollout_id,
                self._name(pending.reward),
                ": ".join(detail.splitlines()),
                pending.tries,
                tries,
            )
        if pending.tries < tries:
            self._queue(pending)
        else:
            found = outcomes or [ScoreOutcome(None, reason, detail)] * len(pending.requests)
            times = f" ({_tried(pending.tries)})"
            self._reply(
                pending, [one if one.score else one._replace(detail=one.detail.rstrip() + times) for one in found]
            )
        if given_up:
            self._give_up_held(pending.reward)

    def batch_failed(self, batch: Sequence[Pending], reason: str, detail: str) -> None:
        """Record that a batch was lost with its process. It is unknown which request caused that, so no request counts
        a try."""
        logger.warning(
            "%s and %d more: %s: %s; each is tried alone",
            batch[0].rollout_id,
            len(batch) - 1,
            self._name(batch[0].reward),
            ": ".join(detail.splitlines()),
        )
        self.not_tried(batch)
        for pending in batch:
            pending.alone = True
        self._suspect(batch, reason, detail)

    def not_tried(self, pendings: Iterable[Pending]) -> None:
        """Put untried requests back, at the front."""
        for pending in reversed(list(pendings)):
            breaker = self._breakers.get(pending.reward)
            if breaker is None or breaker.closed:
                self.waiting.appendleft(pending)
            else:
                breaker.not_tried(pending.number)
                self._hold(pending, first=True)

    # ------------------------------------------------------------------------------------------ inside

    def _queue(self, pending: Pending) -> None:
        breaker = self._breakers.get(pending.reward)
        if breaker is None or breaker.closed:
            self.waiting.append(pending)
        else:
            self._hold(pending)

    def _hold(self, pending: Pending, *, first: bool = False) -> None:
        pending.held_at = self._now()
        held = self._held[pending.reward]
        held.appendleft(pending) if first else held.append(pending)

    def _suspect(self, tried: Sequence[Pending], reason: str, detail: str, *, away: bool = False) -> Breaker:
        reward = tried[0].reward
        breaker = self._breakers.setdefault(reward, Breaker())
        was_closed, was_given_up, num_hung = breaker.closed, breaker.given_up, breaker.num_hung
        breaker.hung(tried, reason, last_line(detail))
        if away and breaker.num_hung > num_hung:
            wait_s = pause_s(breaker.num_hung)
            self._probe_at[reward] = self._now() + wait_s
            is_said = self._absences.setdefault(reward, Absences()).failed(self._now(), breaker.num_hung)
            logger.log(
                logging.WARNING if is_said else logging.DEBUG,
                "%s: its service is away (%s): it is asked again in %g s, and the others wait",
                self._name(reward),
                breaker.detail,
                wait_s,
            )
        if was_closed:
            self._held.setdefault(reward, deque())
            mine = [pending for pending in self.waiting if pending.reward == reward]
            self.waiting = deque(pending for pending in self.waiting if pending.reward != reward)
            for pending in mine:
                self._hold(pending)
        if breaker.given_up and not was_given_up:
            logger.warning(
                "%s: %d tries in a row gave nothing (%s): rollouts are given up without a try until one comes back",
                self._name(reward),
                breaker.num_hung,
                breaker.detail,
            )
        return breaker

    def _close(self, reward: str) -> None:
        breaker = self._breakers.get(reward)
        if breaker is None or breaker.closed:
            return
        was_away = self._probe_at.pop(reward, None) is not None
        is_said = reward in self._absences and was_away and self._absences[reward].ended(self._now())
        if is_said or breaker.given_up:
            logger.warning("%s: it came back; all rollouts are tried again", self._name(reward))
        breaker.came_back()
        self.waiting.extend(self._held[reward])
        self._held[reward].clear()

    def _give_up_at(self, pending: Pending) -> float:
        """Return when it is given up, if the probe has no result by then. While a service is away nobody is."""
        begins_at = max(pending.held_at, self._probe_at.get(pending.reward, -math.inf))
        return begins_at + HELD_SHARE * self._timeout_s

    def _give_up_held(self, reward: str) -> None:
        """Give up all requests that waited for the probe. The probe gave no result, and another one would not
        either."""
        held = self._held[reward]
        while held:
            self._give_up(held.popleft(), self._breakers[reward])

    def _give_up(self, pending: Pending, breaker: Breaker) -> None:
        if pending.tries:
            detail = f"{pending.detail.rstrip()} ({_tried(pending.tries)})"
        else:
            detail = f"not tried: {breaker.num_hung} tries of others in a row gave nothing: {breaker.detail}"
        self._reply(pending, [ScoreOutcome(None, breaker.reason, detail)] * len(pending.requests))

    def _reply(self, pending: Pending, outcomes: Sequence[ScoreOutcome]) -> None:
        del self._active[pending.number]
        scorer, version = self.scorers.get(pending.reward, ("", ""))
        is_given = pending.reward in self.given
        self.finished += [
            ScoreReply(
                request_id=request.request_id,
                score=outcome.score,
                scorer=scorer,
                scorer_version=with_environment(version, request.item.environment_version if is_given else ""),
                reason=outcome.reason,
                detail=outcome.detail,
                tries=pending.tries,
            )
            for request, outcome in zip(pending.requests, outcomes, strict=True)
        ]

    def _name(self, reward: str) -> str:
        scorer = self.scorers.get(reward, ("", ""))[0]
        return f"reward {scorer} of {reward}" if scorer else f"reward of {reward}"


def _tried(tries: int) -> str:
    return "tried once" if tries == 1 else f"tried {tries} times"
