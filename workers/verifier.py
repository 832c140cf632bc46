"""verifier: rollouts -> verified."""

from __future__ import annotations

from rftstream.roles.verifier import VERIFIER
from rftstream.roles.verifier.groups import WaitingGroups
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.role import Role, RoleContext
from workers.parts import scorer


def build(context: RoleContext) -> Role:
    settings = context.config.verifier
    step = VerifierStep(
        scorer=scorer(context),
        max_concurrent=settings.max_concurrent,
        max_dead_share=settings.max_dead_share,
        clock=context.clock,
        groups=WaitingGroups(context.transport, context.clock, settings),
    )
    return Role(spec=VERIFIER, step=step)
