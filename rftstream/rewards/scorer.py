"""Scorers: ProcessScorer runs rewards in children that may hang or crash, InlineScorer in the caller's own thread.

A child that works on one item for longer than the time limit is killed with its process group and replaced. The item is
tried up to `tries` times; then the reply has the reason. The child's other items lose nothing. If a batch hangs or
kills its child, it is unknown which item caused that, so each is tried alone. The breaker (breaker.py) detects a reward
that hangs on every rollout. The rollouts then get fewer tries, or none.

If a reward had marked that it was evaluating the policy's answer (evaluating.py), the answer is to blame for the limit:
the rollout is scored again at once, with 0 for that reward.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rftstream.clock import Clock
from rftstream.config.loader import to_dict
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import ScoreReply, ScoreRequest
from rftstream.rewards.breaker import SLOW_SHARE
from rftstream.rewards.child import score_items
from rftstream.rewards.frames import Result, Setup, pack
from rftstream.rewards.process import BatchSizes, RewardChild
from rftstream.rewards.queue import Pending, ScoringQueue
from rftstream.rewards.resolve import build_rewards, reward_specs

logger = logging.getLogger(__name__)

CHECK_S = 0.05
"""Seconds between two checks of the children while waiting."""
MAX_BAD_STARTS = 3


class ProcessScorer:
    """A Scorer that runs rewards in `processes` children of its own. All defaults come from [verifier].

    The worker of a verifier or evaluator makes it, which starts the children. Only one thread may use it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        processes: int | None = None,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> None:
        self._timeout_s = timeout_s or config.verifier.timeout_s
        tries = tries or config.verifier.tries
        self._queue = ScoringQueue(tries=tries, timeout_s=self._timeout_s, now=time.monotonic)
        self._sizes = BatchSizes(max_batch=config.verifier.max_batch, timeout_s=self._timeout_s)
        self._names = set(reward_specs(config))
        path = [entry or "." for entry in sys.path]
        self._setup = pack(Setup(config=to_dict(config), path=path, slow_s=SLOW_SHARE * self._timeout_s))
        self._selector = selectors.DefaultSelector()
        self._bad_starts = 0
        self._check_at = 0.0
        self._grouped: Collection[str] | None = None
        self._versions: dict[str, str] = {}
        self.num_replaced = 0
        """Number of children that were killed or died."""
        self._children = [self._start() for _ in range(processes or config.verifier.processes)]

    @property
    def num_active(self) -> int:
        """Return the number of submitted requests that `poll` has not returned yet."""
        return self._queue.num_active + len(self._queue.finished)

    def submit(self, request: ScoreRequest) -> None:
        """Accept a request. RewardError if its taskset or evaluation is unknown."""
        _check_known(request.taskset, self._names)
        self._queue.submit(request)

    def submit_group(self, requests: Sequence[ScoreRequest], absent: Mapping[int, str]) -> None:
        """Accept the rollouts of one group. RewardError if its taskset or evaluation is unknown."""
        _check_known(requests[0].taskset, self._names)
        self._queue.submit(*requests, absent=absent)

    @property
    def grouped(self) -> Collection[str] | None:
        """Return the tasksets and evaluations whose reward sees whole groups. None until a child is ready."""
        if self._grouped is None:
            self._grouped = next((child.grouped for child in self._children if child.grouped is not None), None)
        return self._grouped

    @property
    def without_tokens(self) -> Collection[str]:
        """Return the tasksets and evaluations whose reward gets no tokens, as far as a child has said so."""
        return next((child.without_tokens for child in self._children if child.versions), ())

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """Return finished replies; wait up to `wait_s` seconds for the first. ConfigError if the rewards cannot be
        built."""
        deadline, queue = time.monotonic() + wait_s, self._queue
        while True:
            self._feed()
            now = time.monotonic()
            waits = not queue.finished and (queue.num_active > 0 or self.grouped is None)
            left = deadline - now if waits else 0.0
            for key, events in self._selector.select(max(0.0, min(left, CHECK_S))):
                self._serve(key.data, events)
            if time.monotonic() >= self._check_at:
                self._check()
            if queue.finished or left <= 0:
                self._feed()
                replies, queue.finished = queue.finished, []
                return replies

    def close(self) -> None:
        """End all children. Requests without a reply stay without one."""
        for child in self._children:
            child.kill(self._selector)
        self._children.clear()
        self._selector.close()

    def _start(self) -> RewardChild:
        return RewardChild(self._setup, self._selector, self._sizes)

    def _feed(self) -> None:
        """Give waiting items to the children with the least work, until no child has room."""
        self._queue.prepare(ready=any(child.versions for child in self._children))
        waiting = self._queue.waiting
        while waiting:
            by_load = sorted(self._children, key=lambda child: child.load)
            if not any(child.take(waiting, self._selector) for child in by_load):
                return

    def _serve(self, child: RewardChild, events: int) -> None:
        if child not in self._children:
            return
        if events & selectors.EVENT_WRITE:
            child.flush(self._selector)
        if events & selectors.EVENT_READ and not self._receive(child):
            self._lost(child)

    def _receive(self, child: RewardChild) -> bool:
        """Read the child's results. Return False if the child is gone, or sends invalid frames."""
        results, alive = child.receive()
        if child.error is not None:
            raise ConfigError(child.error)
        if child.versions and not child.announced:
            child.announced, self._bad_starts = True, 0
            self._say_changes(child.versions)
        if child.versions:
            self._queue.scorers, self._queue.given = child.versions, child.given  # whose results are taken now
        for result in sorted(
            results, key=lambda result: all(one.score is not None for one in result.outcomes)
        ):  # scores last: they close the breaker
            self._take(result)
        untried = [self._queue.find(result.number) for result in results if not result.tried]
        self._queue.not_tried(pending for pending in untried if pending is not None)
        return alive

    def _say_changes(self, versions: Mapping[str, tuple[str, str]]) -> None:
        """Log who scores, as verdicts name it, and then each reward whose code is not what it was in the children
        before."""
        if not self._versions:
            by = (f"{name} by {scorer} {version}" for name, (scorer, version) in versions.items())
            logger.info("scores %s", ", ".join(by))
        for name, (scorer, version) in versions.items():
            if (before := self._versions.get(name, version)) != version:
                logger.warning(
                    "reward %s of %s: its code has changed (%s -> %s): a new scoring process has read it, and each "
                    "verdict carries the version that gave it",
                    *(scorer, name, before, version),
                )
            self._versions[name] = version

    def _take(self, result: Result) -> None:
        pending = self._queue.find(result.number)
        if pending is not None and result.tried:
            self._queue.ended(pending, result.outcomes, seconds=result.seconds)

    def _check(self) -> None:
        """Replace children that hang or are gone."""
        now = time.monotonic()
        self._check_at = now + min(CHECK_S, self._timeout_s / 4)
        for child in list(self._children):
            if child.exited:
                self._receive(child)  # the child's last output is still in the pipe
                self._lost(child)
            elif child.hangs(now, self._timeout_s):
                self._lost(child, timed_out=True)

    def _lost(self, child: RewardChild, *, timed_out: bool = False) -> None:
        """Replace a child. The item that the child worked on counts a try; its other items go to the front of the
        queue."""
        culprits = [pending for pending in child.current if self._queue.find(pending.number)]
        held = [pending for pending in child.held.values() if self._queue.find(pending.number)]
        self._children.remove(child)
        evaluation = child.evaluation(self._timeout_s)
        place = child.place() if timed_out and child.versions else ""
        exit_text = child.kill(self._selector, dying=not timed_out)
        self.num_replaced += 1
        if not child.versions:
            self._bad_starts += 1
            if self._bad_starts >= MAX_BAD_STARTS:
                raise RewardError(f"rewards: {MAX_BAD_STARTS} scorers in a row died at start ({exit_text}); see stderr")
        self._queue.not_tried(pending for pending in held if pending not in culprits)
        reason = "timeout" if timed_out else "error"
        detail = (
            f"no result within {self._timeout_s:g} s (verifier.timeout_s)"
            if timed_out
            else f"the scoring process died: {exit_text}"
        )
        detail = f"at {place}\n{detail}" if place else detail
        at_fault = evaluation is not None and (evaluation.busy if timed_out else child.crashed)
        if len(culprits) == 1 and evaluation is not None and at_fault:
            self._over_limit(culprits[0], evaluation.part, detail)
        elif len(culprits) == 1:
            self._queue.failed(culprits[0], reason, detail)
        elif culprits:
            self._queue.batch_failed(culprits, reason, detail)
        self._children.append(self._start())

    def _over_limit(self, pending: Pending, part: int, detail: str) -> None:
        """Score a rollout again, with 0 for the part of the reward whose limits the policy's answer exceeded."""
        said = ": ".join(detail.splitlines())
        logger.warning("%s: the answer cannot be evaluated: %s; it counts as a wrong one", pending.rollout_id, said)
        pending.over_limit += (part,)
        pending.alone = True
        self._queue.not_tried([pending])


@dataclass(frozen=True, slots=True, order=True)
class _Begun:
    due: float
    number: int
    pending: Pending = field(compare=False)
    hangs: bool = field(compare=False)


class InlineScorer:
    """A Scorer that runs rewards in the caller's thread, without protection. Simulations and tests make it.

    It uses the time of the given clock. `latency_s` gives the seconds that a request takes. A request that takes longer
    than the time limit hangs. All requests that may be tried begin at once.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        clock: Clock | None = None,
        latency_s: Callable[[ScoreRequest], float] | None = None,
    ) -> None:
        self._rewards = build_rewards(config)
        self._max_batch = config.verifier.max_batch
        self._timeout_s = config.verifier.timeout_s
        self._clock = clock
        self._latency_s = latency_s
        self._queue = ScoringQueue(tries=config.verifier.tries, timeout_s=self._timeout_s, now=self._now)
        self._queue.scorers = {
            name: (getattr(reward, "scorer", ""), getattr(reward, "version", ""))
            for name, reward in self._rewards.items()
        }
        self._queue.given = [name for name, reward in self._rewards.items() if getattr(reward, "takes_given", False)]
        self._begun: list[_Begun] = []

    @property
    def num_active(self) -> int:
        """Return the number of submitted requests that `poll` has not returned yet."""
        return self._queue.num_active + len(self._queue.finished)

    def submit(self, request: ScoreRequest) -> None:
        """Accept a request, and begin it if it may be tried. RewardError if its taskset or evaluation is unknown."""
        _check_known(request.taskset, self._rewards)
        self._queue.submit(request)
        self._begin()

    def submit_group(self, requests: Sequence[ScoreRequest], absent: Mapping[int, str]) -> None:
        """Accept the rollouts of one group, and begin them. RewardError if its taskset or evaluation is unknown."""
        _check_known(requests[0].taskset, self._rewards)
        self._queue.submit(*requests, absent=absent)
        self._begin()

    @property
    def grouped(self) -> Collection[str]:
        """Return the tasksets and evaluations whose reward sees whole groups."""
        return [name for name, reward in self._rewards.items() if getattr(reward, "group", False)]

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """Return due replies, ordered by due time and submission. Sleep on the clock up to `wait_s` for the first."""
        queue = self._queue
        self._work()
        times = [begun.due for begun in self._begun] + [at for at in [queue.next_at()] if at is not None]
        if self._clock and wait_s > 0 and times and not queue.finished:
            self._clock.sleep(min(wait_s, max(0.0, min(times) - self._clock.now())))
            self._work()
        replies, queue.finished = queue.finished, []
        return replies

    def close(self) -> None:
        """Drop all begun requests. Requests without a reply stay without one."""
        self._begun.clear()

    def _now(self) -> float:
        return self._clock.now() if self._clock else 0.0

    def _begin(self) -> None:
        self._queue.prepare()
        while self._queue.waiting:
            pending = self._queue.waiting.popleft()
            seconds = self._latency_s(pending.request) if self._latency_s else 0.0
            due = self._now() + min(seconds, self._timeout_s)
            self._begun.append(_Begun(due, pending.number, pending, seconds > self._timeout_s))

    def _work(self) -> None:
        """End all due tries, including tries that begin meanwhile and are due at once."""
        self._begin()
        while due := sorted(begun for begun in self._begun if begun.due <= self._now()):
            self._begun = [begun for begun in self._begun if begun.due > self._now()]
            for begun in due:
                if begun.hangs:
                    self._queue.failed(
                        begun.pending, "timeout", f"no result within {self._timeout_s:g} s (verifier.timeout_s)"
                    )
            pendings = [begun.pending for begun in due if not begun.hangs]
            for name, group in itertools.groupby(pendings, key=lambda pending: pending.reward):
                reward, same = self._rewards[name], list(group)
                alone = getattr(reward, "group", False) or not getattr(reward, "batched", False)
                size = 1 if alone else self._max_batch
                for start in range(0, len(same), size):
                    self._score(same[start : start + size])
            self._begin()

    def _score(self, pendings: Sequence[Pending]) -> None:
        items = [request.item for pending in pendings for request in pending.requests]
        found = score_items(self._rewards[pendings[0].reward], items, group=pendings[0].score_item().group)
        outcomes = iter(found)
        for pending in pendings:
            self._queue.ended(pending, list(itertools.islice(outcomes, len(pending.requests))), seconds=0.0)


def _check_known(taskset: str, known: Collection[str]) -> None:
    if taskset not in known:
        raise RewardError(f"reward of {taskset!r}: unknown; known: {', '.join(sorted(known))}")
