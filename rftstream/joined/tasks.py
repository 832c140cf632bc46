"""Tasks that are answered one by one, for loops that sample or score."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from rftstream.desk import AnswerRefused, Desk, WorkItem, WorkState
from rftstream.joined.worker import JoinedLoop
from rftstream.policies.base import SampleRequest
from rftstream.rewards.base import ScoreRequest

log = logging.getLogger(__name__)


class JoinedTask:
    """Base of tasks that a loop is given, and hands in."""

    __slots__ = ("_item", "_request")

    def __init__(self, item: WorkItem) -> None:
        self._item = item
        self._request: SampleRequest | ScoreRequest = item.work

    @property
    def id(self) -> str:
        """Id of the rollout on the log."""
        return self._request.rollout_id or self._request.request_id

    @property
    def group_id(self) -> str:
        """Id that the rollouts of one problem share. Their prompts begin alike."""
        return self._request.group_id

    @property
    def is_lost(self) -> bool:
        """Whether the task was given to another process, or is not needed any more. Nothing can be handed in then."""
        return self._item.state is WorkState.withdrawn

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self._item.state.value}>"


def plain_reason(reason: object) -> str:
    """Return the text of a reason that a loop gives, such as an exception."""
    if isinstance(reason, BaseException):
        return f"{type(reason).__name__}: {reason}"
    return str(reason or "the joined loop gave no reason")


T = TypeVar("T", bound=JoinedTask)


class TaskIterator(Generic[T]):
    """The tasks that a loop takes, for `for` and for `async for`."""

    def __init__(self, desk: Desk, kind: type[T]) -> None:
        self._desk, self._kind = desk, kind

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for item in self._desk.take():
            return self._kind(item)
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        for item in await self._desk.take_async():
            return self._kind(item)
        raise StopAsyncIteration


class TaskLoop(JoinedLoop, Generic[T]):
    """Base of JoinedExplorer and JoinedVerifier. Each has its own names for what users call."""

    _kind: type[T]

    def _begin(self) -> TaskIterator[T]:
        """Return the loop over tasks. It begins with what an interrupted loop had in hand."""
        self._desk.take_back()
        return TaskIterator(self._desk, self._kind)

    def _take(self, most: int, wait_s: float | None) -> list[T]:
        if not isinstance(most, int) or most < 1:  # no tasks would say that no more come
            raise AnswerRefused(f"take: got {most!r}, expected a number of tasks, at least 1; wait until one has room")
        return [self._kind(item) for item in self._desk.take(most, wait_s=wait_s)]

    def _check_open(self, task: T) -> None:
        """Raise AnswerRefused unless the task can be answered, or was lost."""
        self._desk.check()
        if not isinstance(task, self._kind):
            raise AnswerRefused(f"got a {type(task).__name__}, expected a {self._kind.__name__} of this loop")
        if task._item.state is WorkState.answered:
            raise AnswerRefused(f"{task.id}: handed in for the second time, expected once; the first answer counts")

    def _answer(self, task: T, answer: Any) -> bool:
        return self._if_counts(task, self._desk.answer(task._item, answer))

    def _if_counts(self, task: T, counts: bool) -> bool:
        """Return whether what was handed in counts. If not, say so."""
        if not counts:
            log.warning("%s: not this process's any more, so its answer counts for nothing; another has it", task.id)
        return counts
