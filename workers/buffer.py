"""buffer: verified -> batches, outcomes."""

from __future__ import annotations

from rftstream.roles.buffer import BufferStep
from rftstream.runtime.role import Role, RoleContext


def build(context: RoleContext) -> Role:
    config = context.config
    step = BufferStep(
        feeder=config.feeder,
        buffer=config.buffer,
        shares=config.trainer.shares,
        clock=context.clock,
        imported=config.run.imported_from is not None,
    )
    return Role(
        name="buffer", consumes=("verified",), follows=("control",), produces=("batches", "outcomes", "dead"), step=step
    )
