"""verifier: rollouts -> verified."""

from __future__ import annotations

from rftstream.roles.verifier import VerifierStep
from rftstream.runtime.role import Role, RoleContext
from workers.parts import scorer


def build(context: RoleContext) -> Role:
    settings = context.config.verifier
    step = VerifierStep(
        scorer=scorer(context),
        max_concurrent=settings.max_concurrent,
        max_dead_share=settings.max_dead_share,
        clock=context.clock,
    )
    return Role(name="verifier", consumes=("rollouts",), follows=(), produces=("verified", "dead"), step=step)
