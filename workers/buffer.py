"""buffer: verified -> batches, outcomes."""

from __future__ import annotations

from rftstream.config.stages import Stages
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.data.operators.reuse import makes_demonstrations
from rftstream.data.operators.watch import OperatorWatch
from rftstream.models.rendering import open_renderer
from rftstream.roles.buffer import BUFFER
from rftstream.roles.buffer.step import BufferStep
from rftstream.service.role import Log, Role, RoleContext
from workers.parts import demonstrations, model_spec


def build(context: RoleContext) -> Role:
    config = context.config
    stages = Stages.recorded(config) if config.run.imported_versions is not None else Stages.of(config)
    pipeline = ExperiencePipeline.of(config)
    demonstrates = makes_demonstrations(pipeline.reusing.values())
    if pipeline and not context.simulated:
        pipeline.watched_by(OperatorWatch().start())
    step = BufferStep(
        log_=Log(context.transport),
        feeder=config.feeder,
        buffer=config.buffer,
        shares=config.trainer.shares,
        clock=context.clock,
        imported=config.run.imported_from is not None,
        stages=stages,
        demonstrations=demonstrations(context),
        pipeline=pipeline,
        renderer=open_renderer(model_spec(context)) if demonstrates else None,
        feedback=None if config.run.imported_from is not None else config.feedback,
        seed=config.run.seed,
    )
    return Role(spec=BUFFER, step=step)
