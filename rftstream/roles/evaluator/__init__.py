"""The evaluator: evaluates the versions that are due or were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


def _count(config: RunConfig) -> int:
    return config.evaluator.count if config.evaluations else 0


def _devices(config: RunConfig) -> tuple[str, ...]:
    return (config.evaluator.device,)


def _parts(config: RunConfig) -> tuple[tuple[str, str], ...]:
    return (("policy", config.evaluator.policy or config.explorer.policy),)


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
    count=_count,
    devices=_devices,
    parts=_parts,
    begin_metrics=_begin_metrics,
    outlives_the_run=True,
    digests=("model",),
)
