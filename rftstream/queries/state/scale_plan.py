"""How many workers of the roles that share work a backlog asks for: ceil(backlog / max_concurrent).

An autoscaler that reads `rftstream_backlog_rollouts` from Prometheus computes the same (docs/monitoring.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rftstream.config.sections import RunConfig
from rftstream.queries.audits.balance import Balance
from rftstream.queries.formatting import columns
from rftstream.queries.plain import Report
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers(Report):
    """How many workers of a role are wanted. `scale_plan` makes it."""

    role: str
    backlog: int
    """Rollouts whose next step is this role's, in hand or not."""
    max_concurrent: int
    """Rollouts that one worker has in hand at most."""
    most: int
    """More have nothing to do: each owns at least one partition."""
    wanted: int


def scale_plan(config: RunConfig, rollouts: Balance, *, at_least: int = 0) -> tuple[WantedWorkers, ...]:
    """Return how many explorers and verifiers are wanted. `rollouts`: where the pending ones stand. Other roles do not
    share their work: one of each is in force. `at_least` workers are wanted also without a backlog."""
    found = []
    for role, stage, settings in (
        (EXPLORER.name, "to_be_sampled", config.explorer),
        (VERIFIER.name, "sampled", config.verifier),
    ):
        backlog, most = rollouts.pending_by_stage[stage], config.transport.partitions
        wanted = min(most, max(at_least, math.ceil(backlog / settings.max_concurrent)))
        found.append(
            WantedWorkers(role=role, backlog=backlog, max_concurrent=settings.max_concurrent, most=most, wanted=wanted)
        )
    return tuple(found)


def plan_text(plan: tuple[WantedWorkers, ...]) -> str:
    """Return the plan as a table for people."""
    rows = [(one.role, one.backlog, one.max_concurrent, one.most, one.wanted) for one in plan]
    return "\n".join(columns([("role", "backlog", "max_concurrent", "most", "wanted"), *rows], left=1))
