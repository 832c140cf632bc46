"""A taskset with exchanged reference answers, to detect a policy that finds a way round a reward.

A policy that learns the task earns no reward here, since the expected answers are wrong. If its reward rises, the
reward gives points for something else.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import ConfigError

SEARCHED = 1_000
"""Number of following problems that are searched for another answer."""


class CanaryTaskset:
    """The problems of a taskset, each with the answer and columns of the next problem that has another answer.

    `open_taskset` makes it for an evaluation with `canary = true`.
    """

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset

    @property
    def digest(self) -> str:
        """Return a digest that differs from the original taskset's."""
        return f"sha256:{hashlib.sha256(f'canary 1 {self._taskset.digest}'.encode()).hexdigest()}"

    def __len__(self) -> int:
        return len(self._taskset)

    def problem(self, index: int) -> Problem:
        """Return the problem with this index and a wrong answer. ConfigError if no other problem has another answer."""
        asked, size = self._taskset.problem(index), len(self._taskset)
        for distance in range(1, min(size, SEARCHED + 1)):
            other = self._taskset.problem((index + distance) % size)
            if _gold(other) != _gold(asked):
                return replace(asked, answer=other.answer, info=other.info)
        looked_at = min(size - 1, SEARCHED)
        raise ConfigError(
            f"canary: problem {index} has the same answer and columns as the next {looked_at:,}, expected some that "
            "differ, since each problem gets those of another; take other problems, or leave `canary` out"
        )


def _gold(problem: Problem) -> object:
    """Return the value that a reward compares with."""
    return problem.answer if problem.answer is not None else dict(problem.info)
