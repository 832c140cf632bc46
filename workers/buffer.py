"""buffer: verified -> batches, outcomes."""

from __future__ import annotations

from rftstream.roles.buffer import BufferStep
from rftstream.runtime.role import Role, RoleContext
from rftstream.stages import Stages
from workers.parts import demonstrations


def build(context: RoleContext) -> Role:
    config = context.config
    stages = Stages.recorded(config) if config.run.imported_versions is not None else Stages.of(config)
    step = BufferStep(
        feeder=config.feeder,
        buffer=config.buffer,
        shares=config.trainer.shares,
        clock=context.clock,
        imported=config.run.imported_from is not None,
        stages=stages,
        experts=demonstrations(context),
    )
    return Role(
        name="buffer",
        consumes=("verified",),
        follows=("control", "experts", "steps"),
        produces=("batches", "outcomes", "dead"),
        step=step,
    )
