"""The problems of a run that operators may see before the first draw."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.config.sections import RunConfig
from rftstream.data.operators.base import Problems, RunProblems
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import open_taskset


def all_problems(config: RunConfig, tasksets: Mapping[str, Taskset]) -> RunProblems:
    """Return the problems of the run's tasksets and of its evaluations, which are opened when first needed."""

    def evaluations() -> tuple[Problems, ...]:
        return tuple(
            Problems(name, open_taskset(name, section, config), section.num_tasks)
            for name, section in config.evaluations.items()
        )

    return RunProblems(tuple(Problems(name, taskset) for name, taskset in tasksets.items()), evaluations)
