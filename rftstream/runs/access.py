"""The rights that the users of a run need on a log on servers, derived from the declarations of the roles.

There is no second table here: a role reads, writes and deletes exactly what its RoleSpec names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rftstream.config import log_users
from rftstream.config.log_users import OPERATOR, READER
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.roles import role_specs
from rftstream.service.role_spec import RoleKind, RoleSpec
from rftstream.transport.access import Grant, Operation, Resource

DEFAULT_PREFIX = "rft-"
"""Prefix of a role's user name, if neither the run file nor the command names users."""

CLUSTER = "kafka-cluster"
"""The name of the cluster in its ACLs."""

LOOKING = (Operation.describe, Operation.describe_configs)


@dataclass(frozen=True, slots=True)
class Right:
    """A right of one kind of user to one resource of a run. `rights_of` makes it; `grants_of` gives it to a user."""

    resource: Resource
    name: str
    """Name without the run's name and the dot."""
    prefixed: bool
    operations: tuple[Operation, ...]


def user_kinds() -> tuple[str, ...]:
    """Return the kinds of users: the roles in the order of the flow, the operator, and the reader."""
    return (*(spec.name for spec in role_specs()), OPERATOR, READER)


def rights_of(kind: str, config: RunConfig) -> list[Right]:
    """Return the rights that users of this kind need."""
    if kind == OPERATOR:
        return list(_of_operator())
    if kind == READER:
        return list(_of_reader())
    return list(_of_role(next(spec for spec in role_specs() if spec.name == kind), config))


def principals(
    config: RunConfig, *, prefix: str | None = None, named: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the user of each kind, `User:NAME`: from `named`, else `prefix` and the kind, else from the run file's
    `sasl_plain_username`, else DEFAULT_PREFIX and the kind. ConfigError for an unknown kind."""
    if unknown := sorted(set(named or {}) - set(user_kinds())):
        raise ConfigError(f"user of {unknown[0]!r}: no such role; known: {', '.join(user_kinds())}")
    template = config.transport.options.get("sasl_plain_username")
    if prefix is not None or not isinstance(template, str):
        template = f"{DEFAULT_PREFIX if prefix is None else prefix}{log_users.PLACEHOLDER}"
    names = {kind: template.replace(log_users.PLACEHOLDER, kind) for kind in user_kinds()} | dict(named or {})
    return {kind: f"User:{name.removeprefix('User:')}" for kind, name in names.items()}


def grants_of(kind: str, principal: str, config: RunConfig, run_id: str) -> list[Grant]:
    """Return the rights that this user needs, with the names of the servers' resources."""
    return sorted(
        Grant(principal, right.resource, _full_name(right, run_id), right.prefixed, operation)
        for right in rights_of(kind, config)
        for operation in right.operations
    )


def _full_name(right: Right, run_id: str) -> str:
    return right.name if right.resource is Resource.cluster else f"{run_id}.{right.name}"


def _of_role(spec: RoleSpec, config: RunConfig) -> Iterator[Right]:
    writes = spec.writes()
    for topic in sorted({*spec.reads(config), *spec.deletes}):
        operations = [Operation.read] if topic in spec.reads(config) else []
        operations += [Operation.write] if topic in writes else []
        operations += [Operation.delete] if topic in spec.deletes else []
        yield Right(Resource.topic, topic, False, tuple(operations))
    # Announced deletions are checked against the ends of other topics, which reveals no record.
    yield Right(Resource.topic, "", True, LOOKING)
    if (group := spec.group()) is not None:
        yield Right(Resource.group, group, False, (Operation.read,))
    if spec.sees_positions:
        yield Right(Resource.group, "", True, (Operation.describe,))
    # A single role has one producer under its name, so that the newest fences the others. Workers of other roles have
    # one producer each, under a name with this prefix.
    is_single = spec.kind is RoleKind.single
    own = spec.name if is_single else f"{spec.name}."
    yield Right(Resource.transactional_id, own, not is_single, (Operation.write,))
    # To wait for the marks of commits in progress.
    yield Right(Resource.transactional_id, "", True, (Operation.describe,))


def _of_operator() -> Iterator[Right]:
    yield Right(
        Resource.topic, "", True, (Operation.read, Operation.write, Operation.create, Operation.delete, *LOOKING)
    )
    yield Right(Resource.group, "", True, (Operation.read, Operation.describe, Operation.delete))
    yield Right(Resource.transactional_id, "", True, (Operation.write, Operation.describe))
    yield Right(Resource.cluster, CLUSTER, False, LOOKING)


def _of_reader() -> Iterator[Right]:
    yield Right(Resource.topic, "", True, (Operation.read, *LOOKING))
    yield Right(Resource.group, "", True, (Operation.describe,))
    yield Right(Resource.transactional_id, "", True, (Operation.describe,))
