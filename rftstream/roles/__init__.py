"""The list of roles. Each role has a folder with its declaration and its step.

To add a role, make a folder with the declaration (a RoleSpec) in `__init__.py` and the step beside it, and add a line
to ROLES. If the step is composed of parts that the run file names, the role also needs a module in `workers/`
(docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftstream.service.role_spec import RoleSpec

ROLES: dict[str, str] = {
    "feeder": "rftstream.roles.feeder:FEEDER",
    "explorer": "rftstream.roles.explorer:EXPLORER",
    "verifier": "rftstream.roles.verifier:VERIFIER",
    "buffer": "rftstream.roles.buffer:BUFFER",
    "trainer": "rftstream.roles.trainer:TRAINER",
    "evaluator": "rftstream.roles.evaluator:EVALUATOR",
    "synthesiser": "rftstream.roles.synthesiser:SYNTHESISER",
}
"""Role name -> its declaration, in the order of the flow."""


def role_spec(name: str) -> RoleSpec:
    """Return the declaration of a role. ConfigError for an unknown name; the error suggests the nearest known one."""
    from rftstream.config.parts import registry
    from rftstream.errors import ConfigError

    if name not in ROLES:
        raise ConfigError(f"role: unknown {name!r}; {registry.suggest(name, ROLES)}")
    spec: RoleSpec = registry.import_path(ROLES[name], what=f"role {name}")
    return spec


def role_specs() -> tuple[RoleSpec, ...]:
    """Return all declarations, in the order of the flow."""
    return tuple(role_spec(name) for name in ROLES)


def count_workers(words: Iterable[str], where: str) -> dict[str, int]:
    """Return role -> number of workers for words `ROLE` or `ROLE=NUMBER`. ConfigError, which begins with `where`, for
    another form, an unknown role, and several workers of a role of which one is in force."""
    from rftstream.errors import ConfigError
    from rftstream.service.role_spec import RoleKind

    found: dict[str, int] = {}
    for word in words:
        role, given, number = word.partition("=")
        try:
            spec = role_spec(role)
        except ConfigError as error:
            form = "" if role.isidentifier() else "; a number is given as explorer=4"
            raise ConfigError(f"{where}: {error}{form}") from None
        if given and not (number.isascii() and number.isdigit() and int(number)):
            raise ConfigError(f"{where}: got {word!r}, expected ROLE or ROLE=NUMBER, e.g. explorer=4")
        found[role] = found.get(role, 0) + (int(number) if given else 1)
        if found[role] > 1 and spec.kind is RoleKind.single:
            raise ConfigError(f"{where}: got {found[role]} of {role}, expected 1: one {role} is in force at a time")
    return found
