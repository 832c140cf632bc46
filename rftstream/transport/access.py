"""Rights on a log that servers keep: who may do what with which topics, groups and transactional ids.

A log whose servers know users has `transport.admin.access`. `runs/access.py` says which rights a run needs.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple, Protocol


class Resource(StrEnum):
    """The kinds of things that a right can be about, as Kafka's tools name them."""

    topic = "topic"
    group = "group"
    transactional_id = "transactional-id"
    cluster = "cluster"


class Operation(StrEnum):
    """The operations that a right can allow, as Kafka's tools name them. Read, Write and Delete include Describe."""

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
    """Kind of thing that the right is about."""
    name: str
    """The full name on the servers, or how the names begin."""
    prefixed: bool
    """Whether it holds for all names that begin so."""
    operation: Operation
    """Operation that the right allows."""


class AccessRights(Protocol):
    """The rights on the names of one run. A log whose servers know users has it as `transport.admin.access`."""

    def grants(self) -> tuple[set[Grant], list[str]]:
        """Return the rights that users have on names of this run, and a line for each rule that is no Grant: one that
        denies, that is for one host, or whose operation is none of ours. ConfigError if the servers know no rights."""

    def add(self, grants: Collection[Grant]) -> None:
        """Give these rights. ConfigError, which says what is missing, if this user may not."""

    def remove(self, grants: Collection[Grant]) -> None:
        """Take these rights away."""
