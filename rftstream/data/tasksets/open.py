"""Opening tasksets: from the run file's `source = ...` to a taskset. The order of its problems comes from order.py."""

from __future__ import annotations

from rftstream.config.data_pipelines.synthesis import grows
from rftstream.config.parts import registry
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection
from rftstream.data.tasksets import TASKSETS
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.canary import CanaryTaskset
from rftstream.data.tasksets.order import mix, order
from rftstream.errors import ConfigError

__all__ = ["grows", "mix", "open_taskset", "order"]


def open_taskset(name: str, section: TasksetSection | EvaluationSection, config: RunConfig) -> Taskset:
    """Open the taskset of `[tasksets.NAME]` or `[evaluations.NAME]`. ConfigErrors name the section."""
    kind = "tasksets" if isinstance(section, TasksetSection) else "evaluations"
    where = f"{kind}.{name.removeprefix('eval:')}"
    scheme, colon, location = section.source.partition(":")
    if scheme in TASKSETS:
        part = registry.resolve("taskset", scheme, where=f"{where}.source")
    elif colon and _is_module(scheme) and location.isidentifier():
        part, location = registry.resolve("taskset", section.source, where=f"{where}.source"), ""
    else:
        kind_of_file = section.source.rpartition(".")[2]
        if not colon and kind_of_file in TASKSETS:
            raise ConfigError(
                f"{where}.source: got {section.source!r}, expected KIND:PATH; "
                f"did you mean '{kind_of_file}:{section.source}'?"
            )
        raise ConfigError(
            f"{where}.source: unknown {section.source!r}; {registry.suggest(scheme, TASKSETS)} "
            "(or 'module:Class' of your own)"
        )
    part_config = registry.build_config(part, section.options, where=f"{where}.options")
    try:
        taskset: Taskset = part(part_config, location=location, columns=section.columns, system=section.system)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if grows(section.source):
        if kind == "evaluations":
            raise ConfigError(f"{where}.source: {section.source!r} grows, expected problems that stay the same")
        return taskset
    if len(taskset) < 1:
        raise ConfigError(f"{where}: {section.source!r} has no problems; expected at least one")
    return CanaryTaskset(taskset) if isinstance(section, EvaluationSection) and section.canary else taskset


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
