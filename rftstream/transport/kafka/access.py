"""Rights on the names of a run, as the ACLs of Kafka's authorizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from rftstream.errors import ConfigError, TransportError
from rftstream.transport.access import Grant, Operation, Resource
from rftstream.transport.kafka.connection import KafkaClientFactory

_ALL = "*"
"""The name in a literal pattern that matches all names."""

CLUSTER = "kafka-cluster"
"""The only name of the resource `cluster`."""


class KafkaAccess:
    """`AccessRights` on Kafka. KafkaAdmin makes it and lends it its connection.

    `ask` sends a request with the client, and repeats it while brokers come and go."""

    def __init__(self, clients: KafkaClientFactory, ask: Callable[[str, Callable[[Any], Any]], Any]) -> None:
        self._clients = clients
        self._ask = ask

    def grants(self) -> tuple[set[Grant], list[str]]:
        """Return the rights on names of this run, as described for `AccessRights`. Rules that apply to more than this
        run are among the lines."""
        found: set[Grant] = set()
        others: list[str] = []
        for acl in self._described():
            pattern = acl.resource_pattern
            if not self._concerns(pattern):
                continue
            grant = _grant(acl)
            is_cluster = pattern.resource_type is ResourceType.CLUSTER
            if grant is not None and (is_cluster or self._clients.is_ours(pattern.resource_name)):
                found.add(grant)
            else:
                others.append(_text(acl))
        return found, sorted(others)

    def add(self, grants: Collection[Grant]) -> None:
        """Add rights, as described for `AccessRights`. Existing rights are left alone."""
        wanted = [_acl(grant) for grant in sorted(grants)]
        if not wanted:
            return
        done = self._ask("create ACLs", lambda client: client.create_acls(wanted))
        if done["failed"]:
            self._refuse("create ACLs", done["failed"])

    def remove(self, grants: Collection[Grant]) -> None:
        """Remove rights, as described for `AccessRights`."""
        filters = [_filter(grant) for grant in sorted(grants)]
        if not filters:
            return
        done = self._ask("delete ACLs", lambda client: client.delete_acls(filters))
        if failed := [error for _, _, error in done if error is not kafka_errors.NoError]:
            self._refuse("delete ACLs", failed)

    def _described(self) -> Iterable[ACL]:
        anything = ACLFilter(
            principal=None,
            host=None,
            operation=ACLOperation.ANY,
            permission_type=ACLPermissionType.ANY,
            resource_pattern=ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY),
        )
        acls: list[ACL] = self._ask("describe ACLs", lambda client: _described(client, anything))[0]
        return acls

    def _concerns(self, pattern: ResourcePattern) -> bool:
        """Return whether a rule with this pattern applies to names of this run."""
        name, prefix = pattern.resource_name, self._clients.name("")
        if pattern.resource_type is ResourceType.CLUSTER:
            return True
        if pattern.resource_type.name.lower() not in Resource.__members__:
            return False
        if self._clients.is_ours(name) or name == _ALL:
            return True
        return pattern.pattern_type is ACLResourcePatternType.PREFIXED and prefix.startswith(name)

    def _refuse(self, what: str, errors: Collection[Any]) -> None:
        error = next(iter(errors))
        error = error() if isinstance(error, type) else error
        if isinstance(error, kafka_errors.AuthorizationError):
            raise _not_allowed(self._clients, what)
        raise TransportError(f"{what}: {type(error).__name__} from {self._clients.servers}")


def _described(client: Any, anything: ACLFilter) -> Any:
    """Return all ACLs. ConfigError, which is not retried, if the servers have none."""
    try:
        return client.describe_acls(anything)
    except kafka_errors.SecurityDisabledError:
        raise ConfigError(
            "transport.servers: these brokers have no authorizer, so everybody may do everything, expected one that "
            "keeps ACLs; set authorizer.class.name in the brokers' properties"
        ) from None
    except kafka_errors.ClusterAuthorizationFailedError:
        raise ConfigError(
            "describe ACLs: this user may not; do it as a user with Describe and Alter on the cluster, or give "
            "the output of --format kafka-acls to somebody who may"
        ) from None


def _not_allowed(clients: KafkaClientFactory, what: str) -> ConfigError:
    return ConfigError(
        f"{what}: {clients.servers} does not allow it to this user; do it as a user with Alter on the cluster, or give "
        "the output of --format kafka-acls to somebody who may"
    )


# Operations and resources have the same names as in the client, except for capitals.


def _acl(grant: Grant) -> ACL:
    return ACL(
        grant.principal,
        _ALL,
        ACLOperation[grant.operation.name.upper()],
        ACLPermissionType.ALLOW,
        ResourcePattern(ResourceType[grant.resource.name.upper()], grant.name, _pattern_type(grant)),
    )


def _filter(grant: Grant) -> ACLFilter:
    return ACLFilter(
        principal=grant.principal,
        host=_ALL,
        operation=ACLOperation[grant.operation.name.upper()],
        permission_type=ACLPermissionType.ALLOW,
        resource_pattern=ResourcePatternFilter(
            ResourceType[grant.resource.name.upper()], grant.name, _pattern_type(grant)
        ),
    )


def _pattern_type(grant: Grant) -> ACLResourcePatternType:
    return ACLResourcePatternType.PREFIXED if grant.prefixed else ACLResourcePatternType.LITERAL


def _grant(acl: ACL) -> Grant | None:
    """Return the rule as a Grant, or None if it says more or less than one."""
    pattern = acl.resource_pattern
    operation = Operation.__members__.get(acl.operation.name.lower())
    if operation is None or acl.host != _ALL or acl.permission_type is not ACLPermissionType.ALLOW:
        return None
    return Grant(
        acl.principal,
        Resource[pattern.resource_type.name.lower()],
        pattern.resource_name,
        pattern.pattern_type is ACLResourcePatternType.PREFIXED,
        operation,
    )


def _text(acl: ACL) -> str:
    pattern = acl.resource_pattern
    kind = "prefixed " if pattern.pattern_type is ACLResourcePatternType.PREFIXED else ""
    verb = "may" if acl.permission_type is ACLPermissionType.ALLOW else "may not"
    host = "" if acl.host == _ALL else f" from {acl.host}"
    operation = "".join(part.capitalize() for part in acl.operation.name.split("_"))
    resource = pattern.resource_type.name.lower().replace("_", " ")
    return f"{acl.principal}{host} {verb} {operation} on the {resource} {kind}{pattern.resource_name}"
