"""Checks the disk and memory that the run will need."""

from __future__ import annotations

from contextlib import closing

from rftstream.algorithms.base import Algorithm
from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.algorithms.requirements import critic_folder, the_critic
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec, PolicySpec
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.errors import LogRefused, RftError, TransportError
from rftstream.models.spec import ModelSpec
from rftstream.preflight.checks.check_report import CheckReport
from rftstream.preflight.estimate import DiskEstimate, ModelSizes, estimate_disk
from rftstream.preflight.memory import MemoryEstimate, estimate_memory, longest_row
from rftstream.preflight.readiness import folder_of
from rftstream.runs.folder import lies_in_folder, open_transport
from rftstream.runs.log_settings import dangers, in_words


def disk_of(config: RunConfig, report: CheckReport) -> DiskEstimate | None:
    """Estimate what the run needs of the disk, or return None if no prompt could be rendered."""
    lines = [line for line in report.tasksets if line.kind == "taskset"]
    samples = {
        line.name: (line.first_problem, len(line.first.token_ids))
        for line in lines
        if line.first is not None and line.first_problem is not None
    }
    if not samples or report.model is None:
        return None
    return estimate_disk(
        config,
        report.model,
        report.context,
        samples,
        {line.name: line.problems for line in lines},
        _critic(config, report.model),
    )


def memory_of(config: RunConfig, report: CheckReport) -> MemoryEstimate | None:
    """Estimate the run's memory, or return None for engines that need weights, and a model without any. Of parts whose
    declaration does not say `is_estimated` only the rollouts in hand are counted."""
    if report.model is None or report.disk is None:
        return None
    prompts = {line.name: line.longest for line in report.tasksets if line.kind == "taskset"}
    evaluator = config.evaluator.policy or config.explorer.policy
    named = {
        "backend": ("backend", config.trainer.backend),
        "policy": ("policy", config.explorer.policy),
        "evaluator": ("policy", evaluator),
    }
    spec_types: dict[str, type[BackendSpec | PolicySpec]] = {"backend": BackendSpec, "policy": PolicySpec}
    known = {
        place: config.build_part(kind, name)[1]
        for place, (kind, name) in named.items()
        if registry.find_spec(spec_types[kind], name).is_estimated
    }
    if known and not report.disk.parameters:
        return None
    longest = longest_row(config, prompts, report.context)
    needs = frozenset[str]().union(*(one.needs for one in _built(config)))
    held = tuple(dict.fromkeys(one for line in report.tasksets for one in line.held))
    tasks = {line.name: line.problems for line in report.tasksets if line.kind == "evaluation"}
    return estimate_memory(config, report.model, longest, needs, known, _critic(config, report.model), held, tasks)


def _critic(config: RunConfig, spec: ModelSpec) -> ModelSizes | None:
    """Return the sizes of the critic, or None if no algorithm has one."""
    critic = the_critic(_built(config))
    return None if critic is None else ModelSizes.of(critic_folder(config, critic, spec), None)


def _built(config: RunConfig) -> list[Algorithm]:
    """Return the algorithm of each stage."""
    return [build_algorithm(config, stage.where) for stage in Stages.of(config).all]


# --------------------------------------------------------------------------------------------------- topics there


def look_at_topics(config: RunConfig) -> tuple[list[str], str]:
    """Return the problems with the topics of the newest run here, or of the first one; or why nobody answers.

    Without servers or topics, there are no findings.
    """
    if lies_in_folder(config):
        return [], ""
    folder = folder_of(config)
    try:
        with closing(open_transport(config, folder, create=True)) as transport:
            found = dangers(transport, config, begun=False)
    except LogRefused as error:
        return [str(error)], ""
    except TransportError as error:
        return [], f"transport: the topics were not looked at: {error}"
    except RftError as error:
        return [str(error)], ""
    return [in_words(folder.run_id, found)] if found else [], ""
