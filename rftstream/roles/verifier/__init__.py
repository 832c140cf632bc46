"""The verifier: gives each rollout a verdict, or the reason why it has none."""

from __future__ import annotations

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec


def _begin_metrics() -> None:
    from rftstream import metrics
    from rftstream.contracts.verdicts import UnscorableReason

    metrics.REBALANCES.labels(VERIFIER.name)
    metrics.VERDICTS.labels("scored")
    for kind in ("requests", "prompt_tokens", "completion_tokens", "money"):
        metrics.count_named(metrics.REWARD_SPENT, kind, amount=0)
    for reason in UnscorableReason:
        metrics.VERDICTS.labels(str(reason))
        metrics.DEAD.labels(VERIFIER.name, str(reason))


VERIFIER = RoleSpec(
    name=RoleName.verifier.value,
    kind=RoleKind.concurrent,
    build="workers.verifier:build",
    summary="rollouts -> verified",
    consumes=("rollouts",),
    produces=("verified", "dead"),
    positions=("rollouts",),
    count=lambda config: 0 if config.without_tasks else config.verifier.count,
    begin_metrics=_begin_metrics,
)
