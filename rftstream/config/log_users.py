"""Who a process is to the servers of a log: `{role}` in `transport.options` becomes its user.

A worker is the user of its role. Whoever gives a command is the operator, or, as RFTSTREAM_LOG_USER says, a reader.
`topics acls` asks the servers as the admin, who says what the others may do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rftstream.errors import ConfigError

OPERATOR = "operator"
"""Makes runs, deletes them, and asks something of them: `run`, `resume`, `pause`, `topics apply`, `delete` ..."""

READER = "reader"
"""Only looks: `status`, `audit`, `inspect`, `trace`, `plot`, `studio`, `exporter` ..."""

ADMIN = "admin"
"""Sets the rights of the others: `topics acls`."""

VARIABLE = "RFTSTREAM_LOG_USER"
"""The environment variable that says who gives the commands here."""

PLACEHOLDER = "{role}"
"""Stands for the user in the values of `transport.options`, also in the name of a secret's variable."""


def command_user() -> str:
    """Return who gives the commands of this process: OPERATOR or READER. ConfigError for somebody else."""
    user = os.environ.get(VARIABLE) or OPERATOR
    if user not in (OPERATOR, READER):
        raise ConfigError(f"{VARIABLE}: got {user!r}, expected {OPERATOR} or {READER}; a worker is always its role")
    return user


def options_of(options: Mapping[str, Any], user: str) -> dict[str, Any]:
    """Return the options with the user's name in place of each `{role}`."""
    return {
        key: value.replace(PLACEHOLDER, user) if isinstance(value, str) else value for key, value in options.items()
    }
