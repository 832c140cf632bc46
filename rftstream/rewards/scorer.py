"""Scorers: ProcessScorer runs rewards in children that may hang or crash, InlineScorer in the caller's own thread.

A child that is at one item for longer than the time limit is killed with its process group and replaced. The item is
tried again up to `tries` times and then replied to with a reason; the other items of that child lose nothing. Of a
batch that hangs or kills its child nobody knows which item did it: each is tried alone.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from rftstream.clock import Clock
from rftstream.config import to_dict
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import Score, ScoreReply, ScoreRequest
from rftstream.rewards.child import score_items
from rftstream.rewards.frames import Item, Result, Setup, pack
from rftstream.rewards.process import BatchSizes, Child, Pending
from rftstream.rewards.resolve import build_rewards, reward_specs
from rftstream.sections import RunConfig

logger = logging.getLogger(__name__)

CHECK_S = 0.05
"""How often children are looked at while waiting."""
MAX_BAD_STARTS = 3


class ProcessScorer:
    """Scores in `processes` children of its own; all defaults come from [verifier]. Not for use by several threads."""

    def __init__(
        self,
        config: RunConfig,
        *,
        processes: int | None = None,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> None:
        self._timeout_s = timeout_s or config.verifier.timeout_s
        self._tries = tries or config.verifier.tries
        self._sizes = BatchSizes(max_batch=config.verifier.max_batch, timeout_s=self._timeout_s)
        self._names = set(reward_specs(config))
        self._versions: dict[str, tuple[str, str]] = {}
        self._setup = pack(Setup(config=to_dict(config), path=[entry or "." for entry in sys.path]))
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[Pending] = deque()
        self._active: dict[int, Pending] = {}
        self._finished: list[ScoreReply] = []
        self._next_number = 0
        self._bad_starts = 0
        self._check_at = 0.0
        self.num_replaced = 0
        """Children that were killed or died."""
        self._children = [self._start() for _ in range(processes or config.verifier.processes)]

    @property
    def num_active(self) -> int:
        """Submitted and not yet handed out by `poll`."""
        return len(self._active) + len(self._finished)

    def submit(self, request: ScoreRequest) -> None:
        if request.taskset not in self._names:
            raise RewardError(f"reward of {request.taskset!r}: unknown; known: {', '.join(sorted(self._names))}")
        number = self._next_number
        self._next_number += 1
        item = msgspec.Raw(msgspec.msgpack.encode(Item(number, request.taskset, request.item)))
        pending = Pending(number=number, request_id=request.request_id, reward=request.taskset, item=item)
        self._active[number] = pending
        self._waiting.append(pending)

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """What finished; waits up to `wait_s` for the first. ConfigError if the rewards cannot be built."""
        deadline = time.monotonic() + wait_s
        while True:
            self._feed()
            now = time.monotonic()
            left = 0.0 if self._finished or not self._active else deadline - now
            for key, events in self._selector.select(max(0.0, min(left, CHECK_S))):
                self._serve(key.data, events)
            if time.monotonic() >= self._check_at:
                self._check()
            if self._finished or left <= 0:
                self._feed()
                replies, self._finished = self._finished, []
                return replies

    def close(self) -> None:
        for child in self._children:
            child.kill(self._selector)
        self._children.clear()
        self._selector.close()

    def _start(self) -> Child:
        return Child(self._setup, self._selector, self._sizes)

    def _feed(self) -> None:
        """Gives waiting items to children that have little to do, shortest queue first."""
        while self._waiting:
            child = min(self._children, key=lambda one: one.load)
            if not child.take(self._waiting, self._selector):
                return

    def _serve(self, child: Child, events: int) -> None:
        if child not in self._children:
            return
        if events & selectors.EVENT_WRITE:
            child.flush(self._selector)
        if events & selectors.EVENT_READ and not self._receive(child):
            self._lost(child)

    def _receive(self, child: Child) -> bool:
        """False if the child is gone, or is not one of ours any more by what it says."""
        results, alive = child.receive()
        if child.error is not None:
            raise ConfigError(child.error)
        if child.versions and not self._versions:
            self._versions = child.versions
            self._bad_starts = 0
        for result in results:
            self._take(result)
        return alive

    def _take(self, result: Result) -> None:
        pending = self._active.get(result.number)
        if pending is None:
            return
        if result.score is None and result.reason != "missing_checker":
            self._failed(pending, result.reason or "error", result.detail)
        else:
            self._reply(pending, result.score, result.reason, result.detail)

    def _check(self) -> None:
        """Looks for children that hang or are gone."""
        now = time.monotonic()
        self._check_at = now + min(CHECK_S, self._timeout_s / 4)
        for child in list(self._children):
            if child.exited:
                self._receive(child)  # what it said before it died is still in the pipe
                self._lost(child)
            elif child.hangs(now, self._timeout_s):
                self._lost(child, timed_out=True)

    def _lost(self, child: Child, *, timed_out: bool = False) -> None:
        """Replaces a child; the item that it was at counts a try, its other items go to the front of the queue."""
        culprits = [pending for pending in child.current if pending.number in self._active]
        held = [pending for pending in child.held.values() if pending.number in self._active]
        self._children.remove(child)
        exit_text = child.kill(self._selector, dying=not timed_out)
        self.num_replaced += 1
        if not child.versions:
            self._bad_starts += 1
            if self._bad_starts >= MAX_BAD_STARTS:
                raise RewardError(f"rewards: {MAX_BAD_STARTS} scorers in a row died at start ({exit_text}); see stderr")
        if len(culprits) == 1:
            held.remove(culprits[0])
        self._waiting.extendleft(reversed(held))
        detail = f"no result within {self._timeout_s:g} s" if timed_out else f"the scoring process died: {exit_text}"
        if len(culprits) == 1:
            self._failed(culprits[0], "timeout" if timed_out else "error", detail)
            logger.warning("reward of %s: %s; process replaced", culprits[0].request_id, detail)
        elif culprits:
            for pending in culprits:
                pending.alone = True
            logger.warning("reward of %d rollouts together: %s; each is tried alone", len(culprits), detail)
        self._children.append(self._start())

    def _failed(self, pending: Pending, reason: str, detail: str) -> None:
        pending.tries += 1
        pending.detail = detail
        pending.alone = True
        if pending.tries < self._tries:
            self._waiting.append(pending)
        else:
            self._reply(pending, None, reason, f"{detail.rstrip()} (tried {pending.tries} times)")

    def _reply(self, pending: Pending, score: Score | None, reason: str | None, detail: str) -> None:
        del self._active[pending.number]
        scorer, version = self._versions.get(pending.reward, ("", ""))
        self._finished.append(
            ScoreReply(
                request_id=pending.request_id,
                score=score,
                scorer=scorer,
                scorer_version=version,
                reason=reason,
                detail=detail,
            )
        )


class InlineScorer:
    """Scores in `poll`, without protection: for simulation and tests. Latency, if any, is time on the given clock."""

    def __init__(
        self,
        config: RunConfig,
        *,
        clock: Clock | None = None,
        latency_s: Callable[[ScoreRequest], float] | None = None,
    ) -> None:
        self._rewards = build_rewards(config)
        self._max_batch = config.verifier.max_batch
        self._clock = clock
        self._latency_s = latency_s
        self._waiting: list[tuple[float, int, ScoreRequest]] = []
        self._num_submitted = 0

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    def submit(self, request: ScoreRequest) -> None:
        if request.taskset not in self._rewards:
            raise RewardError(f"reward of {request.taskset!r}: unknown; known: {', '.join(sorted(self._rewards))}")
        due = self._now() + (self._latency_s(request) if self._latency_s else 0.0)
        self._waiting.append((due, self._num_submitted, request))
        self._num_submitted += 1

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """What is due, in order of due time and submission; sleeps on the clock up to `wait_s` for the first."""
        if not self._waiting:
            return []
        self._waiting.sort(key=lambda one: one[:2])
        if self._clock and wait_s > 0 and self._waiting[0][0] > self._clock.now():
            self._clock.sleep(min(wait_s, self._waiting[0][0] - self._clock.now()))
        now = self._now()
        due = [request for due_at, _, request in self._waiting if due_at <= now]
        del self._waiting[: len(due)]
        replies: list[ScoreReply] = []
        for name, group in itertools.groupby(due, key=lambda request: request.taskset):
            batched, requests = getattr(self._rewards[name], "batched", False), list(group)
            size = self._max_batch if batched else 1
            for start in range(0, len(requests), size):
                replies += self._score(requests[start : start + size])
        return replies

    def close(self) -> None:
        self._waiting.clear()

    def _now(self) -> float:
        return self._clock.now() if self._clock else 0.0

    def _score(self, requests: Sequence[ScoreRequest]) -> list[ScoreReply]:
        reward = self._rewards[requests[0].taskset]
        return [
            ScoreReply(
                request_id=request.request_id,
                score=score,
                scorer=getattr(reward, "scorer", ""),
                scorer_version=getattr(reward, "version", ""),
                reason=reason,
                detail=detail,
            )
            for request, (score, reason, detail) in zip(
                requests, score_items(reward, [request.item for request in requests]), strict=True
            )
        ]
