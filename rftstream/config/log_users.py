"""The user name of a process on the servers of a log. It replaces `{role}` in `transport.options`.

A worker has the name of its role. A command runs as the operator, or as a reader if RFTSTREAM_LOG_USER says so. `topics
acls` runs as the admin, who sets the rights of the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rftstream.errors import ConfigError

OPERATOR = "operator"
"""Makes runs, deletes them, and sends them requests: `run`, `resume`, `pause`, `topics apply`, `delete` ..."""

READER = "reader"
"""Only reads: `status`, `audit`, `inspect`, `trace`, `plot`, `studio`, `exporter` ..."""

ADMIN = "admin"
"""Sets the rights of the others: `topics acls`."""

VARIABLE = "RFTSTREAM_LOG_USER"
"""Environment variable with the user that runs commands here."""

PLACEHOLDER = "{role}"
"""Placeholder for the user in the values of `transport.options`, also in the name of a secret's variable."""


def command_user() -> str:
    """Return the user of this process's command: OPERATOR or READER. ConfigError for any other name."""
    user = os.environ.get(VARIABLE) or OPERATOR
    if user not in (OPERATOR, READER):
        raise ConfigError(f"{VARIABLE}: got {user!r}, expected {OPERATOR} or {READER}; a worker is always its role")
    return user


def options_of(options: Mapping[str, Any], user: str) -> dict[str, Any]:
    """Return the options with the user's name in place of each `{role}`."""
    return {
        key: value.replace(PLACEHOLDER, user) if isinstance(value, str) else value for key, value in options.items()
    }
