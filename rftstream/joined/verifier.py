"""A joined verifier: rollouts for a scorer of the user's own."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from rftstream.desk import AnswerRefused, Desk, WorkItem, WorkState
from rftstream.joined.worker import JoinedLoop, plain_number
from rftstream.rewards.base import RewardInput, Score, ScoreRequest
from rftstream.rewards.joined import JoinedScore

log = logging.getLogger(__name__)


class ScoreTask:
    """A rollout to score. `JoinedVerifier.rollouts` hands it out."""

    __slots__ = ("_item", "_request")

    def __init__(self, item: WorkItem) -> None:
        self._item = item
        request: ScoreRequest = item.work
        self._request = request

    @property
    def id(self) -> str:
        """Id of the rollout on the log."""
        return self._request.rollout_id or self._request.request_id

    @property
    def group_id(self) -> str:
        """Id that the rollouts of one problem share."""
        return self._request.group_id

    @property
    def taskset(self) -> str:
        """Taskset of the problem."""
        return self._request.taskset

    @property
    def rollout(self) -> RewardInput:
        """The rollout as rewards see it: `completion`, `answer`, `messages`, `info`, `completion_ids` and more."""
        return self._request.item

    @property
    def is_lost(self) -> bool:
        """Whether the rollout was given to another process. Nothing can be handed in then."""
        return self._item.state is WorkState.withdrawn

    def __repr__(self) -> str:
        return f"<ScoreTask {self.id}: {self._item.state.value}>"


class ScoreTasks:
    """The loop over rollouts, for `for` and for `async for`. `JoinedVerifier.rollouts` makes it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def __iter__(self) -> Iterator[ScoreTask]:
        return self

    def __next__(self) -> ScoreTask:
        items = self._desk.take()
        if not items:
            raise StopIteration
        return ScoreTask(items[0])

    def __aiter__(self) -> AsyncIterator[ScoreTask]:
        return self

    async def __anext__(self) -> ScoreTask:
        items = await self._desk.take_async()
        if not items:
            raise StopAsyncIteration
        return ScoreTask(items[0])


class JoinedVerifier(JoinedLoop):
    """A verifier whose scorer is the user's own. `rftstream.join(RUN, role="verifier")` makes it.

    with rftstream.join("runs/x", role="verifier") as me:
        for task in me.rollouts():
            me.score(task, service.reward(task.rollout.messages))
    """

    def rollouts(self) -> ScoreTasks:
        """Return the loop over rollouts, oldest first. It waits for the next one, and ends when the run has finished or
        `stop` was called. A loop that was interrupted is followed by one that begins with what is still in hand."""
        self._desk.take_back()
        return ScoreTasks(self._desk)

    def take(self, most: int = 1, *, wait_s: float | None = None) -> list[ScoreTask]:
        """Return up to `most` waiting rollouts, for a service that scores many at once. Wait for the first one, at most
        `wait_s` seconds. An empty list without `wait_s` says that no more rollouts come: leave the loop."""
        return [ScoreTask(item) for item in self._desk.take(most, wait_s=wait_s)]

    def score(
        self,
        task: ScoreTask,
        reward: float,
        *,
        parts: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        version: str = "",
    ) -> bool:
        """Hand in a reward, with its named parts and metrics, and the version of the program that made it.

        Return False if the rollout was given to another process meanwhile. AnswerRefused unless all numbers are finite;
        the rollout stays in hand."""
        self._check_open(task)
        found = Score(
            reward=_number(reward, f"{task.id}: reward"),
            parts=_numbers(parts or {}, f"{task.id}: parts"),
            metrics=_numbers(metrics or {}, f"{task.id}: metrics"),
        )
        return self._hand_in(task, JoinedScore(score=found, version=version))

    def fail(self, task: ScoreTask, reason: str) -> bool:
        """Say that the rollout cannot be scored. It is recorded without a reward, with the reason; that is never a
        reward of 0."""
        self._check_open(task)
        return self._hand_in(task, JoinedScore(score=None, detail=reason or "the joined scorer gave no reason"))

    def _check_open(self, task: ScoreTask) -> None:
        self._desk.check()
        if not isinstance(task, ScoreTask):
            raise AnswerRefused(f"got a {type(task).__name__}, expected a rollout that `rollouts` or `take` has given")
        if task._item.state is WorkState.answered:
            raise AnswerRefused(f"{task.id}: handed in for the second time, expected once; the first answer counts")

    def _hand_in(self, task: ScoreTask, answer: JoinedScore) -> bool:
        if self._desk.answer(task._item, answer):
            return True
        log.warning("%s: not this process's any more, so its score here counts for nothing", task.id)
        return False


def _numbers(values: Mapping[str, Any], what: str) -> dict[str, float]:
    return {str(name): _number(value, f"{what}.{name}") for name, value in values.items()}


def _number(value: Any, what: str) -> float:
    found = plain_number(value, what)
    if not math.isfinite(found):
        raise AnswerRefused(f"{what}: got {found}, expected a finite number; `fail` says that there is no reward")
    return found
