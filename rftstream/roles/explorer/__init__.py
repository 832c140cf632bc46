"""The explorer: samples rollouts with the newest weights that the trainer announced."""

from __future__ import annotations

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec


def _begin_metrics() -> None:
    from rftstream import metrics
    from rftstream.contracts.rollouts import RolloutStatus
    from rftstream.models.splice import BreakReason

    metrics.REBALANCES.labels(EXPLORER.name)
    metrics.SAMPLED_TOKENS.labels(EXPLORER.name)
    for result in ("saved", "resumed", "lost"):
        metrics.PARTIAL_TOKENS.labels(result)
    metrics.WEIGHTS_FETCH_SECONDS.labels(EXPLORER.name)
    metrics.SAMPLING_HELD_UP_SECONDS.labels(EXPLORER.name)
    for reason in BreakReason:
        metrics.SEGMENT_BREAKS.labels(reason.value)
    for opened in ("branch", "new_conversation", "unknown_history"):
        metrics.SEGMENT_BREAKS.labels(opened)
    for method in ("start", "load", "tools", "reply", "save", "close"):
        metrics.ABANDONED_CALLS.labels(method)
        metrics.ENVIRONMENT_SECONDS.labels(method)
    for status in RolloutStatus:
        metrics.ROLLOUTS.labels(str(status))


EXPLORER = RoleSpec(
    name=RoleName.explorer.value,
    kind=RoleKind.concurrent,
    build="workers.explorer:build",
    summary="tasks -> rollouts",
    consumes=("tasks",),
    follows=("weights", "outcomes"),
    summarised=("weights", "outcomes"),
    produces=("rollouts", "partials", "dead"),
    keeps="partials",
    positions=("tasks",),
    count=lambda config: 0 if config.without_tasks else config.explorer.processes,
    devices=lambda config: tuple(config.explorer.devices),
    parts=lambda config: (("policy", config.explorer.policy),),
    begin_metrics=_begin_metrics,
    digests=("model", "templates"),
)
