"""The roles: which there are, and the steps of each, in a folder of its own.

To add one: a folder with its declaration (a RoleSpec) in `__init__.py` and its step beside it, and a line in
ROLES. A role whose step is composed of parts that the run file names has a module in `workers/`, too
(docs/extending.md).
"""

from __future__ import annotations

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
"""Name -> its declaration, in the order of the flow."""


def role_spec(name: str) -> RoleSpec:
    """Return the declaration of a role. ConfigError names the nearest known one."""
    from rftstream.config.parts import registry
    from rftstream.errors import ConfigError

    if name not in ROLES:
        raise ConfigError(f"role: unknown {name!r}; {registry.suggest(name, ROLES)}")
    spec: RoleSpec = registry.import_path(ROLES[name], what=f"role {name}")
    return spec


def role_specs() -> tuple[RoleSpec, ...]:
    """Return all declarations, in the order of the flow."""
    return tuple(role_spec(name) for name in ROLES)
