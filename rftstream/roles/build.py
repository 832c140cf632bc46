"""Builds the service of a role by its name: the step, composed by `workers`, in the loop of its kind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from rftstream.config.parts import registry
from rftstream.errors import ConfigError
from rftstream.roles import role_spec
from rftstream.service.loops.concurrent import ConcurrentService
from rftstream.service.loops.single import SingleService
from rftstream.service.role import Role, RoleContext
from rftstream.service.role_spec import RoleKind, RoleSpec
from rftstream.service.service import Service

LOOPS: dict[RoleKind, type[Service]] = {
    RoleKind.concurrent: ConcurrentService,
    RoleKind.single: SingleService,
}
"""Kind of role -> the loop that drives it."""


def role_builder(role: str | RoleSpec) -> Callable[[RoleContext], Role]:
    """Return the function that composes a role. `role` is a name in ROLES, or any declaration.

    ConfigError if there is no such role, or if the module `workers` is not ours."""
    spec = role_spec(role) if isinstance(role, str) else role
    path = spec.build
    try:
        build: Callable[[RoleContext], Role] = registry.import_path(path, what=f"role {spec.name}")
    except ConfigError as error:
        if not path.startswith("workers."):
            raise
        found = importlib.util.find_spec("workers")
        raise ConfigError(
            f"workers: found a foreign package of this name at {found.origin if found else '?'}, expected "
            "rftstream's; rename it or move it out of the import path"
        ) from error
    return build


def service_of(role: Role, context: RoleContext) -> Service:
    """Return the loop of the role's kind around its step. TransportError if the log does not answer; the caller then
    tries again, or closes the step."""
    return LOOPS[role.spec.kind](role, context)
