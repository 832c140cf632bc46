"""A joined verifier: rollouts for a scorer of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rftstream.desk import AnswerRefused
from rftstream.joined.tasks import JoinedTask, TaskIterator, TaskLoop, plain_reason
from rftstream.joined.worker import named_numbers, plain_number
from rftstream.rewards.base import RewardInput, Score, ScoreRequest
from rftstream.rewards.joined import JoinedScore


class ScoreTask(JoinedTask):
    """A rollout to score. `JoinedVerifier.rollouts` hands it out."""

    __slots__ = ()

    _request: ScoreRequest

    @property
    def taskset(self) -> str:
        """Taskset of the problem."""
        return self._request.taskset

    @property
    def rollout(self) -> RewardInput:
        """The rollout as rewards see it: `completion`, `answer`, `messages`, `info`, `completion_ids` and more."""
        return self._request.item


class JoinedVerifier(TaskLoop[ScoreTask]):
    """A verifier whose scorer is the user's own. `rftstream.join(RUN, role="verifier")` makes it.

    with rftstream.join("runs/x", role="verifier") as me:
        for task in me.rollouts():
            me.score(task, service.reward(task.rollout.messages))
    """

    _kind = ScoreTask

    def rollouts(self) -> TaskIterator[ScoreTask]:
        """Return the loop over rollouts, oldest first. It waits for the next one, and ends when the run has finished or
        `stop` was called. A loop that was interrupted is followed by one that begins with what is still in hand."""
        return self._begin()

    def take(self, most: int = 1, *, wait_s: float | None = None) -> list[ScoreTask]:
        """Return up to `most` waiting rollouts, for a service that scores many at once. Wait for the first one, at most
        `wait_s` seconds. An empty list without `wait_s` says that no more rollouts come: leave the loop."""
        return self._take(most, wait_s)

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
            parts=named_numbers(parts or {}, f"{task.id}: parts", _number),
            metrics=named_numbers(metrics or {}, f"{task.id}: metrics", _number),
        )
        return self._answer(task, JoinedScore(score=found, version="" if version is None else str(version)))

    def fail(self, task: ScoreTask, reason: str) -> bool:
        """Say that the rollout cannot be scored. It is recorded without a reward, with the reason; that is never a
        reward of 0."""
        self._check_open(task)
        return self._answer(task, JoinedScore(score=None, detail=plain_reason(reason)))


def _number(value: Any, what: str) -> float:
    found = plain_number(value, what)
    if not math.isfinite(found):
        raise AnswerRefused(f"{what}: got {found}, expected a finite number; `fail` says that there is no reward")
    return found
