"""The synthesiser: asks a model for new problems made from the run's problems, and admits those that pass a check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


def _parts(config: RunConfig) -> tuple[tuple[str, str], ...]:
    section = config.synthesiser
    return () if section is None or section.ask != "policy" else (("policy", section.policy or config.explorer.policy),)


def _begin_metrics() -> None:
    from rftstream import metrics
    from rftstream.contracts.problems import ProblemKind, RejectReason

    metrics.REBALANCES.labels(SYNTHESISER.name)
    for kind in ProblemKind:
        if kind is not ProblemKind.given:
            for result in ("admitted", *RejectReason):
                metrics.SYNTHESISED.labels(str(kind), str(result))


SYNTHESISER = RoleSpec(
    name=RoleName.synthesiser.value,
    kind=RoleKind.concurrent,
    build="workers.synthesiser:build",
    summary="outcomes, verified, tasks or problems -> problems",
    follows=("weights", "problems"),
    produces=("problems", "dead"),
    chosen=lambda config: () if config.synthesiser is None else (config.synthesiser.read,),
    count=lambda config: 0 if config.synthesiser is None else config.synthesiser.count,
    devices=lambda config: () if config.synthesiser is None else (config.synthesiser.device,),
    parts=_parts,
    begin_metrics=_begin_metrics,
    digests=("model",),
)
