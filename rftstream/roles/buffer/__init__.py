"""The buffer: gives every admitted group one outcome, and makes batches."""

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec


def _begin_metrics() -> None:
    from rftstream import metrics
    from rftstream.contracts.outcomes import GroupResult

    for result in GroupResult:
        metrics.GROUPS.labels(str(result))


BUFFER = RoleSpec(
    name=RoleName.buffer.value,
    kind=RoleKind.single,
    build="workers.buffer:build",
    summary="verified -> batches, outcomes",
    consumes=("verified",),
    follows=("control", "experts", "steps", "feedback"),
    produces=("batches", "outcomes", "questions", "judgements", "dead", "summaries"),
    positions=("verified",),
    begin_metrics=_begin_metrics,
)
