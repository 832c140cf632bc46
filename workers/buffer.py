"""buffer: verified -> batches, outcomes."""

from __future__ import annotations

from rftstream.roles.buffer import BufferStep
from rftstream.runtime.role import Role, RoleContext
from workers.parts import demonstrations


def build(context: RoleContext) -> Role:
    config = context.config
    experts = demonstrations(context)
    step = BufferStep(
        feeder=config.feeder,
        buffer=config.buffer,
        shares=config.trainer.shares,
        clock=context.clock,
        imported=config.run.imported_from is not None,
        experts=experts,
        expert_ratio=config.experts.ratio if config.experts is not None else 0.0,
        experts_per_batch=config.experts.per_batch if config.experts is not None and config.without_tasks else None,
    )
    return Role(
        name="buffer",
        consumes=("verified",),
        follows=("control", "experts", "steps"),
        produces=("batches", "outcomes", "dead"),
        step=step,
    )
