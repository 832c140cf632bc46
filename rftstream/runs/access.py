"""The rights that the users of a run need on a log that servers keep, by what the declarations of the roles say.

Nothing here is a second table: a role reads, writes and deletes what its RoleSpec names, and no more.
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
"""Before the role, in the name of its user, where neither the run file nor the command names users."""

CLUSTER = "kafka-cluster"
"""The name of the cluster in its ACLs."""

LOOKING = (Operation.describe, Operation.describe_configs)


@dataclass(frozen=True, slots=True)
class Right:
    """A right of one kind of user to one thing of a run. `rights_of` makes it; `grants_of` gives it to a user."""

    resource: Resource
    name: str
    """Bare: without the run's name and the dot."""
    prefixed: bool
    operations: tuple[Operation, ...]


def user_kinds() -> tuple[str, ...]:
    """Return the kinds of users: the roles in the order of the flow, the operator, and those who only look."""
    return (*(spec.name for spec in role_specs()), OPERATOR, READER)


def rights_of(kind: str, config: RunConfig) -> list[Right]:
    """Return what users of this kind need."""
    if kind == OPERATOR:
        return list(_of_operator())
    if kind == READER:
        return list(_of_reader())
    return list(_of_role(next(spec for spec in role_specs() if spec.name == kind), config))


def principals(
    config: RunConfig, *, prefix: str | None = None, named: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the user of each kind, `User:NAME`: as `named` says, else `prefix` and the kind, else as the run file says
    by `sasl_plain_username`, else DEFAULT_PREFIX and the kind. ConfigError for a kind that there is not."""
    if unknown := sorted(set(named or {}) - set(user_kinds())):
        raise ConfigError(f"user of {unknown[0]!r}: no such role; known: {', '.join(user_kinds())}")
    template = config.transport.options.get("sasl_plain_username")
    if prefix is not None or not isinstance(template, str):
        template = f"{DEFAULT_PREFIX if prefix is None else prefix}{log_users.PLACEHOLDER}"
    names = {kind: template.replace(log_users.PLACEHOLDER, kind) for kind in user_kinds()} | dict(named or {})
    return {kind: f"User:{name.removeprefix('User:')}" for kind, name in names.items()}


def grants_of(kind: str, principal: str, config: RunConfig, run_id: str) -> list[Grant]:
    """Return the rights that this user needs, with the names that they have on the servers."""
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
    # What was said to be deleted is judged by the ends of other topics; nobody learns a record by it.
    yield Right(Resource.topic, "", True, LOOKING)
    if (group := spec.group()) is not None:
        yield Right(Resource.group, group, False, (Operation.read,))
    if spec.sees_positions:
        yield Right(Resource.group, "", True, (Operation.describe,))
    # A single role has one producer under its name, so that the newest fences the others; workers of other roles have
    # one each, under a name that begins so.
    is_single = spec.kind is RoleKind.single
    own = spec.name if is_single else f"{spec.name}."
    yield Right(Resource.transactional_id, own, not is_single, (Operation.write,))
    # To wait for the marks of commits that are on their way.
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
