"""How fast a run could be at best: the rules of admission and of batches, with nothing that takes time but tokens and
steps. Messages travel at once, and nobody waits for a processor."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Length = Callable[[int, int], int]
"""From a group's sequence and a sibling to the tokens of its completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    steps: int
    groups_per_batch: int
    group_size: int
    max_staleness: int
    on_stale: str
    slots: int
    """Rollouts sampled at once, by all explorers together."""
    tokens_per_s: float
    """Of each of them."""
    step_s: float


@dataclass(slots=True)
class _Group:
    left: int
    oldest: int | None = None
    """Version that sampled its first token."""


@dataclass(slots=True)
class _Ideal:
    plan: Plan
    length: Length
    now: float = 0.0
    admitted: int = 0
    expired: int = 0
    trained: int = 0
    """Steps; also the version in force."""
    batched: int = 0
    """Batches made."""
    busy: bool = False
    free: int = 0
    groups: dict[int, _Group] = field(default_factory=dict)
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Sequence, sibling, the oldest version that may sample it."""
    ready: list[int] = field(default_factory=list)
    """Sequences of those that are complete."""
    events: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, sequence (-1: a step), sibling."""

    def run(self) -> float:
        plan = self.plan
        self.free = plan.slots
        self._go_on()
        while self.trained < plan.steps:
            self.now, sequence, _ = heapq.heappop(self.events)
            if sequence < 0:
                self.trained, self.busy = self.trained + 1, False
            else:
                self.free += 1
                group = self.groups[sequence]
                group.left -= 1
                if not group.left:
                    self.ready.append(sequence)
            self._go_on()
        return self.now

    def _go_on(self) -> None:
        self._batch()
        self._train()
        self._admit()
        self._sample()

    def _batch(self) -> None:
        plan = self.plan
        if plan.on_stale == "wait":
            self.ready.sort()
            first = self.batched * plan.groups_per_batch
            if self.ready[: plan.groups_per_batch] == list(range(first, first + plan.groups_per_batch)):
                self._take()
            return
        fresh = [one for one in self.ready if self.batched - (self.groups[one].oldest or 0) <= plan.max_staleness]
        self.expired += len(self.ready) - len(fresh)
        self.ready = sorted(fresh, key=lambda one: (self.groups[one].oldest or 0, one))
        if len(fresh) >= plan.groups_per_batch:
            self._take()

    def _take(self) -> None:
        del self.ready[: self.plan.groups_per_batch]
        self.batched += 1
        self._batch()

    def _train(self) -> None:
        if not self.busy and self.batched > self.trained:
            self.busy = True
            heapq.heappush(self.events, (self.now + self.plan.step_s, -1, 0))

    def _admit(self) -> None:
        plan, size = self.plan, self.plan.groups_per_batch
        allowed = min((self.trained + plan.max_staleness + 1) * size, plan.steps * size) + self.expired
        while self.admitted < allowed:
            ahead = self.admitted - self.trained * size - self.expired
            youngest = max(0, self.trained + ahead // size - plan.max_staleness)
            self.groups[self.admitted] = _Group(plan.group_size)
            self.waiting.extend((self.admitted, sibling, youngest) for sibling in range(plan.group_size))
            self.admitted += 1

    def _sample(self) -> None:
        held: list[tuple[int, int, int]] = []
        while self.free and self.waiting:
            sequence, sibling, youngest = self.waiting.popleft()
            if self.trained < youngest:
                held.append((sequence, sibling, youngest))
                continue
            self.free -= 1
            group = self.groups[sequence]
            group.oldest = self.trained if group.oldest is None else group.oldest
            took_s = self.length(sequence, sibling) / self.plan.tokens_per_s
            heapq.heappush(self.events, (self.now + took_s, sequence, sibling))
        self.waiting.extendleft(reversed(held))


def ideal_s(plan: Plan, length: Length) -> float:
    """From the first token to the last step."""
    return _Ideal(plan, length).run()
