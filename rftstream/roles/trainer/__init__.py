"""The trainer: trains each batch and publishes the resulting version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


def _parts(config: RunConfig) -> tuple[tuple[str, str], ...]:
    from rftstream.config.sections import name_of_part

    algorithms = sorted({name_of_part(named, where) for where, named in config.algorithms_named().items()})
    return (("backend", config.trainer.backend), *(("algorithm", name) for name in algorithms))


def _count(config: RunConfig) -> int:
    from rftstream.config.parts import registry
    from rftstream.config.parts.part_specs import BackendSpec

    return 0 if registry.find_spec(BackendSpec, config.trainer.backend).is_joined else 1


def _begin_metrics() -> None:
    from rftstream import metrics

    for result in ("trained", "skipped"):
        metrics.STEPS.labels(result)


TRAINER = RoleSpec(
    name=RoleName.trainer.value,
    kind=RoleKind.single,
    build="workers.trainer:build",
    summary="batches -> weights, steps",
    consumes=("batches",),
    follows=("evals", "control"),
    looks_up=("outcomes", "experts"),
    produces=("weights", "steps", "control", "summaries"),
    deletes=("batches", "tasks", "rollouts", "verified"),
    sees_positions=True,
    count=_count,
    devices=lambda config: (config.trainer.device,),
    parts=_parts,
    begin_metrics=_begin_metrics,
    outlives_the_run=True,
    digests=("model", "weights"),
)
