"""The feeder: admits groups of tasks at the pace that the log allows, and makes the run."""

from rftstream.contracts.role_names import RoleName
from rftstream.service.role_spec import RoleKind, RoleSpec

FEEDER = RoleSpec(
    name=RoleName.feeder.value,
    kind=RoleKind.single,
    build="workers.feeder:build",
    summary="taskset -> tasks",
    follows=("steps", "outcomes", "problems", "control"),
    looks_up=("experts",),
    produces=("tasks", "control"),
    positions=("steps", "outcomes"),
    makes_the_run=True,
)
