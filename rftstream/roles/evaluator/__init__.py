"""The evaluator: evaluates the versions that are due or were requested."""

from __future__ import annotations

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec


def _begin_metrics() -> None:
    from rftstream import metrics

    metrics.WEIGHTS_FETCH_SECONDS.labels(EVALUATOR.name)


EVALUATOR = RoleSpec(
    name=RoleName.evaluator.value,
    kind=RoleKind.single,
    build="workers.evaluator:build",
    summary="weights -> evals",
    consumes=("weights",),
    follows=("control",),
    produces=("evals",),
    count=lambda config: config.evaluator.count if config.evaluations else 0,
    devices=lambda config: (config.evaluator.device,),
    parts=lambda config: (("policy", config.evaluator.policy or config.explorer.policy),),
    begin_metrics=_begin_metrics,
    outlives_the_run=True,
    digests=("model",),
)
