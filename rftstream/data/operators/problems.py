"""The problems of a run that operators may see before the first draw."""

from __future__ import annotations

from collections.abc import Mapping

from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.sections import RunConfig
from rftstream.data.operators.base import Problems, RunProblems
from rftstream.data.operators.pipeline import TaskPipeline
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


def show_problems(config: RunConfig) -> None:
    """Show all problems to the operators that want to see them before the first draw, as the feeder does. ConfigError
    if one finds a fault."""
    if any(hasattr(place.build_config()[0], "prepare") for place in operator_places(config)):
        tasksets = {name: open_taskset(name, section, config) for name, section in config.tasksets.items()}
        TaskPipeline.of(config, all_problems(config, tasksets))
