"""feeder: taskset -> tasks."""

from __future__ import annotations

from functools import cache

from rftstream.contracts.tasks import Problem
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.operators.problems import all_problems
from rftstream.data.operators.watch import OperatorWatch
from rftstream.data.tasksets.row_index import kept_in
from rftstream.roles.feeder import FEEDER
from rftstream.roles.feeder.draws import open_sources, tasksets_of
from rftstream.roles.feeder.step import FeederStep
from rftstream.runs.manifest import check_same_run, data_digests, make_manifest
from rftstream.service.role import Log, Role, RoleContext
from rftstream.weights.stores.media import MediaStore
from workers.parts import model_spec


def build(context: RoleContext) -> Role:
    config = context.config
    spec = model_spec(context)
    with kept_in(context.folder.index):
        sources, context_length = open_sources(config, spec)

    @cache
    def digests() -> dict[str, str]:
        return data_digests(config, spec, tasksets_of(sources))

    @cache
    def media() -> MediaStore:
        return MediaStore(context.open_store())

    def keep(problem: Problem) -> Problem:
        """Copy the problem's images into the store. The store is opened at the first image, so feeders of text need no
        access to it."""
        return media().keep_problem(problem) if any(message.media for message in problem.messages) else problem

    pipeline = TaskPipeline.of(config, all_problems(config, tasksets_of(sources)))
    if pipeline and not context.simulated:
        pipeline.watched_by(OperatorWatch().start())
    step = FeederStep(
        log_=Log(context.transport),
        config=config,
        sources=sources,
        context=context_length,
        make_manifest=lambda: make_manifest(config, context.folder.run_id, digests(), context.clock.now()),
        check_same_run=lambda theirs: check_same_run(theirs, config, digests()),
        clock=context.clock,
        keep=keep,
        pipeline=pipeline,
    )
    return Role(spec=FEEDER, step=step)
