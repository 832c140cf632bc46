"""Rights on a log that servers keep: which users may do what with which topics, groups and transactional ids.

A log whose servers know users has `transport.admin.access`. `runs/access.py` lists the rights that a run needs."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple, Protocol


class Resource(StrEnum):
    """The kinds of resources that a right can apply to, under the names of Kafka's tools."""

    topic = "topic"
    group = "group"
    transactional_id = "transactional-id"
    cluster = "cluster"


class Operation(StrEnum):
    """The operations that a right can allow, under the names of Kafka's tools. Read, Write and Delete include
    Describe."""

    read = "Read"
    write = "Write"
    create = "Create"
    delete = "Delete"
    describe = "Describe"
    describe_configs = "DescribeConfigs"


class Grant(NamedTuple):
    """One right of one user, from any host. Grants are sorted by user, resource, name and operation."""

    principal: str
    """The user as the servers name it, `User:NAME`."""
    resource: Resource
    """Kind of resource that the right applies to."""
    name: str
    """The full name on the servers, or a prefix of names."""
    prefixed: bool
    """Whether the right applies to all names with this prefix."""
    operation: Operation
    """Operation that the right allows."""


class AccessRights(Protocol):
    """The rights on the names of one run. A log whose servers know users has it as `transport.admin.access`."""

    def grants(self) -> tuple[set[Grant], list[str]]:
        """Return the users' rights on names of this run, and a line for each rule that is no Grant: one that denies,
        that is for one host, or that has an operation unknown here. ConfigError if the servers have no rights."""

    def add(self, grants: Collection[Grant]) -> None:
        """Add these rights. ConfigError, naming the missing right, if this user must not."""

    def remove(self, grants: Collection[Grant]) -> None:
        """Remove these rights."""
