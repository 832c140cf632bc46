"""feeder: taskset -> tasks."""

from __future__ import annotations

from functools import cache

from rftstream.algorithms.requirements import has_greedy_sibling
from rftstream.config.loader import sampling_for
from rftstream.config.sections import name_of_part
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.tasksets.open import open_taskset
from rftstream.models.rendering import open_renderer
from rftstream.roles.feeder import FEEDER
from rftstream.roles.feeder.step import FeederStep, Source
from rftstream.runs.manifest import check_same_run, data_digests, make_manifest
from rftstream.service.role import Log, Role, RoleContext
from rftstream.weights.media import MediaStore
from workers.parts import context_length, model_spec, own_renderers


def build(context: RoleContext) -> Role:
    config = context.config
    spec = model_spec(context)
    renderer = open_renderer(spec)
    own = own_renderers(spec, config.tasksets)
    greedy = has_greedy_sibling(config)
    sources = {
        name: Source(
            taskset=open_taskset(name, section, config),
            weight=section.weight,
            sampling=sampling_for(config, section.sampling, where=f"tasksets.{name}.sampling"),
            environment=name_of_part(section.environment, f"tasksets.{name}.environment"),
            too_long=section.too_long,
            shuffle=section.shuffle,
            passes=section.passes,
            renderer=own.get(name, renderer),
            greedy_baseline=greedy,
        )
        for name, section in config.tasksets.items()
    }

    @cache
    def digests() -> dict[str, str]:
        return data_digests(config, spec, {name: source.taskset for name, source in sources.items()})

    @cache
    def media() -> MediaStore:
        return MediaStore(context.open_store())

    def keep(problem: Problem) -> Problem:
        """The store is opened when there is an image: feeders of text need no access to it."""
        return media().keep_problem(problem) if any(message.media for message in problem.messages) else problem

    step = FeederStep(
        log_=Log(context.transport),
        config=config,
        sources=sources,
        context=context_length(spec, renderer),
        make_manifest=lambda: make_manifest(config, context.folder.run_id, digests(), context.clock.now()),
        check_same_run=lambda theirs: check_same_run(theirs, config, digests()),
        clock=context.clock,
        keep=keep,
        pipeline=TaskPipeline.of(config),
    )
    return Role(spec=FEEDER, step=step)
